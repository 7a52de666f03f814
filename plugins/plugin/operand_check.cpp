// The rules on dtypes and shapes, and the words in which a breach is told.
#include "operand_check.h"

#include <algorithm>

namespace moetrt {
namespace {

using nvinfer1::DataType;

std::string was(const InputSpec& input, const std::string& value, const std::string& taken) {
    return std::string("input ") + input.name + " was " + value + "; " + taken + " is taken";
}

std::string text(const Extent& extent) {
    if (extent.fixed()) {
        return std::to_string(extent.low);
    }
    if (extent.high == Extent{}.high) {
        return extent.low == 0 ? "?" : std::to_string(extent.low) + "..?";
    }
    return std::to_string(extent.low) + ".." + std::to_string(extent.high);
}

std::string text(const Shape& shape) {
    std::string line = "[";
    for (const Extent& extent : shape) {
        line += (line.size() > 1 ? ", " : "") + text(extent);
    }
    return line + "]";
}

bool overlap(const Extent& a, const Extent& b) {
    return a.low <= b.high && b.low <= a.high;
}

int64_t saturatingProduct(int64_t a, int64_t b) {
    int64_t product = 0;
    return __builtin_mul_overflow(a, b, &product) ? std::numeric_limits<int64_t>::max() : product;
}

Extent product(const Extent& a, const Extent& b) {
    return {saturatingProduct(a.low, b.low), saturatingProduct(a.high, b.high)};
}

Extent leadingProduct(const Shape& shape) {
    Extent total{1, 1};
    for (size_t i = 0; i + 1 < shape.size(); ++i) {
        total = product(total, shape[i]);
    }
    return total;
}

std::string checkRank(const InputSpec& input, const Shape& shape) {
    const std::string documented = std::string(", ") + input.shape + ",";
    switch (input.input) {
        case Input::kSharedOutput:
        case Input::kResidual: return shape.size() >= 2 ? "" : was(input, text(shape), "rank 2 or more" + documented);
        case Input::kGamma: return shape.size() == 1 ? "" : was(input, text(shape), "rank 1" + documented);
        default: return shape.size() == 2 ? "" : was(input, text(shape), "rank 2" + documented);
    }
}

/// The inputs' shapes by name, once their ranks are known to be right.
class Shapes {
public:
    Shapes(const InputList& inputs, const std::vector<Shape>& shapes) : inputs_(inputs), shapes_(shapes) {}

