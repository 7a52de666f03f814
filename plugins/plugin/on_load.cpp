// What happens when the library is opened: its plugins are registered, whoever opened it.
#include "registration.h"
#include "tensorrt_library.h"

namespace moetrt {
namespace {

__attribute__((constructor)) void registerWhereNobodyAsks() {
    if (registerInLoadedLibraries() == 0 && openTensorRTLibrary()) {
        registerInLoadedLibraries();
    }
}

}  // namespace
}  // namespace moetrt
