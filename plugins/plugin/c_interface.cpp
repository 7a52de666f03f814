// The library's C interface, for callers without TensorRT.
#include "errors.h"
#include "kernel/moe_finalize_launch.h"
#include "moetrt/moe_finalize.h"
#include "moetrt/registration.h"
#include "registration.h"
#include "run.h"

#define MOETRT_EXPORT extern "C" __attribute__((visibility("default")))

namespace moetrt {

std::string runMoEFinalize(const moetrt_moe_finalize_params& params, cudaStream_t stream) {
    if (std::string line = checkMoEFinalize(params); !line.empty()) {
        return line;
    }
    const cudaError_t error = launchMoEFinalize(params, stream);
    if (error == cudaSuccess) {
        return "";
    }
    return std::string("the kernel was not started: ") + cudaGetErrorName(error) + ", " + cudaGetErrorString(error);
}

}  // namespace moetrt

MOETRT_EXPORT int32_t moetrt_abi_version(void) {
    return MOETRT_ABI_VERSION;
}

MOETRT_EXPORT const char* moetrt_version(void) {
    return MOETRT_VERSION;
}

MOETRT_EXPORT const char* moetrt_last_error(void) {
    return moetrt::lastRefusal();
}

MOETRT_EXPORT void moetrt_clear_last_error(void) {
    moetrt::clearRefusal();
}

MOETRT_EXPORT int32_t moetrt_show_errors(int32_t show) {
    return moetrt::showRefusals(show != 0) ? 1 : 0;
}

MOETRT_EXPORT int32_t moetrt_register_creators(void) {
    return moetrt::registerInLoadedLibraries();
}

MOETRT_EXPORT int32_t moetrt_moe_finalize(const moetrt_moe_finalize_params* params, void* stream) {
    const std::string line = params == nullptr ? "params is null, taken is a moetrt_moe_finalize_params"
                                               : moetrt::runMoEFinalize(*params, static_cast<cudaStream_t>(stream));
    if (line.empty()) {
        return 0;
    }
    moetrt::refuse("moetrt_moe_finalize: " + line);
    return 1;
}
