// The kernel of a MoE tail: a CTA, or a cluster of them, turns the K rows of one token into residual_out and norm_out.
//
// Memory plan. Per token the K named rows, shared_output and residual are read once from device memory and the two
// outputs written once. A thread holds kElements elements of the token's hidden state, as it has rounded them, in
// registers until the norm is known, so that hidden is never read back; only a hidden state wider than all threads hold
// is walked tile by tile: residual_out is written during the walk, the last tile stays in registers, and the others are
// read back by the threads that wrote them. A CTA takes a token after another: while it works on one, its first threads
// already read the next one's map and weights, and hand them to all others through shared memory, once for the CTA.
// For each 16 bytes of a row that it holds a thread has up to 8 rows, shared_output and residual on their way at once;
// where a token has few rows, those of two times 16 bytes.
//
// Order. Each token has one barrier, that of the norm's sum, which also hands over the next token's routes; what it
// guards has two places in shared memory, used in turns, so that nobody writes what a slower thread still reads. In a
// cluster the barrier is the cluster's: the sum of each warp is read by all CTAs in the shared memory of the one that
// wrote it, and the last barrier keeps that memory until all have read.
//
// The source is plain enough to compile for the host too: __shared__ is spelled MOETRT_SHARED_ARRAY for that, and
// fused multiply-adds are written out so that every compiler and flag gives the same bits.
#ifndef MOETRT_KERNEL_MOE_FINALIZE_CUH
#define MOETRT_KERNEL_MOE_FINALIZE_CUH

#include <cooperative_groups.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "moe_finalize_tactics.h"
#include "moetrt/moe_finalize.h"

#ifndef MOETRT_SHARED_ARRAY
#define MOETRT_SHARED_ARRAY(type, name, count) __shared__ type name[count]
#endif

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define MOETRT_SM90_FEATURES 0
#else
#define MOETRT_SM90_FEATURES 1
#endif

