// A stand-in for TensorRT that tests drive through C: it opens the plugin library, creates plugins from fields through
// the library's creators, and calls every method that no TensorRT binding reaches.
//
// Dimensions travel as rows of 8 numbers. A negative number is a symbol: a dimension that is not known, returned as
// the same number where an output has it.
#include <NvInferRuntime.h>
#include <dlfcn.h>

#include <cstdint>
#include <cstring>
#include <deque>
#include <string>
#include <vector>

#define DRIVER_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using nvinfer1::DataType;
using nvinfer1::Dims;
using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::PluginTensorDesc;

constexpr int kMaxDims = Dims::MAX_DIMS;

class Dimension final : public nvinfer1::IDimensionExpr {
public:
    explicit Dimension(int64_t value) : implementation_(value) { mImpl = &implementation_; }
    int64_t value() const { return implementation_.value; }

private:
    struct Implementation final : nvinfer1::apiv::VDimensionExpr {
        explicit Implementation(int64_t number) : value(number) {}
        bool isConstant() const override { return value >= 0; }
        int64_t getConstantValue() const override { return value; }
        bool isSizeTensor() const override { return false; }
        int64_t value;
    };
    Implementation implementation_;
};

/// Makes dimensions and keeps them; an operation on a symbol gives one symbol for all such.
class Builder final : public nvinfer1::IExprBuilder {
public:
    Builder() : implementation_(*this) { mImpl = &implementation_; }
    const Dimension* make(int64_t value) { return &dimensions_.emplace_back(value); }

private:
    static constexpr int64_t kComputed = -1000;

    struct Implementation final : nvinfer1::apiv::VExprBuilder {
        explicit Implementation(Builder& owner) : builder(owner) {}
        const nvinfer1::IDimensionExpr* constant(int64_t value) override { return builder.make(value); }
        const nvinfer1::IDimensionExpr* operation(nvinfer1::DimensionOperation, const nvinfer1::IDimensionExpr&,
                                                  const nvinfer1::IDimensionExpr&) override {
            return builder.make(kComputed);
        }
        const nvinfer1::IDimensionExpr* declareSizeTensor(int32_t, const nvinfer1::IDimensionExpr&,
                                                          const nvinfer1::IDimensionExpr&) override {
            return nullptr;
        }
        Builder& builder;
    };
    Implementation implementation_;
    std::deque<Dimension> dimensions_;
};

class Logger final : public nvinfer1::ILogger {
public:
    void log(Severity, const char* message) noexcept override { lines += std::string(message) + "\n"; }
    std::string lines;
};

class Finder final : public nvinfer1::ILoggerFinder {
public:
    nvinfer1::ILogger* findLogger() override { return &logger; }
    Logger logger;
};

Finder& finder() {
    static Finder instance;
    return instance;
}

int32_t pretendedVersion = NV_TENSORRT_MAJOR * 10000;

Dims toDims(int32_t rank, const int64_t* row) {
    Dims dims{};
    dims.nbDims = rank;
    std::memcpy(dims.d, row, sizeof dims.d);
    return dims;
}

PluginTensorDesc toDesc(int32_t rank, const int64_t* row, int32_t type, int32_t format = 0) {
    PluginTensorDesc desc{};
    desc.dims = toDims(rank, row);
    desc.type = static_cast<DataType>(type);
    desc.format = static_cast<nvinfer1::TensorFormat>(format);
    return desc;
}

template <typename Capability>
Capability& capability(void* plugin, nvinfer1::PluginCapabilityType type) {
    return *static_cast<Capability*>(static_cast<nvinfer1::IPluginV3*>(plugin)->getCapabilityInterface(type));
}

nvinfer1::IPluginV3OneBuild& buildSide(void* plugin) {
    return capability<nvinfer1::IPluginV3OneBuild>(plugin, nvinfer1::PluginCapabilityType::kBUILD);
}

nvinfer1::IPluginV3OneRuntime& runtimeSide(void* plugin) {
    return capability<nvinfer1::IPluginV3OneRuntime>(plugin, nvinfer1::PluginCapabilityType::kRUNTIME);
}

}  // namespace

/// The version of the TensorRT that this driver plays; the library asks it where the logger finder comes from.
DRIVER_EXPORT int32_t getInferLibVersion() noexcept {
    return pretendedVersion;
}

struct driver_field {
    const char* name;
    const void* data;
    int32_t type;
    int32_t length;
};

/// The major version of the TensorRT headers that the driver was compiled with.
DRIVER_EXPORT int32_t driver_headers_major() {
    return NV_TENSORRT_MAJOR;
}

DRIVER_EXPORT void* driver_open(const char* path) {
    return dlopen(path, RTLD_NOW | RTLD_LOCAL);
}

