// Makes plugins from attribute fields, one creator for each operator of the table.
#ifndef MOETRT_PLUGIN_FINALIZE_CREATOR_H
#define MOETRT_PLUGIN_FINALIZE_CREATOR_H

#include <NvInferRuntime.h>

#include <vector>

#include "operator_table.h"

namespace moetrt {

class FinalizeCreator final : public nvinfer1::IPluginCreatorV3One {
public:
    explicit FinalizeCreator(const OperatorSpec& spec);
    FinalizeCreator(const FinalizeCreator&) = delete;
    FinalizeCreator& operator=(const FinalizeCreator&) = delete;

    const char* getPluginName() const noexcept override { return spec_.name; }
    const char* getPluginVersion() const noexcept override { return kPluginVersion; }
    const char* getPluginNamespace() const noexcept override { return kNamespace; }

    /// Every attribute with its type and, as its data, its default.
    const nvinfer1::PluginFieldCollection* getFieldNames() noexcept override { return &fieldNames_; }

    /// Null where a field is unknown, given twice, of another type or of a value that is not taken.
    nvinfer1::IPluginV3* createPlugin(const char* name, const nvinfer1::PluginFieldCollection* fc,
                                      nvinfer1::TensorRTPhase phase) noexcept override;

private:
    const OperatorSpec& spec_;
    std::vector<nvinfer1::PluginField> fields_;
    nvinfer1::PluginFieldCollection fieldNames_;
};

}  // namespace moetrt

#endif
