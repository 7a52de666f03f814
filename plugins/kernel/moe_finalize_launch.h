// What the rest of the library sees of the kernel: a check of the parameters, and the launch.
//
// Neither knows of TensorRT. Callers check first, then launch; both may be called from any thread.
#ifndef MOETRT_KERNEL_MOE_FINALIZE_LAUNCH_H
#define MOETRT_KERNEL_MOE_FINALIZE_LAUNCH_H

#include <cuda_runtime_api.h>

#include <string>

#include "moetrt/moe_finalize.h"

namespace moetrt {

/// Why `params` is not taken: one line without a newline that names the field, what it was and what is taken.
/// Empty where `params` is taken. Looks at the values of pointers only, so it needs no device.
std::string checkMoEFinalize(const moetrt_moe_finalize_params& params);

/// Starts the kernel for `params`, which checkMoEFinalize has taken, on `stream`.
/// Allocates nothing and does not synchronise; with num_tokens 0 it returns cudaSuccess and starts nothing.
cudaError_t launchMoEFinalize(const moetrt_moe_finalize_params& params, cudaStream_t stream);

}  // namespace moetrt

#endif