/// Hands the library a logger finder as a TensorRT of that major version; major 0 takes it away.
DRIVER_EXPORT void driver_set_logger(void* library, int32_t major) {
    using SetLoggerFinder = void (*)(nvinfer1::ILoggerFinder*);
    pretendedVersion = major * 10000;
    finder().logger.lines.clear();
    reinterpret_cast<SetLoggerFinder>(dlsym(library, "setLoggerFinder"))(major == 0 ? nullptr : &finder());
}

/// What the logger was told since driver_set_logger.
DRIVER_EXPORT const char* driver_log() {
    return finder().logger.lines.c_str();
}

/// A plugin of the creator called `op`, or null; `fields` may be null.
DRIVER_EXPORT void* driver_create(void* library, const char* op, const char* node, const driver_field* fields,
                                  int32_t count, int32_t runtime) {
    using GetCreators = nvinfer1::IPluginCreatorInterface* const* (*)(int32_t&);
    int32_t creators = 0;
    auto* const* const list = reinterpret_cast<GetCreators>(dlsym(library, "getCreators"))(creators);
    for (int32_t i = 0; i < creators; ++i) {
        auto* const creator = static_cast<nvinfer1::IPluginCreatorV3One*>(list[i]);
        if (std::strcmp(creator->getPluginName(), op) != 0) {
            continue;
        }
        std::vector<nvinfer1::PluginField> converted;
        for (int32_t j = 0; j < count; ++j) {
            converted.emplace_back(fields[j].name, fields[j].data,
                                   static_cast<nvinfer1::PluginFieldType>(fields[j].type), fields[j].length);
        }
        const nvinfer1::PluginFieldCollection collection{count, converted.data()};
        const auto phase = runtime != 0 ? nvinfer1::TensorRTPhase::kRUNTIME : nvinfer1::TensorRTPhase::kBUILD;
        return creator->createPlugin(node, fields == nullptr ? nullptr : &collection, phase);
    }
    return nullptr;
}

DRIVER_EXPORT void* driver_clone(void* plugin) {
    return static_cast<nvinfer1::IPluginV3*>(plugin)->clone();
}

DRIVER_EXPORT void* driver_attach(void* plugin) {
    return runtimeSide(plugin).attachToContext(nullptr);
}

DRIVER_EXPORT void driver_destroy(void* plugin) {
    delete static_cast<nvinfer1::IPluginV3*>(plugin);
}

/// "name version namespace" of the core capability.
DRIVER_EXPORT const char* driver_identity(void* plugin) {
    static thread_local std::string text;
    auto& core = capability<nvinfer1::IPluginV3OneCore>(plugin, nvinfer1::PluginCapabilityType::kCORE);
    text = std::string(core.getPluginName()) + " " + core.getPluginVersion() + " " + core.getPluginNamespace();
    return text.c_str();
}

DRIVER_EXPORT int32_t driver_outputs(void* plugin) {
    return buildSide(plugin).getNbOutputs();
}

/// Fills `fields` with up to `capacity` serialised fields, which live as long as the plugin; returns their number.
DRIVER_EXPORT int32_t driver_serialize(void* plugin, driver_field* fields, int32_t capacity) {
    const nvinfer1::PluginFieldCollection* const collection = runtimeSide(plugin).getFieldsToSerialize();
    for (int32_t i = 0; i < collection->nbFields && i < capacity; ++i) {
        const nvinfer1::PluginField& field = collection->fields[i];
        fields[i] = {field.name, field.data, static_cast<int32_t>(field.type), field.length};
    }
    return collection->nbFields;
}

DRIVER_EXPORT int32_t driver_output_types(void* plugin, const int32_t* types, int32_t count, int32_t* outputs) {
    std::vector<DataType> inputs;
    for (int32_t i = 0; i < count; ++i) {
        inputs.push_back(static_cast<DataType>(types[i]));
    }
    std::vector<DataType> answered(static_cast<size_t>(driver_outputs(plugin)));
    const int32_t code =
        buildSide(plugin).getOutputDataTypes(answered.data(), driver_outputs(plugin), inputs.data(), count);
    for (size_t i = 0; code == 0 && i < answered.size(); ++i) {
        outputs[i] = static_cast<int32_t>(answered[i]);
    }
    return code;
}

