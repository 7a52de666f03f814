// One way to the kernel for TensorRT's enqueue and the C interface alike: check, launch, and the reason in words.
#ifndef MOETRT_PLUGIN_RUN_H
#define MOETRT_PLUGIN_RUN_H

#include <cuda_runtime_api.h>

#include <string>

#include "kernel/moe_finalize_launch.h"
#include "moetrt/moe_finalize.h"

namespace moetrt {

/// Whether a tactic that does not run some params is an error; or whether one that is not useful for them gives way to
/// the default one, as a tactic that was timed at another size of a dynamic shape does.
enum class TacticUse { kRequired, kPreferred };

/// Starts the kernel on `stream`. Returns "" or why it was not started.
/// `device` is the current device, null where the caller does not know it; `tactic` may be MOETRT_TACTIC_DEFAULT.
std::string runMoEFinalize(const moetrt_moe_finalize_params& params, const Device* device, int32_t tactic,
                           TacticUse use, cudaStream_t stream);

}  // namespace moetrt

#endif