namespace moetrt {

constexpr int kRouteChunk = 32;
/// Rows of a thread that are loaded before the first is added.
template <bool kWide>
constexpr int kRowsInFlight = kWide ? 8 : 4;
constexpr int kScalarsInPack = 4;
constexpr int kMaxWarps = kMaxThreads / kWarpSize;

/// The most threads of a CTA as the compiler is told: they decide the registers of each (80, 96 or 128), which must be
/// few for several CTAs a multiprocessor and yet hold all that is in flight without a spill.
template <int kElements, bool kCluster>
constexpr int kBoundThreads = kElements == 32               ? kMaxThreads
                              : kElements == 16 || kCluster ? 640
                                                            : 768;

static_assert(kRouteChunk % kRowsInFlight<true> == 0, "a chunk of routes is read in whole batches");
static_assert(kRouteChunk <= kWarpSize, "the smallest CTA has a thread for each route of a chunk");
static_assert(kMaxWarps <= kWarpSize, "one warp's lanes hold the sums of all warps");

/// N elements of a row. A wide access moves neighbours at once, or 16 bytes at a time where they are more.
template <typename T, int N>
struct alignas(kAccessBytes) Pack {
    T values[N];
};

/// Which elements of a row a pack has: `room` elements of the row from the pack's first on, of which it has each
/// `step`th. With wide accesses step is 1, and room is a multiple of the pack's size: all or none.
struct Span {
    int room;
    int step;
};

/// The pack whose first element is data[index]; elements past its room are zero and not read. A wide address is a
/// multiple of 16 bytes.
template <bool kWide, int N, typename T>
__device__ __forceinline__ Pack<T, N> loadPack(const void* data, int64_t index, Span span) {
    const T* elements = static_cast<const T*>(data);
    Pack<T, N> pack = {};
    if constexpr (kWide) {
        if (span.room > 0) {
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
            if (n * span.step < span.room) {
                pack.values[n] = elements[index + n * span.step];
            }
        }
    }
    return pack;
}

/// The counterpart of loadPack. A wide store is spelled as an intrinsic, because nvcc splits an assignment into four
/// where it can.
template <bool kWide, int N, typename T>
__device__ __forceinline__ void storePack(void* data, int64_t index, Span span, const Pack<T, N>& pack) {
    T* elements = static_cast<T*>(data);
    if constexpr (kWide) {
        static_assert(sizeof(pack) == sizeof(uint4), "one access");
        if (span.room > 0) {
            uint4 bits;
            memcpy(&bits, &pack, sizeof(bits));
            __stwb(reinterpret_cast<uint4*>(elements + index), bits);
        }
    } else {
#pragma unroll
        for (int n = 0; n < N; ++n) {
            if (n * span.step < span.room) {
                elements[index + n * span.step] = pack.values[n];
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
    if constexpr (std::is_same_v<T, __nv_bfloat16> && N * sizeof(T) == kAccessBytes) {
        // A bfloat16 is the upper half of a float: one instruction each, from the pairs that a 16-byte load brings.
        uint32_t pairs[N / 2];
        memcpy(pairs, &pack, sizeof(pack));
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            result.values[n] = __uint_as_float(pairs[n / 2] << 16);
            result.values[n + 1] = __uint_as_float(pairs[n / 2] & 0xffff0000U);
        }
    } else {
#pragma unroll
        for (int n = 0; n < N; ++n) {
            result.values[n] = toFloat(pack.values[n]);
        }
    }
    return result;
}

/// The CTAs of one token. kCluster false: the calling CTA alone.
template <bool kCluster>
struct TokenCtas {
#if MOETRT_SM90_FEATURES
    __device__ static int count() { return kCluster ? static_cast<int>(Group::num_blocks()) : 1; }
    __device__ static int rank() { return kCluster ? static_cast<int>(Group::block_rank()) : 0; }
    /// The shared memory at the same place in another CTA.
    template <typename T>
    __device__ static const T* shared(T* mine, int rank) {
        return kCluster ? Group::map_shared_rank(mine, rank) : mine;
    }
    __device__ static void arrive() { Group::barrier_arrive(); }
    __device__ static void wait() { Group::barrier_wait(); }
    using Group = cooperative_groups::cluster_group;
#else
    __device__ static int count() { return 1; }
    __device__ static int rank() { return 0; }
    template <typename T>
    __device__ static const T* shared(T* mine, int) {
        return mine;
    }
    __device__ static void arrive() {}
    __device__ static void wait() {}
#endif
};

/// Waits until the kernel before this one on the stream has ended and all it wrote is there to read. At once where that
/// was so at the launch already.
__device__ __forceinline__ void waitForUpstream() {
#if MOETRT_SM90_FEATURES
    cudaGridDependencySynchronize();
#endif
}

/// Lets the kernel after this one on the stream start, where it has asked for that; it waits for this one's end itself.
__device__ __forceinline__ void letDownstreamStart() {
#if MOETRT_SM90_FEATURES
    cudaTriggerProgrammaticLaunchCompletion();
#endif
}

/// Brings an address towards the multiprocessor. Reads nothing: what an earlier kernel still writes there stays right.
__device__ __forceinline__ void prefetch([[maybe_unused]] const void* address) {
#if defined(__CUDA_ARCH__)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
#endif
}

/// data[index] as fp32, where data's dtype is float or A.
template <typename A>
__device__ __forceinline__ float loadScalar(const void* data, int32_t dtype, int64_t index) {
    return dtype == MOETRT_FLOAT ? static_cast<const float*>(data)[index] : toFloat(static_cast<const A*>(data)[index]);
}

/// What the router says of one route, as read: loads that nothing has waited for yet.
struct RouteInputs {
    int64_t row;
    float weight;
};

template <typename A>
__device__ __forceinline__ RouteInputs readRoute(const moetrt_moe_finalize_params& p, int64_t token, int64_t k) {
    if (k >= p.top_k) {
        return {-1, 0.0F};
    }
    const int64_t route = token * p.top_k + k;
    return {p.expanded_idx_to_permuted_idx == nullptr ? route : p.expanded_idx_to_permuted_idx[route],
            p.apply_expert_weights != 0 ? loadScalar<A>(p.expert_weights, p.weights_dtype, route) : 1.0F};
}

/// A route in shared memory: one 16-byte access. Where nothing is added (map -1, or past the last route) the offset is
/// -1 and the weight 0. A map entry that names no row has offset -1 as well, so nothing is loaded, and weight NaN,
/// which makes every element of the token NaN.
struct alignas(16) Route {
    int64_t offset;
    float weight;
};

__device__ __forceinline__ Route toRoute(const moetrt_moe_finalize_params& p, const RouteInputs& inputs) {
    if (inputs.row >= 0 && inputs.row < p.num_rows) {
        return {inputs.row * p.row_stride, inputs.weight};
    }
    return {-1, inputs.row == -1 ? 0.0F : nanf("")};
}

/// What all threads of a CTA need of a token.
struct Staged {
    Route routes[kRouteChunk];
    float sharedScale;
};

/// The gate's logit of a token; as good as infinite where there is no gate.
template <typename A>
__device__ __forceinline__ float readGate(const moetrt_moe_finalize_params& p, int64_t token) {
    return p.shared_gate == nullptr ? INFINITY : loadScalar<A>(p.shared_gate, p.gate_dtype, token);
}

__device__ __forceinline__ float sigmoid(float logit) {
    return 1.0F / (1.0F + expf(-logit));
}

/// Adds kRows rows times their weights to the sums of kTogether packs that lie packStep apart. All are loaded before
/// the first is added.
template <typename A, bool kWide, int kRows, int kTogether, int N>
__device__ __forceinline__ void addRows(const A* columns, int packStep, const Route* routes, Span span,
                                        Pack<float, N> (&sums)[kTogether]) {
    Pack<A, N> rows[kRows][kTogether];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        const int64_t offset = routes[r].offset;
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
            const Span taken = {offset >= 0 ? span.room - i * packStep : 0, span.step};
            rows[r][i] = loadPack<kWide, N, A>(columns, offset + i * packStep, taken);
        }
    }
    __syncwarp();  // keeps the compiler from moving loads behind the adds of earlier rows
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        const float weight = routes[r].weight;
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
            const Pack<float, N> row = toFloats(rows[r][i]);
#pragma unroll
            for (int n = 0; n < N; ++n) {
                sums[i].values[n] = fmaf(weight, row.values[n], sums[i].values[n]);
            }
        }
    }
}

