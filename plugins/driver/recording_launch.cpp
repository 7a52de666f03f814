// The kernel's stand-in of the recording library: it keeps what it was asked to run, so that a test without a GPU sees
// which operand went where.
#include "kernel/moe_finalize_launch.h"

#define DRIVER_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

thread_local moetrt_moe_finalize_params recordedParams;
thread_local int32_t recordedTactic;
thread_local void* recordedStream;
moetrt::Device pretended = {{90, 132}, 2048, 32, 65536, {}};
bool pretends = true;
int questions = 0;

}  // namespace

namespace moetrt {

cudaError_t currentDevice(const Device*& device) {
    ++questions;
    device = pretends ? &pretended : nullptr;
    return pretends ? cudaSuccess : cudaErrorNoDevice;
}

cudaError_t launchMoEFinalize(const moetrt_moe_finalize_params& params, const Device&, const Tactic& tactic,
                              cudaStream_t stream) {
    recordedParams = params;
    recordedTactic = tactic.id;
    recordedStream = stream;
    return cudaSuccess;
}

}  // namespace moetrt

/// What the last launch on this thread was given.
DRIVER_EXPORT void moetrt_recorded(moetrt_moe_finalize_params* params, void** stream) {
    *params = recordedParams;
    *stream = recordedStream;
}

/// And the tactic of it.
DRIVER_EXPORT int32_t moetrt_recorded_tactic() {
    return recordedTactic;
}

/// From now on the device is this one; multiprocessors 0: there is none.
DRIVER_EXPORT void moetrt_pretend_device(int32_t computeCapability, int32_t multiprocessors) {
    pretends = multiprocessors != 0;
    pretended.properties = {computeCapability, multiprocessors};
}

/// How often the device was asked for so far.
DRIVER_EXPORT int32_t moetrt_questions() {
    return questions;
}
