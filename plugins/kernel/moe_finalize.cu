// The kernel's instantiations and its launch: which one, how many threads, how many CTAs.
#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>

#include "moe_finalize.cuh"
#include "moe_finalize_launch.h"

namespace moetrt {
namespace {

using Kernel = void (*)(moetrt_moe_finalize_params);

/// Every instantiation of a dtype, in the order of Variant. Presence of operands, dtypes of weights, gate and gamma, K
/// and the cluster's size are looked at while running: each is the same for all threads, and costs next to nothing.
template <typename A>
constexpr std::array<Kernel, kVariants> kKernels = {
    // One 16-byte access for each row and thread (two in float32): the most threads, the shortest way through a token.
    moeFinalizeKernel<A, true, 8, false>,
    // Between the two others, for H that 8 elements a thread do not hold (over 4096) or 32 fill too few warps with.
    moeFinalizeKernel<A, true, 16, false>,
    // The least overhead a token, and several CTAs a multiprocessor at H = 7168; holds H up to 16384, walks beyond it.
    moeFinalizeKernel<A, true, 32, false>,
    // Several multiprocessors for one token, each with the shortest way through its share.
    moeFinalizeKernel<A, true, 8, true>,
    // Any H, row stride and alignment.
    moeFinalizeKernel<A, false, 16, false>,
};

const std::array<Kernel, kVariants>* kernelsOf(int32_t dtype) {
    switch (dtype) {
        case MOETRT_FLOAT: return &kKernels<float>;
        case MOETRT_HALF: return &kKernels<__half>;
        case MOETRT_BFLOAT16: return &kKernels<__nv_bfloat16>;
        default: return nullptr;
    }
}

/// While it lives this thread may do what CUDA refuses during a graph's capture, such as loading a kernel; no stream
/// that is captured takes part in it.
class CaptureRelaxed {
public:
    CaptureRelaxed() { cudaThreadExchangeStreamCaptureMode(&mode_); }
    ~CaptureRelaxed() { cudaThreadExchangeStreamCaptureMode(&mode_); }
    CaptureRelaxed(const CaptureRelaxed&) = delete;
    CaptureRelaxed& operator=(const CaptureRelaxed&) = delete;

private:
    cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

cudaError_t query(int ordinal, Device& device) {
    const CaptureRelaxed relaxed;
    int major = 0;
    int minor = 0;
    int launchesClusters = 0;
    struct Question {
        int32_t* answer;
        cudaDeviceAttr attribute;
    };
    for (const Question& question : {
             Question{&major, cudaDevAttrComputeCapabilityMajor},
             Question{&minor, cudaDevAttrComputeCapabilityMinor},
             Question{&launchesClusters, cudaDevAttrClusterLaunch},
             Question{&device.properties.multiprocessors, cudaDevAttrMultiProcessorCount},
             Question{&device.threadsPerMultiprocessor, cudaDevAttrMaxThreadsPerMultiProcessor},
             Question{&device.blocksPerMultiprocessor, cudaDevAttrMaxBlocksPerMultiprocessor},
             Question{&device.registersPerMultiprocessor, cudaDevAttrMaxRegistersPerMultiprocessor},
         }) {
        if (const cudaError_t error = cudaDeviceGetAttribute(question.answer, question.attribute, ordinal);
            error != cudaSuccess) {
            return error;
        }
    }
    int32_t& capability = device.properties.compute_capability;
    capability = 10 * major + minor;
    if (launchesClusters == 0) {
        capability = std::min(capability, kFirstWithSm90Features - 1);
    }
    for (const int32_t dtype : {MOETRT_FLOAT, MOETRT_HALF, MOETRT_BFLOAT16}) {
        for (int variant = 0; variant < kVariants; ++variant) {
            // Also loads the kernel: a launch that had to would fail while a graph is captured.
            cudaFuncAttributes attributes = {};
            if (const cudaError_t error = cudaFuncGetAttributes(&attributes, (*kernelsOf(dtype))[variant]);
                error != cudaSuccess) {
                return error;
            }
            device.registersPerThread[dtype][variant] = attributes.numRegs;
            // Where the driver has compiled PTX of an earlier device, the code has no more than that device's features.
            capability = std::min(capability, attributes.ptxVersion);
        }
    }
    return cudaSuccess;
}

}  // namespace

cudaError_t currentDevice(const Device*& device) {
    struct Known {
        std::atomic<bool> isKnown{false};
        Device device = {};
    };
    constexpr int kMostDevices = 64;
    static std::array<Known, kMostDevices> known;
    static std::mutex asking;

    device = nullptr;
    int ordinal = 0;
    if (const cudaError_t error = cudaGetDevice(&ordinal); error != cudaSuccess) {
        return error;
    }
    if (ordinal >= kMostDevices) {
        return cudaErrorInvalidDevice;
    }
    Known& entry = known[ordinal];
    if (!entry.isKnown.load(std::memory_order_acquire)) {
        const std::lock_guard<std::mutex> lock(asking);
        if (!entry.isKnown.load(std::memory_order_relaxed)) {
            if (const cudaError_t error = query(ordinal, entry.device); error != cudaSuccess) {
                return error;
            }
            entry.isKnown.store(true, std::memory_order_release);
        }
    }
    device = &entry.device;
    return cudaSuccess;
}

int64_t residentCtas(const Device& device, int64_t threads, int64_t registers) {
    // Registers are given to a warp in units of 256, and a warp's lie in one of the multiprocessor's four parts.
    constexpr int64_t kParts = 4;
    constexpr int64_t kUnit = 256;
    const int64_t warps = threads / kWarpSize;
    const int64_t perWarp = (registers * kWarpSize + kUnit - 1) / kUnit * kUnit;
    const int64_t byRegisters = perWarp == 0 ? device.blocksPerMultiprocessor
                                             : device.registersPerMultiprocessor / kParts / perWarp * kParts / warps;
    const int64_t byThreads = device.threadsPerMultiprocessor / threads;
    return std::max<int64_t>(1, std::min<int64_t>({byRegisters, byThreads, device.blocksPerMultiprocessor}));
}

cudaError_t launchMoEFinalize(const moetrt_moe_finalize_params& params, const Device& device, const Tactic& tactic,
                              cudaStream_t stream) {
    if (params.num_tokens == 0) {
        return cudaSuccess;
    }
    const auto variant = static_cast<int>(tactic.variant);
    const int64_t threads = threadsOfCta(tactic, params.hidden_size);
    const int64_t resident = residentCtas(device, threads, device.registersPerThread[params.dtype][variant]) *
                             device.properties.multiprocessors;
    // No more CTAs than run at once: each goes on with another token where there are more.
    const int64_t tokensAtOnce =
        std::min<int64_t>(params.num_tokens, std::max<int64_t>(1, resident / tactic.clusterSize));

    cudaLaunchAttribute attributes[2] = {};
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(tokensAtOnce * tactic.clusterSize));
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.stream = stream;
    config.attrs = attributes;
    if (tactic.clusterSize > 1) {
        cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
        attribute.id = cudaLaunchAttributeClusterDimension;
        attribute.val.clusterDim.x = static_cast<unsigned>(tactic.clusterSize);
        attribute.val.clusterDim.y = 1;
        attribute.val.clusterDim.z = 1;
    }
    if (params.programmatic_dependent_launch != 0 && device.properties.compute_capability >= kFirstWithSm90Features) {
        cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
        attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attribute.val.programmaticStreamSerializationAllowed = 1;
    }
    return cudaLaunchKernelEx(&config, (*kernelsOf(params.dtype))[variant], params);
}

}  // namespace moetrt