/// Adds `count` rows, at most kRouteChunk, in batches that are no larger than they need be. Packs that are taken
/// together share what is in flight.
template <typename A, bool kWide, int kTogether, int N>
__device__ __forceinline__ void addRoutes(const A* columns, int packStep, const Route* routes, int count, Span span,
                                          Pack<float, N> (&sums)[kTogether]) {
    constexpr int kMost = kRowsInFlight<kWide>;
    int done = 0;
    if constexpr (kTogether == 1) {
        for (; count - done > kMost / 2; done += kMost) {
            addRows<A, kWide, kMost>(columns, packStep, routes + done, span, sums);
        }
    }
    if (count - done > kMost / 4) {
        addRows<A, kWide, kMost / 2>(columns, packStep, routes + done, span, sums);
    } else if (count > done) {
        addRows<A, kWide, kMost / 4>(columns, packStep, routes + done, span, sums);
    }
}

/// The sum of value over the CTAs of the token, in every thread of them. warpSums is shared memory for kMaxWarps
/// floats. Also a barrier of the calling CTA.
template <bool kCluster>
__device__ __forceinline__ float sumOverToken(float value, float* warpSums) {
#pragma unroll
    for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
        value += __shfl_xor_sync(0xffffffffU, value, distance);
    }
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
    if (lane == 0) {
        warpSums[warp] = value;
    }
    if constexpr (kCluster) {
        TokenCtas<kCluster>::arrive();
        TokenCtas<kCluster>::wait();
    } else {
        __syncthreads();
    }
    constexpr int kMostCtas = kCluster ? kMaxClusterSize : 1;
    const bool hasWarp = lane < static_cast<int>(blockDim.x) / kWarpSize;
    const int ctas = TokenCtas<kCluster>::count();
    float sums[kMostCtas];  // all on their way at once: another CTA's memory is far
