// The kernel of a MoE tail: one CTA turns the K rows of one token into residual_out and norm_out.
//
// Memory plan. Per token the K named rows, shared_output and residual are read once from device memory and the two
// outputs written once. A thread holds kElementsPerThread elements of the token's hidden state in fp32 registers; a CTA
// of up to kMaxThreads threads thus holds a tile of up to 16384 elements, and hidden is never read back for H up to
// there. A wider H is walked tile by tile: residual_out is written during the walk, the last tile stays in registers,
// and the others are read back from residual_out, by the threads that wrote them, when they are normalised. Shared
// memory holds what the whole CTA needs of the router: a row offset and a weight for each route, kRouteChunk at a time.
//
// The source is plain enough to compile for the host too: __shared__ is spelled MOETRT_SHARED_ARRAY for that, and
// fused multiply-adds are written out so that every compiler and flag gives the same bits.
#ifndef MOETRT_KERNEL_MOE_FINALIZE_CUH
#define MOETRT_KERNEL_MOE_FINALIZE_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#include "moetrt/moe_finalize.h"

#ifndef MOETRT_SHARED_ARRAY
#define MOETRT_SHARED_ARRAY(type, name, count) __shared__ type name[count]
#endif

namespace moetrt {

constexpr int kWarpSize = 32;
constexpr int kMaxThreads = 512;
constexpr int kElementsPerThread = 32;
constexpr int kAccessBytes = 16;
constexpr int kRouteChunk = 64;

/// How many rows a thread loads before it adds the first.
template <bool kWide>
constexpr int kRowsInFlight = kWide ? 8 : 2;

static_assert(kRouteChunk % kRowsInFlight<true> == 0, "a chunk of routes is read in whole groups");
static_assert(kMaxThreads <= kWarpSize * kWarpSize, "one warp's lanes hold the sums of all warps");

/// N neighbours in a row. A wide access moves them at once, or 16 bytes at a time where they are more.
template <typename T, int N>
struct alignas(kAccessBytes) Pack {
    T values[N];
};

/// data[index ... index + N), of which the first `count` exist; the others are zero and not read. With kWide either all
/// N exist or none, and the address is a multiple of 16 bytes.
template <bool kWide, int N, typename T>
__device__ __forceinline__ Pack<T, N> loadPack(const void* data, int64_t index, int count) {
    const T* elements = static_cast<const T*>(data);
    Pack<T, N> pack = {};
    if constexpr (kWide) {
        if (count > 0) {
            uint4 parts[sizeof(pack) / sizeof(uint4)];
#pragma unroll
            for (int i = 0; i < static_cast<int>(sizeof(pack) / sizeof(uint4)); ++i) {
                parts[i] = reinterpret_cast<const uint4*>(elements + index)[i];
            }
            memcpy(&pack, parts, sizeof(pack));
        }
    } else {
#pragma unroll
        for (int n = 0; n < N; ++n) {
            if (n < count) {
                pack.values[n] = elements[index + n];
            }
        }
    }
    return pack;
}

/// The counterpart of loadPack: writes the first `count` elements. A wide store is spelled as an intrinsic, because
/// nvcc splits an assignment into four where it can.
template <bool kWide, int N, typename T>
__device__ __forceinline__ void storePack(void* data, int64_t index, int count, const Pack<T, N>& pack) {
    T* elements = static_cast<T*>(data);
    if constexpr (kWide) {
        static_assert(sizeof(pack) == sizeof(uint4), "one access");
        if (count > 0) {
            uint4 bits;
            memcpy(&bits, &pack, sizeof(bits));
            __stwb(reinterpret_cast<uint4*>(elements + index), bits);
        }
    } else {
#pragma unroll
        for (int n = 0; n < N; ++n) {
            if (n < count) {
                elements[index + n] = pack.values[n];
            }
        }
    }
}

__device__ __forceinline__ float toFloat(float value) {
    return value;
}
__device__ __forceinline__ float toFloat(__half value) {
    return __half2float(value);
}
__device__ __forceinline__ float toFloat(__nv_bfloat16 value) {
    return __bfloat162float(value);
}

/// Rounds to T, to nearest even.
template <typename T>
__device__ __forceinline__ T roundTo(float value);
template <>
__device__ __forceinline__ float roundTo<float>(float value) {
    return value;
}
template <>
__device__ __forceinline__ __half roundTo<__half>(float value) {
    return __float2half_rn(value);
}
template <>
__device__ __forceinline__ __nv_bfloat16 roundTo<__nv_bfloat16>(float value) {
    return __float2bfloat16_rn(value);
}

template <typename T, int N>
__device__ __forceinline__ Pack<float, N> toFloats(const Pack<T, N>& pack) {
    Pack<float, N> result;
#pragma unroll
    for (int n = 0; n < N; ++n) {
        result.values[n] = toFloat(pack.values[n]);
    }
    return result;
}

/// data[index] as fp32, where data's dtype is float or A.
template <typename A>
__device__ __forceinline__ float loadScalar(const void* data, int32_t dtype, int64_t index) {
    return dtype == MOETRT_FLOAT ? static_cast<const float*>(data)[index] : toFloat(static_cast<const A*>(data)[index]);
}

/// What shared_output is multiplied by: sigmoid of the token's gate logit, 1 without a gate.
template <typename A>
__device__ __forceinline__ float sharedScale(const moetrt_moe_finalize_params& p, int64_t token) {
    if (p.shared_gate == nullptr) {
        return 1.0F;
    }
    const float logit = loadScalar<A>(p.shared_gate, p.gate_dtype, token);
    return 1.0F / (1.0F + expf(-logit));
}

/// Writes offset and weight of the token's routes first ... first + kRouteChunk to shared memory. A route that adds
/// nothing (map -1, or past the last route) has offset -1 and weight 0. A map entry that names no row has offset -1 as
/// well, so nothing is loaded, and weight NaN, which makes every element of the token NaN.
template <typename A>
__device__ __forceinline__ void stageRoutes(const moetrt_moe_finalize_params& p, int64_t token, int64_t first,
                                            int64_t* rowOffsets, float* routeWeights) {
    for (int i = static_cast<int>(threadIdx.x); i < kRouteChunk; i += static_cast<int>(blockDim.x)) {
        int64_t offset = -1;
        float weight = 0.0F;
        if (first + i < p.top_k) {
            const int64_t route = token * p.top_k + first + i;
            const int64_t row =
                p.expanded_idx_to_permuted_idx == nullptr ? route : p.expanded_idx_to_permuted_idx[route];
            if (row >= 0 && row < p.num_rows) {
                offset = row * p.row_stride;
                weight = p.apply_expert_weights != 0 ? loadScalar<A>(p.expert_weights, p.weights_dtype, route) : 1.0F;
            } else if (row != -1) {
                weight = nanf("");
            }
        }
        rowOffsets[i] = offset;
        routeWeights[i] = weight;
    }
}

/// The sum of value over the CTA, in every thread. warpSums is shared memory for kWarpSize floats.
__device__ __forceinline__ float sumOverBlock(float value, float* warpSums) {
#pragma unroll
    for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
        value += __shfl_xor_sync(0xffffffffU, value, distance);
    }
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
    if (lane == 0) {
        warpSums[warp] = value;
    }
    __syncthreads();
    value = lane < static_cast<int>(blockDim.x) / kWarpSize ? warpSums[lane] : 0.0F;
#pragma unroll
    for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
        value += __shfl_xor_sync(0xffffffffU, value, distance);
    }
    return value;
}

