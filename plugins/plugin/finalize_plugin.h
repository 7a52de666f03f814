// The TensorRT plugin of both operators: IPluginV3 with its core, build and runtime capabilities in one object.
#ifndef MOETRT_PLUGIN_FINALIZE_PLUGIN_H
#define MOETRT_PLUGIN_FINALIZE_PLUGIN_H

#include <NvInferRuntime.h>

#include <string>
#include <vector>

#include "kernel/moe_finalize_launch.h"
#include "moetrt/moe_finalize.h"
#include "operand_check.h"
#include "operator_table.h"

namespace moetrt {

class FinalizePlugin final : public nvinfer1::IPluginV3,
                             public nvinfer1::IPluginV3OneCore,
                             public nvinfer1::IPluginV3OneBuild,
                             public nvinfer1::IPluginV3OneRuntime {
public:
    /// `attributes` have been checked by the creator; `name` is the node's, for messages.
    FinalizePlugin(const OperatorSpec& spec, const Attributes& attributes, std::string name);

    nvinfer1::IPluginCapability* getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept override;
    nvinfer1::IPluginV3* clone() noexcept override;

    const char* getPluginName() const noexcept override { return spec_.name; }
    const char* getPluginVersion() const noexcept override { return kPluginVersion; }
    const char* getPluginNamespace() const noexcept override { return kNamespace; }

    int32_t getNbOutputs() const noexcept override { return static_cast<int32_t>(spec_.outputs.size()); }
    int32_t getOutputDataTypes(nvinfer1::DataType* outputTypes, int32_t nbOutputs, const nvinfer1::DataType* inputTypes,
                               int32_t nbInputs) const noexcept override;
    int32_t getOutputShapes(const nvinfer1::DimsExprs* inputs, int32_t nbInputs, const nvinfer1::DimsExprs* shapeInputs,
                            int32_t nbShapeInputs, nvinfer1::DimsExprs* outputs, int32_t nbOutputs,
                            nvinfer1::IExprBuilder& exprBuilder) noexcept override;
    bool supportsFormatCombination(int32_t pos, const nvinfer1::DynamicPluginTensorDesc* inOut, int32_t nbInputs,
                                   int32_t nbOutputs) noexcept override;
    int32_t configurePlugin(const nvinfer1::DynamicPluginTensorDesc* in, int32_t nbInputs,
                            const nvinfer1::DynamicPluginTensorDesc* out, int32_t nbOutputs) noexcept override;
    /// The kernel's tactics for the shapes that configurePlugin was given; none where no GPU is here to time them,
    /// which leaves the choice to each enqueue.
    int32_t getNbTactics() noexcept override;
    int32_t getValidTactics(int32_t* tactics, int32_t nbTactics) noexcept override;
    const char* getTimingCacheID() noexcept override { return timingCacheId_.c_str(); }

    /// Remembers the tactic. Where it is not worth timing for what enqueue is given, the default one runs: TensorRT has
    /// timed it at one size of a dynamic shape, and it may be slow at others, or not run them.
    int32_t setTactic(int32_t tactic) noexcept override;
    int32_t onShapeChange(const nvinfer1::PluginTensorDesc* in, int32_t nbInputs, const nvinfer1::PluginTensorDesc* out,
                          int32_t nbOutputs) noexcept override;
    int32_t enqueue(const nvinfer1::PluginTensorDesc* inputDesc, const nvinfer1::PluginTensorDesc* outputDesc,
                    const void* const* inputs, void* const* outputs, void* workspace,
                    cudaStream_t stream) noexcept override;
    nvinfer1::IPluginV3* attachToContext(nvinfer1::IPluginResourceContext* context) noexcept override;
    const nvinfer1::PluginFieldCollection* getFieldsToSerialize() noexcept override;

private:
    /// Tells `line` under the node's name; returns whether there was nothing to tell.
    bool accept(const std::string& line) const;
    /// The dimensions of the outputs: those of residual, else of shared_output, else [T, H].
    template <typename Dims>
    Dims outputDims(const Dims* inputs) const;
    /// The kernel's parameters for tensors of these shapes; pointers are null.
    moetrt_moe_finalize_params parametersOf(const nvinfer1::PluginTensorDesc* inputs) const;
    /// Asks for the current device unless it is known, or there is none.
    void findDevice();

    const OperatorSpec& spec_;
    const Attributes attributes_;
    const std::string name_;
    const InputList inputs_;
    std::vector<nvinfer1::PluginField> fields_;
    nvinfer1::PluginFieldCollection serialized_;
    const std::string timingCacheId_;
    const Device* device_ = nullptr;  // of the process, which keeps it
    int32_t tactic_ = MOETRT_TACTIC_DEFAULT;
    std::vector<int32_t> validTactics_;
};

}  // namespace moetrt

#endif