DRIVER_EXPORT int32_t driver_output_shapes(void* plugin, const int32_t* ranks, const int64_t* rows, int32_t count,
                                           int32_t* outputRanks, int64_t* outputRows) {
    Builder builder;
    std::vector<nvinfer1::DimsExprs> inputs(static_cast<size_t>(count));
    for (int32_t i = 0; i < count; ++i) {
        inputs[i].nbDims = ranks[i];
        for (int32_t d = 0; d < ranks[i]; ++d) {
            inputs[i].d[d] = builder.make(rows[i * kMaxDims + d]);
        }
    }
    std::vector<nvinfer1::DimsExprs> outputs(static_cast<size_t>(driver_outputs(plugin)));
    const int32_t code = buildSide(plugin).getOutputShapes(inputs.data(), count, nullptr, 0, outputs.data(),
                                                           driver_outputs(plugin), builder);
    for (size_t i = 0; code == 0 && i < outputs.size(); ++i) {
        outputRanks[i] = outputs[i].nbDims;
        for (int32_t d = 0; d < outputs[i].nbDims; ++d) {
            outputRows[i * kMaxDims + d] = static_cast<const Dimension*>(outputs[i].d[d])->value();
        }
    }
    return code;
}

/// `types` and `formats` have one entry for each input and output up to `position`.
DRIVER_EXPORT int32_t driver_supports(void* plugin, int32_t position, const int32_t* types, const int32_t* formats,
                                      int32_t inputs, int32_t outputs) {
    const std::vector<int64_t> row(kMaxDims, 1);
    std::vector<DynamicPluginTensorDesc> all(static_cast<size_t>(inputs + outputs));
    for (int32_t i = 0; i <= position; ++i) {
        all[i].desc = toDesc(2, row.data(), types[i], formats[i]);
    }
    return buildSide(plugin).supportsFormatCombination(position, all.data(), inputs, outputs) ? 1 : 0;
}

/// `low` and `high` are rows as of the dimensions: the smallest and the largest shape of the profile.
DRIVER_EXPORT int32_t driver_configure(void* plugin, const int32_t* ranks, const int64_t* low, const int64_t* high,
                                       const int32_t* types, int32_t count) {
    std::vector<DynamicPluginTensorDesc> inputs(static_cast<size_t>(count));
    for (int32_t i = 0; i < count; ++i) {
        inputs[i].desc = toDesc(ranks[i], low + i * kMaxDims, types[i]);
        inputs[i].min = toDims(ranks[i], low + i * kMaxDims);
        inputs[i].max = toDims(ranks[i], high + i * kMaxDims);
        inputs[i].opt = inputs[i].max;
    }
    std::vector<DynamicPluginTensorDesc> outputs(static_cast<size_t>(driver_outputs(plugin)));
    return buildSide(plugin).configurePlugin(inputs.data(), count, outputs.data(), driver_outputs(plugin));
}

/// Fills `tactics` with up to `capacity` tactics of the last configuration; returns their number.
DRIVER_EXPORT int32_t driver_tactics(void* plugin, int32_t* tactics, int32_t capacity) {
    const int32_t count = buildSide(plugin).getNbTactics();
    const int32_t asked = count < capacity ? count : capacity;
    return buildSide(plugin).getValidTactics(tactics, asked) == 0 ? count : -1;
}

DRIVER_EXPORT const char* driver_timing_cache_id(void* plugin) {
    return buildSide(plugin).getTimingCacheID();
}

DRIVER_EXPORT int32_t driver_set_tactic(void* plugin, int32_t tactic) {
    return runtimeSide(plugin).setTactic(tactic);
}

DRIVER_EXPORT int32_t driver_on_shape_change(void* plugin, const int32_t* ranks, const int64_t* rows,
                                             const int32_t* types, int32_t count) {
    std::vector<PluginTensorDesc> inputs;
    for (int32_t i = 0; i < count; ++i) {
        inputs.push_back(toDesc(ranks[i], rows + i * kMaxDims, types[i]));
    }
    std::vector<PluginTensorDesc> outputs(static_cast<size_t>(driver_outputs(plugin)));
    return runtimeSide(plugin).onShapeChange(inputs.data(), count, outputs.data(), driver_outputs(plugin));
}

/// Pointers are the GPU's; `stream` is a cudaStream_t.
DRIVER_EXPORT int32_t driver_enqueue(void* plugin, const int32_t* ranks, const int64_t* rows, const int32_t* types,
                                     int32_t count, const void* const* inputs, void* const* outputs, void* stream) {
    std::vector<PluginTensorDesc> descs;
    for (int32_t i = 0; i < count; ++i) {
        descs.push_back(toDesc(ranks[i], rows + i * kMaxDims, types[i]));
    }
    std::vector<PluginTensorDesc> outputDescs(static_cast<size_t>(driver_outputs(plugin)));
    return runtimeSide(plugin).enqueue(descs.data(), outputDescs.data(), inputs, outputs, nullptr,
                                       static_cast<cudaStream_t>(stream));
}
