// TensorRT's plugin registry as every supported version lays it out, called without that version's headers.
//
// IPluginRegistry is no versioned interface. TensorRT 11 dropped its first three methods and a later one, so a library
// compiled with the headers of 10 that calls registerCreator in 11 lands in another method. TensorRT-RTX 1.7 has the
// order of 11 (read from its vtable: 15 entries, 19 in TensorRT 10). The slots below follow each order's declarations.
#ifndef MOETRT_PLUGIN_REGISTRY_H
#define MOETRT_PLUGIN_REGISTRY_H

#include <NvInferRuntime.h>

#include <algorithm>
#include <string_view>

#include "tensorrt_library.h"

namespace moetrt {

class Registry {
public:
    explicit Registry(const TensorRTLibrary& library) : object_(library.registry), slots_(slotsOf(library.version)) {}

    /// Whether this version's order is known; nothing else may be called where it is not.
    bool known() const { return slots_.registerCreator != 0; }

    /// Looked for in the list of all: getCreator writes an error into TensorRT's log where there is none.
    bool has(nvinfer1::IPluginCreatorV3One& creator) const {
        using GetAllCreators = nvinfer1::IPluginCreatorInterface* const* (*)(const void*, int32_t*);
        int32_t count = 0;
        nvinfer1::IPluginCreatorInterface* const* const all =
            slot<GetAllCreators>(slots_.getAllCreators)(object_, &count);
        return std::any_of(all, all + count, [&](nvinfer1::IPluginCreatorInterface* other) {
            if (std::string_view(other->getInterfaceInfo().kind) != creator.getInterfaceInfo().kind) {
                return false;
            }
            auto* const same = static_cast<nvinfer1::IPluginCreatorV3One*>(other);
            return std::string_view(same->getPluginName()) == creator.getPluginName() &&
                   std::string_view(same->getPluginVersion()) == creator.getPluginVersion() &&
                   std::string_view(same->getPluginNamespace()) == creator.getPluginNamespace();
        });
    }

    bool add(nvinfer1::IPluginCreatorV3One& creator) const {
        using RegisterCreator = bool (*)(void*, nvinfer1::IPluginCreatorInterface&, const char*);
        return slot<RegisterCreator>(slots_.registerCreator)(object_, creator, creator.getPluginNamespace());
    }

    bool remove(nvinfer1::IPluginCreatorV3One& creator) const {
        using DeregisterCreator = bool (*)(void*, const nvinfer1::IPluginCreatorInterface&);
        return slot<DeregisterCreator>(slots_.deregisterCreator)(object_, creator);
    }

private:
    struct Slots {
        int registerCreator;
        int getAllCreators;
        int deregisterCreator;
    };

    static Slots slotsOf(TensorRTVersion version) {
        if (version.major == 10) {
            return {12, 13, 15};
        }
        if (version.major == 11 || (version.major == 1 && version.minor >= 7)) {
            return {8, 9, 11};
        }
        return {0, 0, 0};
    }

    template <typename Function>
    Function slot(int index) const {
        // A virtual method is called as a function whose first argument is the object (the Itanium C++ ABI).
        return reinterpret_cast<Function>((*static_cast<void* const* const*>(object_))[index]);
    }

    void* object_;
    Slots slots_;
};

}  // namespace moetrt

#endif
