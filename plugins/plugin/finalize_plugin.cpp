// What TensorRT asks of the plugin, answered from the operators' table.
#include "finalize_plugin.h"

#include <algorithm>
#include <new>
#include <utility>

#include "errors.h"
#include "moetrt/moe_finalize.h"
#include "run.h"

namespace moetrt {
namespace {

using nvinfer1::DataType;
using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::PluginTensorDesc;

constexpr int32_t kTaken = 0;
constexpr int32_t kRefused = 1;

int32_t toMoetrt(DataType dtype) {
    switch (dtype) {
        case DataType::kHALF: return MOETRT_HALF;
        case DataType::kBF16: return MOETRT_BFLOAT16;
        default: return MOETRT_FLOAT;
    }
}

Shape exactShape(const nvinfer1::Dims& dims) {
    Shape shape;
    for (int32_t i = 0; i < dims.nbDims; ++i) {
        shape.push_back(dims.d[i] < 0 ? Extent{} : Extent{dims.d[i], dims.d[i]});
    }
    return shape;
}

Shape symbolicShape(const nvinfer1::DimsExprs& dims) {
    Shape shape;
    for (int32_t i = 0; i < dims.nbDims; ++i) {
        const nvinfer1::IDimensionExpr& expression = *dims.d[i];
        shape.push_back(expression.isConstant() ? Extent{expression.getConstantValue(), expression.getConstantValue()}
                                                : Extent{});
    }
    return shape;
}

Shape boundedShape(const DynamicPluginTensorDesc& tensor) {
    Shape shape;
    for (int32_t i = 0; i < tensor.desc.dims.nbDims; ++i) {
        // Before a profile is chosen TensorRT leaves bounds negative; such a dimension is open.
        const bool bounded = tensor.min.d[i] >= 0 && tensor.max.d[i] >= tensor.min.d[i];
        shape.push_back(bounded ? Extent{tensor.min.d[i], tensor.max.d[i]} : Extent{});
    }
    return shape;
}

bool isExact(const std::vector<PluginTensorDesc>& tensors) {
    for (const PluginTensorDesc& tensor : tensors) {
        for (int32_t i = 0; i < tensor.dims.nbDims; ++i) {
            if (tensor.dims.d[i] < 0) {
                return false;
            }
        }
    }
    return true;
}

/// The dimensions in the middle of a range that a profile has: what TensorRT times at.
PluginTensorDesc timedDesc(const DynamicPluginTensorDesc& tensor) {
    PluginTensorDesc desc = tensor.desc;
    desc.dims = tensor.opt;
    return desc;
}

/// TensorRT adds shapes, formats and the device; what else decides the kernel's time is this library and the
/// attributes.
std::string timingCacheId(const OperatorSpec& spec, const Attributes& attributes) {
    std::string id = std::string("moetrt ") + MOETRT_VERSION + " kernel " + std::to_string(kKernelVersion) + " ";
    for (const AttributeSpec& attribute : spec.attributes) {
        if (attribute.flag != nullptr) {
            id += attributes.*attribute.flag != 0 ? '1' : '0';
        }
    }
    return id;
}

}  // namespace

FinalizePlugin::FinalizePlugin(const OperatorSpec& spec, const Attributes& attributes, std::string name)
    : spec_(spec),
      attributes_(attributes),
      name_(std::move(name)),
      inputs_(spec, attributes),
      timingCacheId_(timingCacheId(spec, attributes)) {
    for (const AttributeSpec& attribute : spec_.attributes) {
        if (attribute.flag != nullptr) {
            fields_.emplace_back(attribute.name, &(attributes_.*attribute.flag), nvinfer1::PluginFieldType::kINT32, 1);
        } else {
            fields_.emplace_back(attribute.name, &(attributes_.*attribute.number), nvinfer1::PluginFieldType::kFLOAT32,
                                 1);
        }
    }
    serialized_ = {static_cast<int32_t>(fields_.size()), fields_.data()};
}

nvinfer1::IPluginCapability* FinalizePlugin::getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept {
    switch (type) {
        case nvinfer1::PluginCapabilityType::kCORE: return static_cast<nvinfer1::IPluginV3OneCore*>(this);
        case nvinfer1::PluginCapabilityType::kBUILD: return static_cast<nvinfer1::IPluginV3OneBuild*>(this);
        case nvinfer1::PluginCapabilityType::kRUNTIME: return static_cast<nvinfer1::IPluginV3OneRuntime*>(this);
    }
    return nullptr;
}

nvinfer1::IPluginV3* FinalizePlugin::clone() noexcept {
    auto* const copy = new (std::nothrow) FinalizePlugin(spec_, attributes_, name_);
    if (copy != nullptr) {
        copy->device_ = device_;
        copy->tactic_ = tactic_;
        copy->validTactics_ = validTactics_;
    }
    return copy;
}

nvinfer1::IPluginV3* FinalizePlugin::attachToContext(nvinfer1::IPluginResourceContext*) noexcept {
    auto* const attached = static_cast<FinalizePlugin*>(clone());
    if (attached != nullptr) {
        // The context's device may be another than the one that the engine was built on.
        attached->device_ = nullptr;
        attached->findDevice();
    }
    return attached;
}

void FinalizePlugin::findDevice() {
    // Where there is none, enqueue says so.
    if (device_ == nullptr && currentDevice(device_) != cudaSuccess) {
        device_ = nullptr;
    }
}

const nvinfer1::PluginFieldCollection* FinalizePlugin::getFieldsToSerialize() noexcept {
    return &serialized_;
}

int32_t FinalizePlugin::getOutputDataTypes(DataType* outputTypes, int32_t nbOutputs, const DataType* inputTypes,
                                           int32_t nbInputs) const noexcept {
    if (!accept(checkInputCount(inputs_, nbInputs)) || !accept(checkDtypes(inputs_, inputTypes))) {
        return kRefused;
    }
    for (int32_t i = 0; i < nbOutputs; ++i) {
        outputTypes[i] = inputTypes[inputs_.position(Input::kGemm2Permuted)];
    }
    return kTaken;
}

template <typename Dims>
Dims FinalizePlugin::outputDims(const Dims* inputs) const {
    for (const Input input : {Input::kResidual, Input::kSharedOutput}) {
        if (inputs_.has(input)) {
            return inputs[inputs_.position(input)];
        }
    }
    Dims dims{};
    dims.nbDims = 2;
    dims.d[0] = inputs[inputs_.position(Input::kExpertWeights)].d[0];
    dims.d[1] = inputs_.has(Input::kGamma) ? inputs[inputs_.position(Input::kGamma)].d[0]
                                           : inputs[inputs_.position(Input::kGemm2Permuted)].d[1];
    return dims;
}

int32_t FinalizePlugin::getOutputShapes(const nvinfer1::DimsExprs* inputs, int32_t nbInputs, const nvinfer1::DimsExprs*,
                                        int32_t, nvinfer1::DimsExprs* outputs, int32_t nbOutputs,
                                        nvinfer1::IExprBuilder&) noexcept {
    if (!accept(checkInputCount(inputs_, nbInputs))) {
        return kRefused;
    }
    std::vector<Shape> shapes;
    for (int32_t i = 0; i < nbInputs; ++i) {
        shapes.push_back(symbolicShape(inputs[i]));
    }
    if (!accept(checkShapes(inputs_, shapes))) {
        return kRefused;
    }
    for (int32_t i = 0; i < nbOutputs; ++i) {
        outputs[i] = outputDims(inputs);
    }
    return kTaken;
}

bool FinalizePlugin::supportsFormatCombination(int32_t pos, const DynamicPluginTensorDesc* inOut, int32_t nbInputs,
                                               int32_t nbOutputs) noexcept {
    if (nbInputs != inputs_.count() || pos < 0 || pos >= nbInputs + nbOutputs) {
        return false;
    }
    // Only entries up to pos may be read; the first is gemm2_permuted, which all others follow.
    const PluginTensorDesc& tensor = inOut[pos].desc;
    const DataType data = inOut[inputs_.position(Input::kGemm2Permuted)].desc.type;
    const bool taken = pos < nbInputs ? dtypeTaken(inputs_.at(pos), tensor.type, data) : tensor.type == data;
    return taken && tensor.format == nvinfer1::TensorFormat::kLINEAR;
}

int32_t FinalizePlugin::configurePlugin(const DynamicPluginTensorDesc* in, int32_t nbInputs,
                                        const DynamicPluginTensorDesc*, int32_t) noexcept {
    if (!accept(checkInputCount(inputs_, nbInputs))) {
        return kRefused;
    }
    std::vector<Shape> shapes;
    for (int32_t i = 0; i < nbInputs; ++i) {
        shapes.push_back(boundedShape(in[i]));
    }
    if (!accept(checkShapes(inputs_, shapes))) {
        return kRefused;
    }
    validTactics_.clear();
    // A clone may be configured for another device than its original was.
    device_ = nullptr;
    findDevice();
    std::vector<PluginTensorDesc> timed;
    for (int32_t i = 0; i < nbInputs; ++i) {
        timed.push_back(timedDesc(in[i]));
    }
    if (device_ != nullptr && isExact(timed)) {
        for (const Tactic* tactic : usefulTactics(parametersOf(timed.data()), device_->properties)) {
            validTactics_.push_back(tactic->id);
        }
    }
    return kTaken;
}

int32_t FinalizePlugin::getNbTactics() noexcept {
    return static_cast<int32_t>(validTactics_.size());
}

int32_t FinalizePlugin::getValidTactics(int32_t* tactics, int32_t nbTactics) noexcept {
    std::copy_n(validTactics_.begin(), std::min<size_t>(validTactics_.size(), static_cast<size_t>(nbTactics)), tactics);
    return kTaken;
}

int32_t FinalizePlugin::setTactic(int32_t tactic) noexcept {
    tactic_ = tactic;
    return kTaken;
}

int32_t FinalizePlugin::onShapeChange(const PluginTensorDesc* in, int32_t nbInputs, const PluginTensorDesc*,
                                      int32_t) noexcept {
    if (!accept(checkInputCount(inputs_, nbInputs))) {
        return kRefused;
    }
    std::vector<Shape> shapes;
    for (int32_t i = 0; i < nbInputs; ++i) {
        shapes.push_back(exactShape(in[i].dims));
    }
    findDevice();
    return accept(checkShapes(inputs_, shapes)) ? kTaken : kRefused;
}

moetrt_moe_finalize_params FinalizePlugin::parametersOf(const PluginTensorDesc* tensors) const {
    const auto dtype = [&](Input input) {
        return inputs_.has(input) ? toMoetrt(tensors[inputs_.position(input)].type) : MOETRT_FLOAT;
    };
    const nvinfer1::Dims& rows = tensors[inputs_.position(Input::kGemm2Permuted)].dims;
    const nvinfer1::Dims& weights = tensors[inputs_.position(Input::kExpertWeights)].dims;
    moetrt_moe_finalize_params params{};
    params.num_tokens = weights.d[0];
    params.top_k = weights.d[1];
    params.num_rows = rows.d[0];
    params.row_stride = rows.d[1];
    params.hidden_size = rows.d[1];
    for (const Input input : {Input::kSharedOutput, Input::kResidual, Input::kGamma}) {
        if (inputs_.has(input)) {
            const nvinfer1::Dims& dims = tensors[inputs_.position(input)].dims;
            params.hidden_size = dims.d[dims.nbDims - 1];
        }
    }
    params.dtype = dtype(Input::kGemm2Permuted);
    params.weights_dtype = dtype(Input::kExpertWeights);
    params.gate_dtype = dtype(Input::kSharedGate);
    params.gamma_dtype = dtype(Input::kGamma);
    params.eps = attributes_.eps;
    params.residual_scale = attributes_.residualScale;
    params.combine_scale = attributes_.combineScale;
    params.routed_scaling_factor = attributes_.routedScalingFactor;
    params.weight_bias = attributes_.weightBias;
    params.weight_before_cast = attributes_.weightBeforeCast;
    params.apply_expert_weights = attributes_.applyExpertWeights;
    params.programmatic_dependent_launch = attributes_.programmaticDependentLaunch;
    return params;
}

int32_t FinalizePlugin::enqueue(const PluginTensorDesc* inputDesc, const PluginTensorDesc*, const void* const* inputs,
                                void* const* outputs, void*, cudaStream_t stream) noexcept {
    const auto pointer = [&](Input input) -> const void* {
        return inputs_.has(input) ? inputs[inputs_.position(input)] : nullptr;
    };
    moetrt_moe_finalize_params params = parametersOf(inputDesc);
    params.gemm2_permuted = pointer(Input::kGemm2Permuted);
    params.expert_weights = pointer(Input::kExpertWeights);
    params.expanded_idx_to_permuted_idx = static_cast<const int32_t*>(pointer(Input::kMap));
    params.shared_output = pointer(Input::kSharedOutput);
    params.shared_gate = pointer(Input::kSharedGate);
    params.residual = pointer(Input::kResidual);
    params.gamma = pointer(Input::kGamma);
    params.norm_out = spec_.hasNorm ? outputs[0] : nullptr;
    params.residual_out = outputs[spec_.outputs.size() - 1];
    return accept(runMoEFinalize(params, device_, tactic_, TacticUse::kPreferred, stream)) ? kTaken : kRefused;
}

bool FinalizePlugin::accept(const std::string& line) const {
    if (line.empty()) {
        return true;
    }
    refuse(nodeLabel(spec_, name_) + ": " + line);
    return false;
}

}  // namespace moetrt