/// A is the dtype of rows and outputs; kWide: H, the row stride and all pointers allow 16-byte accesses. gridDim.x is
/// num_tokens, blockDim.x a multiple of kWarpSize.
template <typename A, bool kWide>
__global__ void __launch_bounds__(kMaxThreads) moeFinalizeKernel(const moetrt_moe_finalize_params p) {
    MOETRT_SHARED_ARRAY(int64_t, rowOffsets, kRouteChunk);
    MOETRT_SHARED_ARRAY(float, routeWeights, kRouteChunk);
    MOETRT_SHARED_ARRAY(float, warpSums, kWarpSize);
    constexpr int N = kAccessBytes / static_cast<int>(sizeof(A));
    constexpr int kPacks = kElementsPerThread / N;
    constexpr int kGroup = kRowsInFlight<kWide>;

    const int64_t token = blockIdx.x;
    const int packStep = static_cast<int>(blockDim.x) * N;
    const int threadColumn = static_cast<int>(threadIdx.x) * N;
    const int tile = packStep * kPacks;
    // Nearly always one tile: the branch spares every CTA a 64-bit division before its first load.
    const int64_t lastTile = p.hidden_size <= tile ? 0 : (p.hidden_size - 1) / tile * tile;
    const float scaleOfShared = sharedScale<A>(p, token);

    Pack<float, N> hidden[kPacks];
    float squares = 0.0F;
    for (int64_t base = 0; base <= lastTile; base += tile) {
        const int width = static_cast<int>(base < lastTile ? tile : p.hidden_size - base);
#pragma unroll
        for (int v = 0; v < kPacks; ++v) {
            hidden[v] = {};
        }

        for (int64_t first = 0; first < p.top_k; first += kRouteChunk) {
            if (base > 0 || first > 0) {
                __syncthreads();  // the routes staged before are still being read
            }
            stageRoutes<A>(p, token, first, rowOffsets, routeWeights);
            __syncthreads();
            const int routes = static_cast<int>(p.top_k - first < kRouteChunk ? p.top_k - first : kRouteChunk);
#pragma unroll
            for (int v = 0; v < kPacks; ++v) {
                const int column = v * packStep + threadColumn;
                for (int group = 0; group < routes; group += kGroup) {
                    Pack<A, N> rows[kGroup];
#pragma unroll
                    for (int r = 0; r < kGroup; ++r) {
                        const int64_t offset = rowOffsets[group + r];
                        const int count = offset >= 0 ? width - column : 0;
                        rows[r] = loadPack<kWide, N, A>(p.gemm2_permuted, offset + base + column, count);
                    }
                    __syncwarp();  // keeps the compiler from moving loads behind the adds of earlier rows
#pragma unroll
                    for (int r = 0; r < kGroup; ++r) {
                        const float weight = routeWeights[group + r];
                        const Pack<float, N> row = toFloats(rows[r]);
#pragma unroll
                        for (int n = 0; n < N; ++n) {
                            hidden[v].values[n] = fmaf(weight, row.values[n], hidden[v].values[n]);
                        }
                    }
                }
            }
        }

#pragma unroll
        for (int v = 0; v < kPacks; ++v) {
            const int column = v * packStep + threadColumn;
            const int64_t index = token * p.hidden_size + base + column;
            const int count = width - column;
            const int sharedCount = p.shared_output != nullptr ? count : 0;
            const int residualCount = p.residual != nullptr ? count : 0;
            const Pack<float, N> shared = toFloats(loadPack<kWide, N, A>(p.shared_output, index, sharedCount));
            const Pack<float, N> residual = toFloats(loadPack<kWide, N, A>(p.residual, index, residualCount));
            Pack<A, N> rounded;
#pragma unroll
            for (int n = 0; n < N; ++n) {
                float sum = hidden[v].values[n] * p.routed_scaling_factor;
                sum = fmaf(scaleOfShared, shared.values[n], sum);
                sum *= p.combine_scale;
                sum = fmaf(p.residual_scale, residual.values[n], sum);
                rounded.values[n] = roundTo<A>(sum);
            }
            storePack<kWide, N, A>(p.residual_out, index, count, rounded);
            // The norm reads what the next layer will read: the rounded value.
            hidden[v] = toFloats(rounded);
#pragma unroll
            for (int n = 0; n < N; ++n) {
                const float value = n < count ? hidden[v].values[n] : 0.0F;
                squares = fmaf(value, value, squares);
            }
        }
    }
    if (p.gamma == nullptr) {
        return;
    }

    const float meanSquare = sumOverBlock(squares, warpSums) / static_cast<float>(p.hidden_size);
    const float scale = 1.0F / sqrtf(meanSquare + p.eps);
    for (int64_t base = lastTile; base >= 0; base -= tile) {
        const int width = static_cast<int>(base < lastTile ? tile : p.hidden_size - base);
#pragma unroll
        for (int v = 0; v < kPacks; ++v) {
            const int column = v * packStep + threadColumn;
            const int64_t index = token * p.hidden_size + base + column;
            const int count = width - column;
            if (base < lastTile) {
                hidden[v] = toFloats(loadPack<kWide, N, A>(p.residual_out, index, count));
            }
            const Pack<float, N> gamma = p.gamma_dtype == MOETRT_FLOAT
                                             ? loadPack<kWide, N, float>(p.gamma, base + column, count)
                                             : toFloats(loadPack<kWide, N, A>(p.gamma, base + column, count));
            Pack<A, N> normed;
#pragma unroll
            for (int n = 0; n < N; ++n) {
                float value = hidden[v].values[n] * scale;
                if (p.weight_before_cast == 0) {
                    value = toFloat(roundTo<A>(value));
                }
                normed.values[n] = roundTo<A>(value * (gamma.values[n] + p.weight_bias));
            }
            storePack<kWide, N, A>(p.norm_out, index, count, normed);
        }
    }
}

}  // namespace moetrt

#endif
