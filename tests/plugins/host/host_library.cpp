// The C interface of moetrt/moe_finalize.h over the host build of the kernel, with "device" memory being the process's.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <bit>
#include <cstdint>
#include <string>

#include "moe_finalize_launch.h"

namespace {

thread_local std::string lastError;

}  // namespace

extern "C" {

const char* moetrt_last_error(void) {
    return lastError.c_str();
}

int32_t moetrt_moe_finalize(const moetrt_moe_finalize_params* params, void* stream) {
    lastError = moetrt::checkMoEFinalize(*params);
    if (!lastError.empty()) {
        return 1;
    }
    const cudaError_t error = moetrt::launchMoEFinalize(*params, static_cast<cudaStream_t>(stream));
    if (error != cudaSuccess) {
        lastError = cudaGetErrorString(error);
    }
    return static_cast<int32_t>(error);
}

/// The stand-ins' conversions, for the test that proves them: 16-bit patterns to float bits, and back.
void moetrt_host_widen(int32_t dtype, const uint16_t* from, float* to, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
        to[i] = dtype == MOETRT_HALF ? __half2float(__half{from[i]}) : __bfloat162float(__nv_bfloat16{from[i]});
    }
}

void moetrt_host_narrow(int32_t dtype, const float* from, uint16_t* to, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
        to[i] = dtype == MOETRT_HALF ? __float2half_rn(from[i]).bits : __float2bfloat16_rn(from[i]).bits;
    }
}

}  // extern "C"
