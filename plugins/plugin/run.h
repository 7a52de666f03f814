// One way to the kernel for TensorRT's enqueue and the C interface alike: check, launch, and the reason in words.
#ifndef MOETRT_PLUGIN_RUN_H
#define MOETRT_PLUGIN_RUN_H

#include <cuda_runtime_api.h>

#include <string>

#include "moetrt/moe_finalize.h"

namespace moetrt {

/// Starts the kernel on `stream`. Returns "" or why it was not started.
std::string runMoEFinalize(const moetrt_moe_finalize_params& params, cudaStream_t stream);

}  // namespace moetrt

#endif
