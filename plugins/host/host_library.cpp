// libmoetrt_host.so: the kernel on the CPU, for parity checks on machines without a GPU. The calls of
// moetrt/moe_finalize.h that run a tail, over the host build of the kernel's own source; "device" memory is the
// process's.
#include <cuda_runtime.h>

#include <string>

#include "moe_finalize_launch.h"

#define MOETRT_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

thread_local std::string lastError;

}  // namespace

MOETRT_EXPORT int32_t moetrt_abi_version(void) {
    return MOETRT_ABI_VERSION;
}

MOETRT_EXPORT const char* moetrt_last_error(void) {
    return lastError.c_str();
}

/// Nothing is ever shown: callers read moetrt_last_error.
MOETRT_EXPORT int32_t moetrt_show_errors(int32_t) {
    return 0;
}

MOETRT_EXPORT int32_t moetrt_moe_finalize_with_tactic(const moetrt_moe_finalize_params* params, int32_t tactic,
                                                      void* stream) {
    lastError = moetrt::checkMoEFinalize(*params);
    if (!lastError.empty()) {
        return 1;
    }
    const moetrt::Device* device = nullptr;
    cudaError_t error = moetrt::currentDevice(device);
    if (error == cudaSuccess) {
        const moetrt::Tactic* const chosen = tactic == MOETRT_TACTIC_DEFAULT
                                                 ? *moetrt::usefulTactics(*params, device->properties).begin()
                                                 : moetrt::findTactic(tactic);
        if (chosen == nullptr || !moetrt::runsTactic(*chosen, *params, device->properties)) {
            lastError = "tactic " + (chosen == nullptr ? std::to_string(tactic) : std::string(chosen->name)) +
                        " does not run these params";
            return 1;
        }
        error = moetrt::launchMoEFinalize(*params, *device, *chosen, static_cast<cudaStream_t>(stream));
    }
    if (error != cudaSuccess) {
        lastError = cudaGetErrorString(error);
    }
    return static_cast<int32_t>(error);
}

MOETRT_EXPORT int32_t moetrt_moe_finalize(const moetrt_moe_finalize_params* params, void* stream) {
    return moetrt_moe_finalize_with_tactic(params, MOETRT_TACTIC_DEFAULT, stream);
}