    const Shape* find(Input input) const {
        const int32_t position = inputs_.position(input);
        return position < 0 ? nullptr : &shapes_[static_cast<size_t>(position)];
    }
    const Shape& get(Input input) const { return *find(input); }
    std::string refuse(Input input, const std::string& taken) const {
        return was(inputs_.at(inputs_.position(input)), text(get(input)), taken);
    }

private:
    const InputList& inputs_;
    const std::vector<Shape>& shapes_;
};

std::string checkRoutes(const Shapes& shapes) {
    const Shape& rows = shapes.get(Input::kGemm2Permuted);
    const Shape& weights = shapes.get(Input::kExpertWeights);
    if (weights[1].high < 1) {
        return shapes.refuse(Input::kExpertWeights, "K >= 1 in [T, K]");
    }
    if (const Shape* const map = shapes.find(Input::kMap)) {
        if (!overlap((*map)[0], weights[0]) || !overlap((*map)[1], weights[1])) {
            return shapes.refuse(Input::kMap, "[T, K] = " + text(weights) + ", the shape of expert_weights,");
        }
    } else if (const Extent routes = product(weights[0], weights[1]); !overlap(rows[0], routes)) {
        return shapes.refuse(Input::kGemm2Permuted, "R = T*K = " + text(routes) + " rows where the map is absent");
    }
    return "";
}

std::string checkHidden(const Shapes& shapes) {
    const Extent* hidden = nullptr;
    Input named = Input::kGemm2Permuted;
    for (const Input input : {Input::kGamma, Input::kResidual, Input::kSharedOutput}) {
        const Shape* const shape = shapes.find(input);
        if (shape == nullptr) {
            continue;
        }
        if (hidden == nullptr) {
            hidden = &shape->back();
            named = input;
        } else if (!overlap(shape->back(), *hidden)) {
            return shapes.refuse(input, "a last dimension of H = " + text(*hidden));
        }
    }
    if (hidden != nullptr && hidden->high < 1) {
        return shapes.refuse(named, "H >= 1");
    }
    const int64_t least = hidden == nullptr ? 1 : std::max<int64_t>(hidden->low, 1);
    if (shapes.get(Input::kGemm2Permuted)[1].high < least) {
        return shapes.refuse(Input::kGemm2Permuted, "Hp >= H = " + std::to_string(least) + " in [R, Hp]");
    }
    return "";
}

std::string checkTokens(const Shapes& shapes) {
    const Extent& tokens = shapes.get(Input::kExpertWeights)[0];
    const Shape* const gate = shapes.find(Input::kSharedGate);
    if (gate != nullptr && (!overlap((*gate)[0], tokens) || !overlap((*gate)[1], {1, 1}))) {
        return shapes.refuse(Input::kSharedGate, "[T, 1] = " + text({tokens, {1, 1}}));
    }
    for (const Input input : {Input::kResidual, Input::kSharedOutput}) {
        const Shape* const shape = shapes.find(input);
        if (shape != nullptr && !overlap(leadingProduct(*shape), tokens)) {
            return shapes.refuse(input, "leading dimensions that multiply to T = " + text(tokens));
        }
    }
    return "";
}

}  // namespace

InputList::InputList(const OperatorSpec& spec, const Attributes& attributes)
    : present_(presentInputs(spec, attributes)) {
    positions_.fill(-1);
    for (size_t i = 0; i < present_.size(); ++i) {
        positions_[static_cast<size_t>(present_[i]->input)] = static_cast<int32_t>(i);
    }
}

std::string InputList::names() const {
    std::string line;
    for (const InputSpec* const input : present_) {
        line += (line.empty() ? "" : ", ") + std::string(input->name);
    }
    return line;
}

std::string dtypeName(DataType dtype) {
    switch (dtype) {
        case DataType::kFLOAT: return "float32";
        case DataType::kHALF: return "float16";
        case DataType::kBF16: return "bfloat16";
        case DataType::kINT8: return "int8";
        case DataType::kUINT8: return "uint8";
        case DataType::kINT32: return "int32";
        case DataType::kINT64: return "int64";
        case DataType::kBOOL: return "bool";
        case DataType::kFP8: return "float8";
        default: return "TensorRT's DataType " + std::to_string(static_cast<int32_t>(dtype));
    }
}

bool dtypeTaken(const InputSpec& input, DataType dtype, DataType data) {
    switch (input.dtype) {
        case DtypeRule::kAnyData:
            return dtype == DataType::kFLOAT || dtype == DataType::kHALF || dtype == DataType::kBF16;
        case DtypeRule::kData: return dtype == data;
        case DtypeRule::kDataOrFloat: return dtype == data || dtype == DataType::kFLOAT;
        case DtypeRule::kInt32: return dtype == DataType::kINT32;
    }
    return false;
}

std::string checkInputCount(const InputList& inputs, int32_t count) {
    if (count == inputs.count()) {
        return "";
    }
    return std::to_string(count) + " inputs were given; its has_* attributes name " + std::to_string(inputs.count()) +
           " (" + inputs.names() + "), and an absent input is left out, not empty";
}

std::string checkDtypes(const InputList& inputs, const DataType* dtypes) {
    const DataType data = dtypes[inputs.position(Input::kGemm2Permuted)];
    for (int32_t i = 0; i < inputs.count(); ++i) {
        const InputSpec& input = inputs.at(i);
        if (dtypeTaken(input, dtypes[i], data)) {
            continue;
        }
        const std::string follows = " (gemm2_permuted is " + dtypeName(data) + ")";
        switch (input.dtype) {
            case DtypeRule::kAnyData: return was(input, dtypeName(dtypes[i]), "bfloat16 or float16 or float32");
            case DtypeRule::kInt32: return was(input, dtypeName(dtypes[i]), "int32");
            case DtypeRule::kData: return was(input, dtypeName(dtypes[i]), dtypeName(data)) + follows;
            case DtypeRule::kDataOrFloat:
                return was(input, dtypeName(dtypes[i]),
                           data == DataType::kFLOAT ? "float32" : dtypeName(data) + " or float32") +
                       follows;
        }
    }
    return "";
}

std::string checkShapes(const InputList& inputs, const std::vector<Shape>& shapes) {
    for (int32_t i = 0; i < inputs.count(); ++i) {
        if (std::string line = checkRank(inputs.at(i), shapes[static_cast<size_t>(i)]); !line.empty()) {
            return line;
        }
    }
    const Shapes named(inputs, shapes);
    for (const auto check : {checkRoutes, checkHidden, checkTokens}) {
        if (std::string line = check(named); !line.empty()) {
            return line;
        }
    }
    return "";
}

}  // namespace moetrt
