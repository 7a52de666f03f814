// CUDA C++ as the kernel speaks it, on the simulator: compiles the kernel's source with a host compiler as it stands.
#ifndef MOETRT_HOST_CUDA_RUNTIME_H
#define MOETRT_HOST_CUDA_RUNTIME_H

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <utility>

#include "cuda_runtime_api.h"
#include "simulator.h"

#define __device__
#define __global__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)

/// `__shared__ type name[count]` for a memory that each CTA has of its own.
#define MOETRT_SHARED_ARRAY(type, name, count) \
    auto& name = *static_cast<type(*)[count]>( \
        gpusim::sharedArray(sizeof(type) * (count), alignof(type), gpusim::Location::current()))

// Objects, not macros: `x` stays usable as a name.
namespace gpusim {
template <unsigned (*kValue)()>
struct Index {
    struct {
        operator unsigned() const { return kValue(); }
    } x;
};
}  // namespace gpusim

inline constexpr gpusim::Index<gpusim::threadIndex> threadIdx = {};
inline constexpr gpusim::Index<gpusim::blockIndex> blockIdx = {};
inline constexpr gpusim::Index<gpusim::blockSize> blockDim = {};
inline constexpr gpusim::Index<gpusim::gridSize> gridDim = {};

inline void __syncthreads(const gpusim::Location& where = gpusim::Location::current()) {
    gpusim::blockBarrier(where);
}

inline void __syncwarp(uint32_t mask = 0xffffffffU, const gpusim::Location& where = gpusim::Location::current()) {
    gpusim::warpBarrier(mask, where);
}

template <typename T>
T __shfl_xor_sync(uint32_t mask, T value, int laneMask, const gpusim::Location& where = gpusim::Location::current()) {
    return std::bit_cast<T>(gpusim::shuffleXor(mask, std::bit_cast<uint32_t>(value), laneMask, where));
}

struct alignas(16) uint4 {
    unsigned x, y, z, w;
};

inline void __stwb(uint4* address, uint4 value) {
    *address = value;
}

[[noreturn]] inline void __trap() {
    std::abort();
}

inline float __uint_as_float(unsigned bits) {
    return std::bit_cast<float>(bits);
}

struct dim3 {
    unsigned x = 1;
    unsigned y = 1;
    unsigned z = 1;
    constexpr dim3(unsigned x = 1) : x(x) {}
};

enum cudaDeviceAttr {
    cudaDevAttrMultiProcessorCount,
    cudaDevAttrMaxThreadsPerMultiProcessor,
    cudaDevAttrComputeCapabilityMajor,
    cudaDevAttrComputeCapabilityMinor,
    cudaDevAttrMaxRegistersPerMultiprocessor,
    cudaDevAttrMaxBlocksPerMultiprocessor,
    cudaDevAttrClusterLaunch,
};

inline cudaError_t cudaGetDevice(int* device) {
    *device = gpusim::currentDevice();
    return cudaSuccess;
}

inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
    const gpusim::Device& described = gpusim::kDevices[device];
    switch (attribute) {
        case cudaDevAttrMultiProcessorCount: *value = described.multiprocessors; break;
        case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
        case cudaDevAttrComputeCapabilityMajor: *value = described.computeCapability / 10; break;
        case cudaDevAttrComputeCapabilityMinor: *value = described.computeCapability % 10; break;
        case cudaDevAttrMaxRegistersPerMultiprocessor: *value = 65536; break;
        case cudaDevAttrMaxBlocksPerMultiprocessor: *value = described.blocksPerMultiprocessor; break;
        case cudaDevAttrClusterLaunch: *value = described.launchesClusters ? 1 : 0; break;
    }
    return cudaSuccess;
}

enum cudaStreamCaptureMode {
    cudaStreamCaptureModeGlobal,
    cudaStreamCaptureModeThreadLocal,
    cudaStreamCaptureModeRelaxed
};

/// The calling thread's.
inline thread_local cudaStreamCaptureMode gpusimCaptureMode = cudaStreamCaptureModeGlobal;

inline cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
    std::swap(*mode, gpusimCaptureMode);
    return cudaSuccess;
}

struct cudaFuncAttributes {
    int numRegs;
    int ptxVersion;
};

/// Answers as if a stream were captured all the time.
template <typename Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, Kernel*) {
    if (gpusimCaptureMode != cudaStreamCaptureModeRelaxed) {
        return cudaErrorStreamCaptureUnsupported;
    }
    attributes->numRegs = 96;
    attributes->ptxVersion = gpusim::kDevices[gpusim::currentDevice()].codeVersion;
    return cudaSuccess;
}

enum cudaLaunchAttributeID { cudaLaunchAttributeClusterDimension, cudaLaunchAttributeProgrammaticStreamSerialization };

struct cudaLaunchAttribute {
    cudaLaunchAttributeID id;
    struct {
        struct {
            unsigned x, y, z;
        } clusterDim;
        int programmaticStreamSerializationAllowed;
    } val;
};

struct cudaLaunchConfig_t {
    dim3 gridDim;
    dim3 blockDim;
    size_t dynamicSmemBytes = 0;
    cudaStream_t stream = nullptr;
    cudaLaunchAttribute* attrs = nullptr;
    unsigned numAttrs = 0;
};

/// Runs the kernel to its end before it returns.
template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               const Arguments&... arguments) {
    if (config->dynamicSmemBytes != 0) {
        return cudaErrorInvalidValue;
    }
    gpusim::Shape shape = {config->gridDim.x, config->blockDim.x, 1, false};
    for (unsigned i = 0; i < config->numAttrs; ++i) {
        const cudaLaunchAttribute& attribute = config->attrs[i];
        // SM90 began with both, and code for an earlier one has neither.
        const gpusim::Device& device = gpusim::kDevices[gpusim::currentDevice()];
        if (device.computeCapability < 90 || device.codeVersion < 90) {
            return cudaErrorInvalidValue;
        }
        if (attribute.id == cudaLaunchAttributeClusterDimension) {
            if (!device.launchesClusters) {
                return cudaErrorInvalidValue;
            }
            shape.clusterSize = attribute.val.clusterDim.x;
        } else {
            shape.startsEarly = attribute.val.programmaticStreamSerializationAllowed != 0;
        }
    }
    const std::string failure = gpusim::launch(shape, [&] { kernel(arguments...); });
    return failure.empty() ? cudaSuccess : cudaErrorLaunchFailure;
}

inline void cudaGridDependencySynchronize() {
    gpusim::waitForUpstream();
}

/// Nothing runs after this kernel before it has ended.
inline void cudaTriggerProgrammaticLaunchCompletion() {}

#endif