#pragma unroll
    for (int rank = 0; rank < kMostCtas; ++rank) {
        sums[rank] = hasWarp && rank < ctas ? TokenCtas<kCluster>::shared(warpSums, rank)[lane] : 0.0F;
    }
    value = sums[0];
#pragma unroll
    for (int rank = 1; rank < kMostCtas; ++rank) {
        value += sums[rank];
    }
#pragma unroll
    for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
        value += __shfl_xor_sync(0xffffffffU, value, distance);
    }
    return value;
}

/// gamma's elements from `column` on, as fp32.
template <typename A, bool kWide, int N>
__device__ __forceinline__ Pack<float, N> loadGamma(const moetrt_moe_finalize_params& p, int64_t column, Span span) {
    return p.gamma_dtype == MOETRT_FLOAT ? loadPack<kWide, N, float>(p.gamma, column, span)
                                         : toFloats(loadPack<kWide, N, A>(p.gamma, column, span));
}

/// residual_out's pack of a token: the weighted sum of the rows, scaled, and the rest added; rounded once.
template <typename A, int N>
__device__ __forceinline__ Pack<A, N> finishSum(const moetrt_moe_finalize_params& p, const Pack<float, N>& routed,
                                                const Pack<float, N>& shared, float sharedScale,
                                                const Pack<float, N>& residual) {
    Pack<A, N> result;
#pragma unroll
    for (int n = 0; n < N; ++n) {
        float sum = routed.values[n] * p.routed_scaling_factor;
        sum = fmaf(sharedScale, shared.values[n], sum);
        sum *= p.combine_scale;
        sum = fmaf(p.residual_scale, residual.values[n], sum);
        result.values[n] = roundTo<A>(sum);
    }
    return result;
}

template <typename A, int N>
__device__ __forceinline__ Pack<A, N> normalise(const moetrt_moe_finalize_params& p, const Pack<A, N>& hidden,
                                                float scale, const Pack<float, N>& gamma) {
    Pack<A, N> normed;
#pragma unroll
    for (int n = 0; n < N; ++n) {
        float value = toFloat(hidden.values[n]) * scale;
        if (p.weight_before_cast == 0) {
            value = toFloat(roundTo<A>(value));
        }
        normed.values[n] = roundTo<A>(value * (gamma.values[n] + p.weight_bias));
    }
    return normed;
}

