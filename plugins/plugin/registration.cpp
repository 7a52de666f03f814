// The three ways into TensorRT's plugin registries, and why no one of them is enough.
//
// 1. IPluginRegistry::loadLibrary (trtexec --dynamicPlugins, load_library in Python) opens this file, hands over a
//    logger finder and registers what getCreators answers.
// 2. A bare dlopen (Polygraphy's --plugins, ctypes.CDLL) asks nothing: the constructor below registers.
// 3. moetrt_register_creators does so on request, for a TensorRT that was loaded after this file.
#include "registration.h"

#include <NvInferRuntime.h>

#include <array>
#include <cstdlib>
#include <mutex>
#include <string>
#include <string_view>

#include "errors.h"
#include "finalize_creator.h"
#include "registry.h"
#include "tensorrt_library.h"

#define MOETRT_EXPORT extern "C" __attribute__((visibility("default")))

namespace moetrt {
namespace {

FinalizeCreator& creator(size_t index) {
    static std::array<FinalizeCreator, 2> list{FinalizeCreator(kOperators[0]), FinalizeCreator(kOperators[1])};
    return list[index];
}

}  // namespace

int32_t registerInLoadedLibraries() {
    static std::mutex mutex;
    const std::lock_guard<std::mutex> lock(mutex);
    int32_t count = 0;
    for (const TensorRTLibrary& library : loadedTensorRTLibraries()) {
        const Registry registry(library);
        if (!registry.known()) {
            refuse("TensorRT " + std::to_string(library.version.major) + "." + std::to_string(library.version.minor) +
                   " ('" + library.path + "') is not known; 10, 11 and TensorRT-RTX from 1.7 are taken");
            return -1;
        }
        for (size_t i = 0; i < kOperators.size(); ++i) {
            if (!registry.has(creator(i)) && !registry.add(creator(i))) {
                refuse(std::string(kOperators[i].name) + " was not taken by the plugin registry of '" + library.path + "'");
                return -1;
            }
        }
        ++count;
    }
    return count;
}

namespace {

__attribute__((constructor)) void registerWhereNobodyAsks() {
    if (registerInLoadedLibraries() == 0 && openTensorRTLibrary()) {
        registerInLoadedLibraries();
    }
}

}  // namespace
}  // namespace moetrt

MOETRT_EXPORT void setLoggerFinder(nvinfer1::ILoggerFinder* finder) {
    if (getenv("DBG")) fprintf(stderr, "setLoggerFinder %p\n", (void*)finder);
    moetrt::setTensorRTLoggerFinder(finder);
}

MOETRT_EXPORT nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& count) {
    if (getenv("DBG")) fprintf(stderr, "getCreators\n");
    static const std::array<nvinfer1::IPluginCreatorInterface*, 2> list{&moetrt::creator(0), &moetrt::creator(1)};
    count = static_cast<int32_t>(list.size());
    if (getenv("EMPTY")) count = 0;
    return list.data();
}

MOETRT_EXPORT nvinfer1::IPluginCreator* const* getPluginCreators(int32_t& count) {
    if (getenv("DBG")) fprintf(stderr, "getPluginCreators\n");
    count = 0;
    return nullptr;
}
