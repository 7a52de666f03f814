// Which parameters of a MoE tail are taken, and one line that says why the others are not.
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>

#include "moe_finalize_launch.h"

namespace moetrt {
namespace {

constexpr int64_t kMaxTokens = std::numeric_limits<int32_t>::max();
constexpr int64_t kMaxTopK = std::numeric_limits<int32_t>::max();

std::string refusal(const std::string& name, const std::string& was, const std::string& taken) {
    return name + " is " + was + ", taken is " + taken;
}

bool isDtype(int32_t dtype) {
    return dtype == MOETRT_FLOAT || dtype == MOETRT_HALF || dtype == MOETRT_BFLOAT16;
}

int64_t sizeOf(int32_t dtype) {
    return dtype == MOETRT_FLOAT ? 4 : 2;
}

std::string dtypeName(int32_t dtype) {
    switch (dtype) {
        case MOETRT_FLOAT: return "float32";
        case MOETRT_HALF: return "float16";
        case MOETRT_BFLOAT16: return "bfloat16";
        default: return std::to_string(dtype);
    }
}

/// rows * columns * elementSize bytes; false where that does not fit into an int64.
bool arrayBytes(int64_t rows, int64_t columns, int64_t elementSize, int64_t& bytes) {
    return !__builtin_mul_overflow(rows, columns, &bytes) && !__builtin_mul_overflow(bytes, elementSize, &bytes);
}

struct Array {
    const char* name;
    const void* data;
    int64_t elementSize;
    int64_t bytes;
    bool isOutput;
};

/// An array of no bytes overlaps nothing, wherever it points.
bool overlaps(const Array& a, const Array& b) {
    const auto beginA = reinterpret_cast<uintptr_t>(a.data);
    const auto beginB = reinterpret_cast<uintptr_t>(b.data);
    return a.bytes > 0 && b.bytes > 0 && beginA < beginB + static_cast<uintptr_t>(b.bytes) &&
           beginB < beginA + static_cast<uintptr_t>(a.bytes);
}

std::string checkSizes(const moetrt_moe_finalize_params& p) {
    if (p.num_tokens < 0 || p.num_tokens > kMaxTokens) {
        return refusal("num_tokens", std::to_string(p.num_tokens), "0 to " + std::to_string(kMaxTokens));
    }
    if (p.top_k < 1 || p.top_k > kMaxTopK) {
        return refusal("top_k", std::to_string(p.top_k), "1 to " + std::to_string(kMaxTopK));
    }
    if (p.num_rows < 0) {
        return refusal("num_rows", std::to_string(p.num_rows), "0 or more");
    }
    if (p.hidden_size < 1) {
        return refusal("hidden_size", std::to_string(p.hidden_size), "1 or more");
    }
    if (p.row_stride < p.hidden_size) {
        return refusal("row_stride", std::to_string(p.row_stride),
                       "hidden_size (" + std::to_string(p.hidden_size) + ") or more");
    }
    int64_t bytes = 0;
    if (!arrayBytes(p.num_rows, p.row_stride, sizeOf(MOETRT_FLOAT), bytes) ||
        !arrayBytes(p.num_tokens, p.hidden_size, sizeOf(MOETRT_FLOAT), bytes) ||
        !arrayBytes(p.num_tokens, p.top_k, sizeOf(MOETRT_FLOAT), bytes)) {
        return "num_rows " + std::to_string(p.num_rows) + ", row_stride " + std::to_string(p.row_stride) +
               ", num_tokens " + std::to_string(p.num_tokens) + ", top_k " + std::to_string(p.top_k) +
               " and hidden_size " + std::to_string(p.hidden_size) + " give arrays of 2^63 bytes or more";
    }
    return "";
}

std::string checkDtypes(const moetrt_moe_finalize_params& p) {
    if (!isDtype(p.dtype)) {
        return refusal("dtype", dtypeName(p.dtype), "0 (float32), 1 (float16) or 2 (bfloat16)");
    }
    struct Side {
        const char* name;
        int32_t dtype;
        bool used;
    };
    const std::array<Side, 3> sides = {{
        {"weights_dtype", p.weights_dtype, p.apply_expert_weights != 0},
        {"gate_dtype", p.gate_dtype, p.shared_gate != nullptr},
        {"gamma_dtype", p.gamma_dtype, p.gamma != nullptr},
    }};
    for (const Side& side : sides) {
        if (side.used && side.dtype != p.dtype && side.dtype != MOETRT_FLOAT) {
            const std::string taken = p.dtype == MOETRT_FLOAT ? "" : dtypeName(p.dtype) + " (as dtype) or ";
            return refusal(side.name, dtypeName(side.dtype), taken + "float32");
        }
    }
    return "";
}

std::string checkAttributes(const moetrt_moe_finalize_params& p) {
    struct Flag {
        const char* name;
        int32_t value;
    };
    const std::array<Flag, 3> flags = {{
        {"weight_before_cast", p.weight_before_cast},
        {"apply_expert_weights", p.apply_expert_weights},
        {"programmatic_dependent_launch", p.programmatic_dependent_launch},
    }};
    for (const Flag& flag : flags) {
        if (flag.value != 0 && flag.value != 1) {
            return refusal(flag.name, std::to_string(flag.value), "0 or 1");
        }
    }
    if (!std::isfinite(p.eps) || p.eps < 0.0F) {
        return refusal("eps", std::to_string(p.eps), "a finite number, 0 or more");
    }
    if (p.weight_bias != 0.0F && p.weight_bias != 1.0F) {
        return refusal("weight_bias", std::to_string(p.weight_bias), "0 or 1");
    }
    struct Scale {
        const char* name;
        float value;
    };
    const std::array<Scale, 3> scales = {{
        {"residual_scale", p.residual_scale},
        {"combine_scale", p.combine_scale},
        {"routed_scaling_factor", p.routed_scaling_factor},
    }};
    for (const Scale& scale : scales) {
        if (!std::isfinite(scale.value)) {
            return refusal(scale.name, std::to_string(scale.value), "a finite number");
        }
    }
    return "";
}

std::string checkOperandsGiven(const moetrt_moe_finalize_params& p) {
    const int64_t routes = p.num_tokens * p.top_k;
    if (p.expanded_idx_to_permuted_idx == nullptr && p.num_rows != routes) {
        return refusal("num_rows", std::to_string(p.num_rows),
                       "num_tokens * top_k (" + std::to_string(routes) + ") without expanded_idx_to_permuted_idx");
    }
    if (p.shared_gate != nullptr && p.shared_output == nullptr) {
        return "shared_gate is given without shared_output, which it multiplies";
    }
    if (p.gamma != nullptr && p.norm_out == nullptr) {
        return refusal("norm_out", "null", "an array where gamma is given");
    }
    if (p.gamma == nullptr && p.norm_out != nullptr) {
        return refusal("gamma", "null", "an array where norm_out is given");
    }
    if (p.residual_out == nullptr) {
        return refusal("residual_out", "null", "an array");
    }
    if (p.gemm2_permuted == nullptr && p.num_rows > 0) {
        return refusal("gemm2_permuted", "null", "an array where num_rows is not 0");
    }
    if (p.expert_weights == nullptr && p.apply_expert_weights != 0) {
        return refusal("expert_weights", "null", "an array unless apply_expert_weights is 0");
    }
    return "";
}

/// Alignment to one element, and outputs that lie apart from everything else: CTAs run in any order, so that one
/// token's outputs may be there before another token's inputs are read.
std::string checkArrays(const moetrt_moe_finalize_params& p) {
    const int64_t size = sizeOf(p.dtype);
    const int64_t hiddenBytes = p.num_tokens * p.hidden_size * size;
    const int64_t gemm2Bytes = p.num_rows == 0 ? 0 : ((p.num_rows - 1) * p.row_stride + p.hidden_size) * size;
    const int64_t weightSize = sizeOf(p.weights_dtype);
    const int64_t gateSize = sizeOf(p.gate_dtype);
    const int64_t gammaSize = sizeOf(p.gamma_dtype);
    const int64_t routes = p.num_tokens * p.top_k;
    const void* weights = p.apply_expert_weights != 0 ? p.expert_weights : nullptr;
    const std::array<Array, 9> arrays = {{
        {"residual_out", p.residual_out, size, hiddenBytes, true},
        {"norm_out", p.norm_out, size, hiddenBytes, true},
        {"gemm2_permuted", p.gemm2_permuted, size, gemm2Bytes, false},
        {"expert_weights", weights, weightSize, routes * weightSize, false},
        {"expanded_idx_to_permuted_idx", p.expanded_idx_to_permuted_idx, 4, routes * 4, false},
        {"shared_output", p.shared_output, size, hiddenBytes, false},
        {"shared_gate", p.shared_gate, gateSize, p.num_tokens * gateSize, false},
        {"residual", p.residual, size, hiddenBytes, false},
        {"gamma", p.gamma, gammaSize, p.hidden_size * gammaSize, false},
    }};
    for (size_t i = 0; i < arrays.size(); ++i) {
        const Array& array = arrays[i];
        const auto address = reinterpret_cast<uintptr_t>(array.data);
        if (address % static_cast<uintptr_t>(array.elementSize) != 0) {
            return refusal(array.name, "at an address that is no multiple of its element size",
                           "one that is a multiple of " + std::to_string(array.elementSize) + " bytes");
        }
        for (size_t j = i + 1; array.isOutput && array.data != nullptr && j < arrays.size(); ++j) {
            if (arrays[j].data != nullptr && overlaps(array, arrays[j])) {
                return std::string(array.name) + " overlaps " + arrays[j].name + ", taken are outputs that lie apart";
            }
        }
    }
    return "";
}

}  // namespace

std::string checkMoEFinalize(const moetrt_moe_finalize_params& params) {
    using Check = std::string (*)(const moetrt_moe_finalize_params&);
    for (const Check check : {checkSizes, checkDtypes, checkAttributes}) {
        if (std::string line = check(params); !line.empty()) {
            return line;
        }
    }
    // TensorRT passes any pointers, null too, for empty tensors, and with no tokens none is read.
    if (params.num_tokens > 0) {
        for (const Check check : {checkOperandsGiven, checkArrays}) {
            if (std::string line = check(params); !line.empty()) {
                return line;
            }
        }
    }
    return "";
}

}  // namespace moetrt
