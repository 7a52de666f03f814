// The table of tactics, and the choice among them.
#include "moe_finalize_tactics.h"

#include <algorithm>
#include <array>

namespace moetrt {
namespace {

constexpr std::array<Tactic, kTacticCount> kTactics = {{
    {1, "cta_8", Variant::kCta8, 8, 1, true, false},
    {2, "cta_16", Variant::kCta16, 16, 1, true, false},
    {3, "cta_32", Variant::kCta32, 32, 1, true, true},
    {4, "cluster_2", Variant::kCluster, 8, 2, true, false},
    {5, "cluster_4", Variant::kCluster, 8, 4, true, false},
    {6, "cluster_8", Variant::kCluster, 8, 8, true, false},
    {7, "scalar", Variant::kScalar, 16, 1, false, true},
}};

// Beyond that many CTAs for each multiprocessor the tokens alone fill the chip.
constexpr int64_t kMostCtasOfClusters = 8;
constexpr int64_t kThroughputThreads = 128;

bool isAccessAligned(const void* data) {
    return reinterpret_cast<uintptr_t>(data) % kAccessBytes == 0;  // null too: never read
}

/// Whether every access that the kernel makes along the hidden dimension can be one of 16 bytes.
bool takesWideAccess(const moetrt_moe_finalize_params& p) {
    const int64_t elements = kAccessBytes / (p.dtype == MOETRT_FLOAT ? 4 : 2);
    return p.hidden_size % elements == 0 && p.row_stride % elements == 0 && isAccessAligned(p.gemm2_permuted) &&
           isAccessAligned(p.shared_output) && isAccessAligned(p.residual) && isAccessAligned(p.gamma) &&
           isAccessAligned(p.norm_out) && isAccessAligned(p.residual_out);
}

/// The most elements that the threads of one token hold at once.
int64_t capacity(const Tactic& tactic) {
    return tactic.elementsPerThread * tactic.clusterSize * kMaxThreads;
}

/// Whether a tactic that runs may be the fastest.
bool isUseful(const Tactic& tactic, const moetrt_moe_finalize_params& p, const moetrt_device& device) {
    if (!tactic.wide) {
        return !takesWideAccess(p);
    }
    if (tactic.clusterSize > 1) {
        // A warp of work for each CTA; and few tokens, or a hidden state that no CTA alone holds.
        const bool few = p.num_tokens <= kMostCtasOfClusters * device.multiprocessors / tactic.clusterSize;
        return p.hidden_size >= tactic.clusterSize * tactic.elementsPerThread * kWarpSize &&
               (few || p.hidden_size > capacity(kTactics[2]));
    }
    // Where half the elements a thread fit into one warp too, more of them only leave threads idle.
    return tactic.elementsPerThread == kTactics[0].elementsPerThread ||
           p.hidden_size > tactic.elementsPerThread / 2 * kWarpSize;
}

/// The default among `useful`.
const Tactic* choose(const TacticList& useful, const moetrt_moe_finalize_params& p, const moetrt_device& device) {
    const Tactic* best = nullptr;
    // Decode: as many multiprocessors as there are on each token, as long as no CTA has less than two warps to do.
    for (const Tactic* tactic : useful) {
        if (tactic->clusterSize > 1 && p.num_tokens <= device.multiprocessors / tactic->clusterSize &&
            threadsOfCta(*tactic, p.hidden_size) >= 2 * kWarpSize) {
            best = tactic;
        }
    }
    // A hidden state that no CTA holds: the smallest cluster that does, at any number of tokens.
    if (best == nullptr && p.hidden_size > capacity(kTactics[2]) && useful.count > 1) {
        best = *std::find_if(useful.begin(), useful.end(), [](const Tactic* t) { return t->clusterSize > 1; });
    }
    if (best != nullptr) {
        return best;
    }
    best = *useful.begin();
    if (p.num_tokens <= 2 * static_cast<int64_t>(device.multiprocessors)) {
        return best;  // the most threads a token: nothing else hides its latency
    }
    // Prefill: many small CTAs on a multiprocessor, so that some load while others reduce.
    for (const Tactic* tactic : useful) {
        if (tactic->clusterSize == 1 && threadsOfCta(*tactic, p.hidden_size) >= kThroughputThreads) {
            best = tactic;
        }
    }
    return best;
}

}  // namespace

const Tactic* findTactic(int32_t id) {
    const auto* const found =
        std::find_if(kTactics.begin(), kTactics.end(), [&](const Tactic& tactic) { return tactic.id == id; });
    return found == kTactics.end() ? nullptr : found;
}

bool runsTactic(const Tactic& tactic, const moetrt_moe_finalize_params& params, const moetrt_device& device) {
    return (!tactic.wide || takesWideAccess(params)) &&
           (tactic.clusterSize == 1 || device.compute_capability >= kFirstWithSm90Features) &&
           (tactic.walks || params.hidden_size <= capacity(tactic));
}

TacticList usefulTactics(const moetrt_moe_finalize_params& params, const moetrt_device& device) {
    TacticList useful;
    for (const Tactic& tactic : kTactics) {
        if (runsTactic(tactic, params, device) && isUseful(tactic, params, device)) {
            useful.tactics[useful.count++] = &tactic;
        }
    }
    const Tactic** const first =
        std::find(useful.tactics.data(), useful.tactics.data() + useful.count, choose(useful, params, device));
    std::rotate(useful.tactics.data(), first, first + 1);
    return useful;
}

int64_t threadsOfCta(const Tactic& tactic, int64_t hiddenSize) {
    const int64_t perWarp = tactic.elementsPerThread * tactic.clusterSize * kWarpSize;
    const int64_t warps = (hiddenSize - 1) / perWarp + 1;
    return std::min<int64_t>(warps * kWarpSize, kMaxThreads);
}

}  // namespace moetrt
