// The ways to run the kernel, which of them suit a tail, and which is taken when nothing has been timed.
//
// Pure functions of sizes, dtypes, the alignment of pointers and the device, for the launch, for TensorRT and for
// tests.
#ifndef MOETRT_KERNEL_MOE_FINALIZE_TACTICS_H
#define MOETRT_KERNEL_MOE_FINALIZE_TACTICS_H

#include <array>
#include <cstdint>

#include "moetrt/moe_finalize.h"

namespace moetrt {

/// Changes with every change of the kernel's speed or of a tactic's meaning, so that no timing outlives what it timed.
constexpr int32_t kKernelVersion = 2;

constexpr int kWarpSize = 32;
constexpr int kMaxThreads = 512;  // of a CTA: 128 registers each
constexpr int kAccessBytes = 16;
constexpr int kMaxClusterSize = 8;              // what every device with clusters takes
constexpr int32_t kFirstWithSm90Features = 90;  // clusters, programmatic dependent launch

/// The instantiations that each dtype has; moe_finalize.cu says what each is for.
enum class Variant : uint8_t { kCta8, kCta16, kCta32, kCluster, kScalar };
constexpr int kVariants = 5;

/// One way to run the kernel. The numbers of tactics are kept in engines and timing caches: none is ever used again for
/// something else.
struct Tactic {
    int32_t id;
    const char* name;
    Variant variant;
    int64_t elementsPerThread;  ///< of the hidden state that a thread holds in registers
    int64_t clusterSize;        ///< CTAs that share a token
    bool wide;                  ///< every access along the hidden dimension has 16 bytes
    bool walks;                 ///< takes a hidden state that its threads do not hold at once
};

/// The tactic with that id; null where there is none.
const Tactic* findTactic(int32_t id);

/// Whether `tactic` computes `params` on `device`.
bool runsTactic(const Tactic& tactic, const moetrt_moe_finalize_params& params, const moetrt_device& device);

constexpr int kTacticCount = 7;

struct TacticList {
    std::array<const Tactic*, kTacticCount> tactics = {};
    int count = 0;

    const Tactic* const* begin() const { return tactics.data(); }
    const Tactic* const* end() const { return tactics.data() + count; }
};

/// The tactics worth timing, the default one first; never empty.
TacticList usefulTactics(const moetrt_moe_finalize_params& params, const moetrt_device& device);

/// Threads of a CTA, a multiple of kWarpSize: no more than hold the hidden state.
int64_t threadsOfCta(const Tactic& tactic, int64_t hiddenSize);

}  // namespace moetrt

#endif
