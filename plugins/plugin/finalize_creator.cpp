// Attribute fields are read here, and every one that is not taken is refused by name.
#include "finalize_creator.h"

#include <cmath>
#include <cstring>
#include <new>
#include <set>
#include <string>

#include "errors.h"
#include "finalize_plugin.h"

namespace moetrt {
namespace {

using nvinfer1::PluginField;
using nvinfer1::PluginFieldType;

std::string typeName(PluginFieldType type) {
    switch (type) {
        case PluginFieldType::kFLOAT16: return "float16";
        case PluginFieldType::kFLOAT32: return "float32";
        case PluginFieldType::kFLOAT64: return "float64";
        case PluginFieldType::kINT8: return "int8";
        case PluginFieldType::kINT16: return "int16";
        case PluginFieldType::kINT32: return "int32";
        case PluginFieldType::kINT64: return "int64";
        case PluginFieldType::kCHAR: return "text";
        case PluginFieldType::kBF16: return "bfloat16";
        default: return "TensorRT's PluginFieldType " + std::to_string(static_cast<int32_t>(type));
    }
}

std::string numberText(float value) {
    char text[32];
    std::snprintf(text, sizeof text, "%g", static_cast<double>(value));
    return text;
}

std::string was(const AttributeSpec& attribute, const std::string& value, const std::string& taken) {
    return std::string("attribute ") + attribute.name + " was " + value + "; " + taken + " is taken";
}

/// Reads one field into `attributes`; returns what is wrong with it.
std::string readField(const AttributeSpec& attribute, const PluginField& field, Attributes& attributes) {
    const PluginFieldType wanted = attribute.flag != nullptr ? PluginFieldType::kINT32 : PluginFieldType::kFLOAT32;
    if (field.type != wanted) {
        return was(attribute, typeName(field.type), typeName(wanted));
    }
    if (field.length != 1 || field.data == nullptr) {
        return was(attribute, std::to_string(field.data == nullptr ? 0 : field.length) + " values", "one");
    }
    if (attribute.flag != nullptr) {
        int32_t value = 0;
        std::memcpy(&value, field.data, sizeof value);
        if (value != 0 && value != 1) {
            return was(attribute, std::to_string(value), "0 or 1");
        }
        attributes.*attribute.flag = value;
        return "";
    }
    float value = 0.0F;
    std::memcpy(&value, field.data, sizeof value);
    if (!std::isfinite(value) || (attribute.nonNegative && value < 0.0F)) {
        return was(attribute, numberText(value),
                   attribute.nonNegative ? "a finite float of at least 0" : "a finite float");
    }
    if (attribute.zeroOrOne && value != 0.0F && value != 1.0F) {
        return was(attribute, numberText(value), "0 or 1");
    }
    attributes.*attribute.number = value;
    return "";
}

std::string attributeNames(const OperatorSpec& spec) {
    std::string line;
    for (const AttributeSpec& attribute : spec.attributes) {
        line += (line.empty() ? "" : ", ") + std::string(attribute.name);
    }
    return line;
}

std::string readFields(const OperatorSpec& spec, const nvinfer1::PluginFieldCollection& fields,
                       Attributes& attributes) {
    std::set<std::string> seen;
    for (int32_t i = 0; i < fields.nbFields; ++i) {
        const PluginField& field = fields.fields[i];
        const std::string name = field.name == nullptr ? "" : field.name;
        const AttributeSpec* known = nullptr;
        for (const AttributeSpec& attribute : spec.attributes) {
            if (name == attribute.name) {
                known = &attribute;
            }
        }
        if (known == nullptr) {
            return "attribute " + name + " is unknown; taken are " + attributeNames(spec);
        }
        if (!seen.insert(name).second) {
            return "attribute " + name + " was given twice; once is taken";
        }
        if (std::string line = readField(*known, field, attributes); !line.empty()) {
            return line;
        }
    }
    if (attributes.hasSharedGate != 0 && attributes.hasSharedOutput == 0) {
        return "attribute has_shared_gate was 1 with has_shared_output 0; the gate is taken only with what it gates";
    }
    return "";
}

}  // namespace

FinalizeCreator::FinalizeCreator(const OperatorSpec& spec) : spec_(spec) {
    for (const AttributeSpec& attribute : spec.attributes) {
        if (attribute.flag != nullptr) {
            fields_.emplace_back(attribute.name, &(spec.defaults.*attribute.flag), PluginFieldType::kINT32, 1);
        } else {
            fields_.emplace_back(attribute.name, &(spec.defaults.*attribute.number), PluginFieldType::kFLOAT32, 1);
        }
    }
    fieldNames_ = {static_cast<int32_t>(fields_.size()), fields_.data()};
}

nvinfer1::IPluginV3* FinalizeCreator::createPlugin(const char* name, const nvinfer1::PluginFieldCollection* fc,
                                                   nvinfer1::TensorRTPhase) noexcept {
    const std::string node = name == nullptr ? "" : name;
    Attributes attributes = spec_.defaults;
    if (fc != nullptr) {
        if (const std::string line = readFields(spec_, *fc, attributes); !line.empty()) {
            refuse(nodeLabel(spec_, node) + ": " + line);
            return nullptr;
        }
    }
    return new (std::nothrow) FinalizePlugin(spec_, attributes, node);
}

}  // namespace moetrt
