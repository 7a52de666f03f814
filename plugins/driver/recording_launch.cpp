// The kernel's stand-in of the recording library: it keeps what it was asked to run, so that a test without a GPU sees
// which operand went where.
#include "kernel/moe_finalize_launch.h"

#define DRIVER_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

thread_local moetrt_moe_finalize_params recordedParams;
thread_local void* recordedStream;

}  // namespace

namespace moetrt {

cudaError_t launchMoEFinalize(const moetrt_moe_finalize_params& params, cudaStream_t stream) {
    recordedParams = params;
    recordedStream = stream;
    return cudaSuccess;
}

}  // namespace moetrt

/// What the last launch on this thread was given.
DRIVER_EXPORT void moetrt_recorded(moetrt_moe_finalize_params* params, void** stream) {
    *params = recordedParams;
    *stream = recordedStream;
}
