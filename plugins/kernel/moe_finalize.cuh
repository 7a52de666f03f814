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
constexpr int kRowsInFlight = 8;  // rows a thread loads before it adds the first: 8 would not fit beside 1024 threads

static_assert(kRouteChunk % kRowsInFlight == 0, "a chunk of routes is read in whole groups");
static_assert(kMaxThreads <= kWarpSize * kWarpSize, "one warp's lanes hold the sums of all warps");

/// N elements that are loaded and stored as one access of up to 16 bytes (two where they are 32).
template <typename T, int N>
struct alignas(N * sizeof(T) < kAccessBytes ? N * sizeof(T) : kAccessBytes) Pack {
    T values[N];
};

template <int N, typename T>
__device__ __forceinline__ Pack<T, N> loadPack(const void* data, int64_t index) {
    return *reinterpret_cast<const Pack<T, N>*>(static_cast<const T*>(data) + index);
}

template <int N, typename T>
__device__ __forceinline__ void storePack(void* data, int64_t index, const Pack<T, N>& pack) {
    *reinterpret_cast<Pack<T, N>*>(static_cast<T*>(data) + index) = pack;
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

/// data[index ... index + N) as fp32, where data's dtype is float or A.
template <typename A, int N>
__device__ __forceinline__ Pack<float, N> loadAsFloat(const void* data, int32_t dtype, int64_t index) {
    if (dtype == MOETRT_FLOAT) {
        return loadPack<N, float>(data, index);
    }
    const Pack<A, N> loaded = loadPack<N, A>(data, index);
    Pack<float, N> result;
#pragma unroll
    for (int n = 0; n < N; ++n) {
        result.values[n] = toFloat(loaded.values[n]);
    }
    return result;
}

/// What shared_output is multiplied by: sigmoid of the token's gate logit, 1 without a gate.
template <typename A>
__device__ __forceinline__ float sharedScale(const moetrt_moe_finalize_params& p, int64_t token) {
    if (p.shared_gate == nullptr) {
        return 1.0F;
    }
    const float logit = loadAsFloat<A, 1>(p.shared_gate, p.gate_dtype, token).values[0];
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
                weight = p.apply_expert_weights != 0
                             ? loadAsFloat<A, 1>(p.expert_weights, p.weights_dtype, route).values[0]
                             : 1.0F;
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

/// A is the dtype of rows and outputs, N the elements of one access: 16 / sizeof(A), or 1 where H, the row stride or a
/// pointer does not allow 16-byte accesses. gridDim.x is num_tokens, blockDim.x a multiple of kWarpSize.
template <typename A, int N>
__global__ void __launch_bounds__(kMaxThreads) moeFinalizeKernel(const moetrt_moe_finalize_params p) {
    MOETRT_SHARED_ARRAY(int64_t, rowOffsets, kRouteChunk);
    MOETRT_SHARED_ARRAY(float, routeWeights, kRouteChunk);
    MOETRT_SHARED_ARRAY(float, warpSums, kWarpSize);
    constexpr int kPacks = kElementsPerThread / N;

    const int64_t token = blockIdx.x;
    const int64_t tokenOffset = token * p.hidden_size;
    const int packStep = static_cast<int>(blockDim.x) * N;
    const int threadColumn = static_cast<int>(threadIdx.x) * N;
    const int tile = packStep * kPacks;
    const int64_t lastTile = (p.hidden_size - 1) / tile * tile;
    const float scaleOfShared = sharedScale<A>(p, token);

    float hidden[kPacks][N];
    float squares = 0.0F;
    for (int64_t base = 0; base <= lastTile; base += tile) {
        const int width = static_cast<int>(base < lastTile ? tile : p.hidden_size - base);
#pragma unroll
        for (int v = 0; v < kPacks; ++v) {
#pragma unroll
            for (int n = 0; n < N; ++n) {
                hidden[v][n] = 0.0F;
            }
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
                for (int group = 0; group < routes; group += kRowsInFlight) {
                    Pack<A, N> rows[kRowsInFlight];
#pragma unroll
                    for (int r = 0; r < kRowsInFlight; ++r) {
                        const int64_t offset = rowOffsets[group + r];
                        rows[r] = offset >= 0 && column < width
                                      ? loadPack<N, A>(p.gemm2_permuted, offset + base + column)
                                      : Pack<A, N>{};
                    }
                    __syncwarp();  // keeps the compiler from moving loads behind the adds of earlier rows
#pragma unroll
                    for (int r = 0; r < kRowsInFlight; ++r) {
                        const float weight = routeWeights[group + r];
#pragma unroll
                        for (int n = 0; n < N; ++n) {
                            hidden[v][n] = fmaf(weight, toFloat(rows[r].values[n]), hidden[v][n]);
                        }
                    }
                }
            }
        }

#pragma unroll
        for (int v = 0; v < kPacks; ++v) {
            const int column = v * packStep + threadColumn;
            if (column < width) {
                const int64_t index = tokenOffset + base + column;
                const Pack<A, N> shared =
                    p.shared_output != nullptr ? loadPack<N, A>(p.shared_output, index) : Pack<A, N>{};
                const Pack<A, N> residual = p.residual != nullptr ? loadPack<N, A>(p.residual, index) : Pack<A, N>{};
                Pack<A, N> rounded;
#pragma unroll
                for (int n = 0; n < N; ++n) {
                    float sum = hidden[v][n] * p.routed_scaling_factor;
                    sum = fmaf(scaleOfShared, toFloat(shared.values[n]), sum);
                    sum *= p.combine_scale;
                    sum = fmaf(p.residual_scale, toFloat(residual.values[n]), sum);
                    rounded.values[n] = roundTo<A>(sum);
                    // The norm reads what the next layer will read: the rounded value.
                    hidden[v][n] = toFloat(rounded.values[n]);
                    squares = fmaf(hidden[v][n], hidden[v][n], squares);
                }
                storePack<N, A>(p.residual_out, index, rounded);
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
            if (column < width) {
                const int64_t index = tokenOffset + base + column;
                if (base < lastTile) {
                    const Pack<A, N> written = loadPack<N, A>(p.residual_out, index);
#pragma unroll
                    for (int n = 0; n < N; ++n) {
                        hidden[v][n] = toFloat(written.values[n]);
                    }
                }
                const Pack<float, N> gamma = loadAsFloat<A, N>(p.gamma, p.gamma_dtype, base + column);
                Pack<A, N> normed;
#pragma unroll
                for (int n = 0; n < N; ++n) {
                    float value = hidden[v][n] * scale;
                    if (p.weight_before_cast == 0) {
                        value = toFloat(roundTo<A>(value));
                    }
                    normed.values[n] = roundTo<A>(value * (gamma.values[n] + p.weight_bias));
                }
                storePack<N, A>(p.norm_out, index, normed);
            }
        }
    }
}

}  // namespace moetrt

#endif
