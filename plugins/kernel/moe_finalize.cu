// The launch of the kernel: which of the six instantiations, how many threads.
#include <cstdint>

#include "moe_finalize.cuh"
#include "moe_finalize_launch.h"

namespace moetrt {
namespace {

bool isAccessAligned(const void* data) {
    return reinterpret_cast<uintptr_t>(data) % kAccessBytes == 0;  // null too: never read
}

/// Whether every access that the kernel makes along the hidden dimension can be one of 16 bytes.
bool takesWideAccess(const moetrt_moe_finalize_params& p, int elementsPerAccess) {
    return p.hidden_size % elementsPerAccess == 0 && p.row_stride % elementsPerAccess == 0 &&
           isAccessAligned(p.gemm2_permuted) && isAccessAligned(p.shared_output) && isAccessAligned(p.residual) &&
           isAccessAligned(p.gamma) && isAccessAligned(p.norm_out) && isAccessAligned(p.residual_out);
}

template <typename A>
cudaError_t launch(const moetrt_moe_finalize_params& params, cudaStream_t stream) {
    constexpr int64_t kElementsPerWarp = kWarpSize * kElementsPerThread;
    const int64_t warps = (params.hidden_size - 1) / kElementsPerWarp + 1;
    const int64_t threads = warps < kMaxThreads / kWarpSize ? warps * kWarpSize : kMaxThreads;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(params.num_tokens));
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.stream = stream;
    const bool wide = takesWideAccess(params, kAccessBytes / static_cast<int>(sizeof(A)));
    return cudaLaunchKernelEx(&config, wide ? moeFinalizeKernel<A, true> : moeFinalizeKernel<A, false>, params);
}

}  // namespace

cudaError_t launchMoEFinalize(const moetrt_moe_finalize_params& params, cudaStream_t stream) {
    if (params.num_tokens == 0) {
        return cudaSuccess;
    }
    switch (params.dtype) {
        case MOETRT_FLOAT: return launch<float>(params, stream);
        case MOETRT_HALF: return launch<__half>(params, stream);
        case MOETRT_BFLOAT16: return launch<__nv_bfloat16>(params, stream);
        default: return cudaErrorInvalidValue;
    }
}

}  // namespace moetrt
