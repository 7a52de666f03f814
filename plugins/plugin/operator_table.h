// The two operators as one table: their inputs in order, their attributes, and which attribute says that an optional
// input is there. Names and defaults are those of moetrt.spec; a test compares the two.
#ifndef MOETRT_PLUGIN_OPERATOR_TABLE_H
#define MOETRT_PLUGIN_OPERATOR_TABLE_H

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace moetrt {

inline constexpr const char* kNamespace = "moetrt";
inline constexpr const char* kPluginVersion = "1";

/// Every input that an operator may have; used as an index too.
enum class Input : uint8_t { kGemm2Permuted, kExpertWeights, kMap, kSharedOutput, kSharedGate, kResidual, kGamma };
inline constexpr int kInputCount = 7;

/// The values of a node's attributes. An operator that lacks an attribute never changes its default here.
struct Attributes {
    int32_t hasMap = 1;
    int32_t hasSharedOutput = 0;
    int32_t hasSharedGate = 0;
    int32_t hasResidual = 1;
    float eps = 1e-6F;
    float residualScale = 1.0F;
    float combineScale = 1.0F;
    float routedScalingFactor = 1.0F;
    int32_t applyExpertWeights = 1;
    float weightBias = 0.0F;
    int32_t weightBeforeCast = 1;
    int32_t programmaticDependentLaunch = 1;
};

/// Which dtypes an input may have; "data" is the dtype of gemm2_permuted.
enum class DtypeRule : uint8_t { kAnyData, kData, kDataOrFloat, kInt32 };

struct InputSpec {
    Input input;
    const char* name;
    const char* shape;
    DtypeRule dtype;
    int32_t Attributes::* present;  ///< the has_* attribute; null for an input that is always there
};

/// Exactly one of `flag` (an int32 field, 0 or 1) and `number` (a float32 field) is set.
struct AttributeSpec {
    const char* name;
    int32_t Attributes::* flag;
    float Attributes::* number;
    bool nonNegative;
    bool zeroOrOne;
};

struct OperatorSpec {
    const char* name;
    std::span<const InputSpec> inputs;
    std::span<const AttributeSpec> attributes;
    std::span<const char* const> outputs;
    Attributes defaults;
    bool hasNorm;
};

/// MoEFinalizeAddRMSNorm and MoEFinalizeAdd.
extern const std::array<OperatorSpec, 2> kOperators;

/// The inputs that a node with these attributes has, in the order of the node.
std::vector<const InputSpec*> presentInputs(const OperatorSpec& spec, const Attributes& attributes);

/// "MoEFinalizeAddRMSNorm 'layer.3'", or the operator's name alone where the node has none.
std::string nodeLabel(const OperatorSpec& spec, const std::string& name);

}  // namespace moetrt

#endif
