// The rows of the operators' table.
#include "operator_table.h"

namespace moetrt {
namespace {

constexpr InputSpec kGemm2Permuted{Input::kGemm2Permuted, "gemm2_permuted", "[R, Hp], Hp >= H", DtypeRule::kAnyData,
                                   nullptr};
constexpr InputSpec kExpertWeights{Input::kExpertWeights, "expert_weights", "[T, K]", DtypeRule::kDataOrFloat, nullptr};
constexpr InputSpec kMap{Input::kMap, "expanded_idx_to_permuted_idx", "[T, K]", DtypeRule::kInt32, &Attributes::hasMap};
constexpr InputSpec kSharedOutput{Input::kSharedOutput, "shared_output", "[..., H]", DtypeRule::kData,
                                  &Attributes::hasSharedOutput};
constexpr InputSpec kSharedGate{Input::kSharedGate, "shared_gate", "[T, 1]", DtypeRule::kDataOrFloat,
                                &Attributes::hasSharedGate};
constexpr InputSpec kResidual{Input::kResidual, "residual", "[..., H]", DtypeRule::kData, &Attributes::hasResidual};
constexpr InputSpec kGamma{Input::kGamma, "gamma", "[H]", DtypeRule::kDataOrFloat, nullptr};

constexpr AttributeSpec flag(const char* name, int32_t Attributes::* member) {
    return {name, member, nullptr, false, false};
}

constexpr AttributeSpec number(const char* name, float Attributes::* member) {
    return {name, nullptr, member, false, false};
}

constexpr AttributeSpec kHasMap = flag("has_expanded_idx_to_permuted_idx", &Attributes::hasMap);
constexpr AttributeSpec kHasSharedOutput = flag("has_shared_output", &Attributes::hasSharedOutput);
constexpr AttributeSpec kHasSharedGate = flag("has_shared_gate", &Attributes::hasSharedGate);
constexpr AttributeSpec kCombineScale = number("combine_scale", &Attributes::combineScale);
constexpr AttributeSpec kRoutedScalingFactor = number("routed_scaling_factor", &Attributes::routedScalingFactor);
constexpr AttributeSpec kApplyExpertWeights = flag("apply_expert_weights", &Attributes::applyExpertWeights);
constexpr AttributeSpec kProgrammaticDependentLaunch =
    flag("programmatic_dependent_launch", &Attributes::programmaticDependentLaunch);

constexpr std::array kNormInputs{kGemm2Permuted, kExpertWeights, kMap, kSharedOutput, kSharedGate, kResidual, kGamma};
constexpr std::array kAddInputs{kGemm2Permuted, kExpertWeights, kMap, kSharedOutput, kSharedGate};

constexpr std::array kNormAttributes{
    kHasMap,
    kHasSharedOutput,
    kHasSharedGate,
    flag("has_residual", &Attributes::hasResidual),
    AttributeSpec{"eps", nullptr, &Attributes::eps, true, false},
    number("residual_scale", &Attributes::residualScale),
    kCombineScale,
    kRoutedScalingFactor,
    kApplyExpertWeights,
    AttributeSpec{"weight_bias", nullptr, &Attributes::weightBias, false, true},
    flag("weight_before_cast", &Attributes::weightBeforeCast),
    kProgrammaticDependentLaunch,
};
constexpr std::array kAddAttributes{kHasMap,
                                    kHasSharedOutput,
                                    kHasSharedGate,
                                    kCombineScale,
                                    kRoutedScalingFactor,
                                    kApplyExpertWeights,
                                    kProgrammaticDependentLaunch};

constexpr std::array<const char*, 2> kNormOutputs{"norm_out", "residual_out"};
constexpr std::array<const char*, 1> kAddOutputs{"hidden"};

}  // namespace

const std::array<OperatorSpec, 2> kOperators{{
    {"MoEFinalizeAddRMSNorm", kNormInputs, kNormAttributes, kNormOutputs, Attributes{}, true},
    {"MoEFinalizeAdd", kAddInputs, kAddAttributes, kAddOutputs, Attributes{.hasResidual = 0}, false},
}};

std::vector<const InputSpec*> presentInputs(const OperatorSpec& spec, const Attributes& attributes) {
    std::vector<const InputSpec*> present;
    for (const InputSpec& input : spec.inputs) {
        if (input.present == nullptr || attributes.*input.present != 0) {
            present.push_back(&input);
        }
    }
    return present;
}

std::string nodeLabel(const OperatorSpec& spec, const std::string& name) {
    return name.empty() ? spec.name : std::string(spec.name) + " '" + name + "'";
}

}  // namespace moetrt
