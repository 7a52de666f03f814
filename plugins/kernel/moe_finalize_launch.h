// What the rest of the library sees of the kernel: a check of the parameters, the device, and the launch.
//
// None knows of TensorRT. Callers check first, then launch; all may be called from any thread.
#ifndef MOETRT_KERNEL_MOE_FINALIZE_LAUNCH_H
#define MOETRT_KERNEL_MOE_FINALIZE_LAUNCH_H

#include <cuda_runtime_api.h>

#include <array>
#include <string>

#include "moe_finalize_tactics.h"
#include "moetrt/moe_finalize.h"

namespace moetrt {

/// Why `params` is not taken: one line without a newline that names the field, what it was and what is taken.
/// Empty where `params` is taken. Looks at the values of pointers only, so it needs no device.
std::string checkMoEFinalize(const moetrt_moe_finalize_params& params);

/// What a launch needs to know of a device: asked once, since every question to the driver costs as much as a launch.
struct Device {
    moetrt_device properties;
    int32_t threadsPerMultiprocessor;
    int32_t blocksPerMultiprocessor;
    int32_t registersPerMultiprocessor;
    std::array<std::array<int32_t, kVariants>, 3> registersPerThread;  ///< by dtype and variant
};

/// The current device; asked of CUDA the first time, which also loads the kernels, and kept for the process.
/// `device` is null where the answer is not cudaSuccess.
cudaError_t currentDevice(const Device*& device);

/// The CTAs of `threads` threads with `registers` registers each that a multiprocessor holds at a time, at least 1.
int64_t residentCtas(const Device& device, int64_t threads, int64_t registers);

/// Starts the kernel for `params`, which checkMoEFinalize has taken, on `stream` of the current device, which is
/// `device`; runsTactic has said that `tactic` runs them. Allocates nothing and does not synchronise; with num_tokens 0
/// it returns cudaSuccess and starts nothing.
cudaError_t launchMoEFinalize(const moetrt_moe_finalize_params& params, const Device& device, const Tactic& tactic,
                              cudaStream_t stream);

}  // namespace moetrt

#endif
