// What the tests ask of the host build beside its C interface: its devices, choices and conversions.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <bit>
#include <cstdint>

#include "moe_finalize_launch.h"
#include "simulator.h"

extern "C" {

/// Chooses one of the simulator's devices.
void moetrt_host_set_device(int32_t ordinal) {
    gpusim::currentDevice() = ordinal;
}

/// The current device as the kernel's choices see it, and the thread's capture mode afterwards.
int32_t moetrt_host_capability(int32_t* captureMode) {
    const moetrt::Device* device = nullptr;
    const cudaError_t error = moetrt::currentDevice(device);
    *captureMode = gpusimCaptureMode;
    return error == cudaSuccess ? device->properties.compute_capability : -static_cast<int32_t>(error);
}

/// 1 where the tactic runs the params on the device.
int32_t moetrt_host_runs(const moetrt_moe_finalize_params* params, int32_t tactic) {
    const moetrt::Device* device = nullptr;
    return moetrt::currentDevice(device) == cudaSuccess &&
           moetrt::runsTactic(*moetrt::findTactic(tactic), *params, device->properties);
}

int32_t moetrt_host_tactics(const moetrt_moe_finalize_params* params, const moetrt_device* device, int32_t* tactics) {
    const moetrt::TacticList useful = moetrt::usefulTactics(*params, *device);
    for (const moetrt::Tactic* tactic : useful) {
        *tactics++ = tactic->id;
    }
    return useful.count;
}

int64_t moetrt_host_threads(int32_t tactic, int64_t hidden) {
    return moetrt::threadsOfCta(*moetrt::findTactic(tactic), hidden);
}

int64_t moetrt_host_resident(int32_t threadsPerMultiprocessor, int32_t blocks, int64_t threads, int64_t registers) {
    return moetrt::residentCtas({{90, 1}, threadsPerMultiprocessor, blocks, 65536, {}}, threads, registers);
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