/// What each CTA of moeFinalizeKernel does.
template <typename A, bool kWide, int kElements, bool kCluster>
__device__ __forceinline__ void finalizeTokens(const moetrt_moe_finalize_params& p) {
    MOETRT_SHARED_ARRAY(Staged, stagedTokens, 2);
    MOETRT_SHARED_ARRAY(float, warpSums, 2 * kMaxWarps);
    constexpr int N = kWide ? kAccessBytes / static_cast<int>(sizeof(A)) : kScalarsInPack;
    constexpr int kPacks = kElements / N;
    // Only the last resorts take any H: the loop over tiles costs the others registers that they can use.
    constexpr bool kWalks = !kWide || kElements == 32;
    using Ctas = TokenCtas<kCluster>;

    const int threadOfCta = static_cast<int>(threadIdx.x);
    const int threads = static_cast<int>(blockDim.x) * Ctas::count();
    const int thread = Ctas::rank() * static_cast<int>(blockDim.x) + threadOfCta;
    const int packStep = threads * N;
    const int firstColumn = kWide ? thread * N : thread;
    const int step = kWide ? 1 : threads;
    const int tile = packStep * kPacks;
    // Nearly always one tile: the branch spares every CTA a 64-bit division before its first load.
    const int64_t lastTile = !kWalks || p.hidden_size <= tile ? 0 : (p.hidden_size - 1) / tile * tile;
    const int lastWidth = static_cast<int>(p.hidden_size - lastTile);
    const int64_t tokensAtOnce = gridDim.x / static_cast<unsigned>(Ctas::count());
    int64_t token = blockIdx.x / static_cast<unsigned>(Ctas::count());

    if (p.gamma != nullptr) {
        const int64_t size = p.gamma_dtype == MOETRT_FLOAT ? sizeof(float) : sizeof(A);
#pragma unroll
        for (int v = 0; v < kPacks; ++v) {
            const int column = v * packStep + firstColumn;
            if (column < lastWidth) {
                prefetch(static_cast<const char*>(p.gamma) + (lastTile + column) * size);
            }
        }
    }
    waitForUpstream();

    Pack<float, N> gamma[kPacks];
    const auto loadAllGamma = [&] {
#pragma unroll
        for (int v = 0; v < kPacks; ++v) {
            const int column = v * packStep + firstColumn;
            gamma[v] = loadGamma<A, kWide, N>(p, lastTile + column, {lastWidth - column, step});
        }
    };
    // A cluster's barrier waits for every load and store before it: its CTAs have gamma early, and keep it.
    if (kCluster && p.gamma != nullptr) {
        loadAllGamma();
    }
    if (threadOfCta < kRouteChunk) {
        stagedTokens[0].routes[threadOfCta] = toRoute(p, readRoute<A>(p, token, threadOfCta));
    }
    if (threadOfCta == 0) {
        stagedTokens[0].sharedScale = sigmoid(readGate<A>(p, token));
    }
    __syncthreads();

    bool isLast = false;
    for (int turn = 0; !isLast; turn ^= 1) {
        const int64_t next = token + tokensAtOnce;
        isLast = next >= p.num_tokens;
        RouteInputs nextRoute = {};
        float nextGate = 0.0F;
        if (!isLast && threadOfCta < kRouteChunk) {
            nextRoute = readRoute<A>(p, next, threadOfCta);
            nextGate = readGate<A>(p, next);
        }
        Staged& staged = stagedTokens[turn];

        Pack<A, N> hidden[kPacks];
        float squares = 0.0F;
        for (int64_t base = 0; base <= lastTile; base += tile) {
            const int width = base < lastTile ? tile : lastWidth;
            // The packs from firstPack on, as many as `together` says.
            const auto sumPacks = [&](auto together, int firstPack) {
                constexpr int kTogether = decltype(together)::value;
                Pack<A, N> shared[kTogether];
                Pack<A, N> residual[kTogether];
                Pack<float, N> routed[kTogether] = {};
                const int column = firstPack * packStep + firstColumn;
                const int64_t index = token * p.hidden_size + base + column;
                const Span span = {width - column, step};
#pragma unroll
                for (int i = 0; i < kTogether; ++i) {
                    const int room = span.room - i * packStep;
                    const int64_t at = index + i * packStep;
                    shared[i] = loadPack<kWide, N, A>(p.shared_output, at, {p.shared_output ? room : 0, step});
                    residual[i] = loadPack<kWide, N, A>(p.residual, at, {p.residual ? room : 0, step});
                }
                const A* const columns = static_cast<const A*>(p.gemm2_permuted) + base + column;
                for (int64_t first = 0; first < p.top_k; first += kRouteChunk) {
                    if (kTogether == 1 && p.top_k > kRouteChunk) {
                        __syncthreads();  // the routes staged before are still being read
                        if (threadOfCta < kRouteChunk) {
                            staged.routes[threadOfCta] = toRoute(p, readRoute<A>(p, token, first + threadOfCta));
                        }
                        __syncthreads();
                    }
                    const int count = static_cast<int>(p.top_k - first < kRouteChunk ? p.top_k - first : kRouteChunk);
                    addRoutes<A, kWide>(columns, packStep, staged.routes, count, span, routed);
                }
#pragma unroll
                for (int i = 0; i < kTogether; ++i) {
                    const Span own = {span.room - i * packStep, step};
                    // The norm reads what the next layer will read: the rounded value.
                    Pack<A, N>& sum = hidden[firstPack + i];
                    sum = finishSum<A>(p, routed[i], toFloats(shared[i]), staged.sharedScale, toFloats(residual[i]));
                    if (!kCluster || p.gamma == nullptr) {
                        storePack<kWide, N, A>(p.residual_out, index + i * packStep, own, sum);
                    }
#pragma unroll
                    for (int n = 0; n < N; ++n) {
                        const float value = n * step < own.room ? toFloat(sum.values[n]) : 0.0F;
                        squares = fmaf(value, value, squares);
                    }
                }
            };
            // Few rows leave room for two packs in flight.
            constexpr bool kPairs = kWide && kPacks % 2 == 0;
            if (kPairs && p.top_k <= kRowsInFlight<kWide> / 2) {
#pragma unroll
                for (int v = 0; v < kPacks; v += 2) {
                    sumPacks(std::integral_constant<int, kPairs ? 2 : 1>(), v);
                }
            } else {
#pragma unroll
                for (int v = 0; v < kPacks; ++v) {
                    sumPacks(std::integral_constant<int, 1>(), v);
                }
            }
        }

        if (isLast) {
            letDownstreamStart();
        } else {
            if (threadOfCta < kRouteChunk) {
                stagedTokens[turn ^ 1].routes[threadOfCta] = toRoute(p, nextRoute);
            }
            if (threadOfCta == 0) {
                stagedTokens[turn ^ 1].sharedScale = sigmoid(nextGate);
            }
        }
        if (p.gamma == nullptr) {
            __syncthreads();
            token = next;
            continue;
        }

        if (!kCluster) {
            loadAllGamma();  // before the barrier, so that it is there after it
        }
        const float sum = sumOverToken<kCluster>(squares, warpSums + turn * kMaxWarps);
        if (kCluster && isLast) {
            Ctas::arrive();
        }
        const float scale = 1.0F / sqrtf(sum / static_cast<float>(p.hidden_size) + p.eps);
#pragma unroll
        for (int v = 0; v < kPacks; ++v) {
            const int column = v * packStep + firstColumn;
            const int64_t index = token * p.hidden_size + lastTile + column;
            const Span span = {lastWidth - column, step};
            if (kCluster) {
                // Not before the barrier, see above.
                storePack<kWide, N, A>(p.residual_out, index, span, hidden[v]);
            }
            storePack<kWide, N, A>(p.norm_out, index, span, normalise<A>(p, hidden[v], scale, gamma[v]));
        }
        if constexpr (kWalks) {
            for (int64_t base = lastTile - tile; base >= 0; base -= tile) {
#pragma unroll
                for (int v = 0; v < kPacks; ++v) {
                    const int column = v * packStep + firstColumn;
                    const int64_t index = token * p.hidden_size + base + column;
                    const Span span = {tile - column, step};
                    storePack<kWide, N, A>(p.norm_out, index, span,
                                           normalise<A>(p, loadPack<kWide, N, A>(p.residual_out, index, span), scale,
                                                        loadGamma<A, kWide, N>(p, base + column, span)));
                }
            }
        }
        token = next;
    }
    if (kCluster && p.gamma != nullptr) {
        Ctas::wait();  // until the other CTAs have read this one's sums
    }
}

/// A is the dtype of rows and outputs; kWide: H, the row stride and all pointers allow 16-byte accesses; kElements:
/// what a thread holds of a token; kCluster: launched in clusters, each of which shares its tokens. gridDim.x is at
/// most num_tokens times the cluster's size, blockDim.x a multiple of kWarpSize.
template <typename A, bool kWide, int kElements, bool kCluster>
__global__ void __launch_bounds__(kBoundThreads<kElements, kCluster>, 1)
    moeFinalizeKernel(const moetrt_moe_finalize_params p) {
    if constexpr (!kCluster || MOETRT_SM90_FEATURES != 0) {
        finalizeTokens<A, kWide, kElements, kCluster>(p);
    } else {
        __trap();  // no cluster is launched with code for earlier devices
    }
}

}  // namespace moetrt

#endif
