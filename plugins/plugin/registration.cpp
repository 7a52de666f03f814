// The three ways into TensorRT's plugin registries, and why no one of them is enough.
//
// 1. IPluginRegistry::loadLibrary (trtexec --dynamicPlugins, load_library in Python) opens this file, hands over a
//    logger finder and registers what getCreators answers.
// 2. A bare dlopen (Polygraphy's --plugins, ctypes.CDLL) asks nothing: on_load.cpp registers.
// 3. moetrt_register_creators does so on request, for a TensorRT that was loaded after this file.
#include "registration.h"

#include <NvInferRuntime.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <string>
#include <vector>

#include "errors.h"
#include "finalize_creator.h"
#include "registry.h"
#include "tensorrt_library.h"

#define MOETRT_EXPORT extern "C" __attribute__((visibility("default")))

namespace moetrt {
namespace {

/// Never destroyed: a registry may look at its creators until the process ends.
FinalizeCreator& creator(size_t index) {
    static auto* const list =
        new std::array<FinalizeCreator, 2>{FinalizeCreator(kOperators[0]), FinalizeCreator(kOperators[1])};
    return (*list)[index];
}

std::mutex& registrationMutex() {
    static std::mutex mutex;
    return mutex;
}

/// The registries that this library wrote to without being asked.
std::vector<void*>& ownRegistrations() {
    static std::vector<void*> registries;
    return registries;
}

/// loadLibrary fails where a creator is there already, and the constructor ran before it could ask: what this library
/// registered by itself is withdrawn, so that TensorRT registers it, owns it and can deregister it.
void handOver(const void* loggerFinder) {
    const std::lock_guard<std::mutex> lock(registrationMutex());
    const std::string home = libraryOfObject(loggerFinder);
    for (const TensorRTLibrary& library : loadedTensorRTLibraries()) {
        auto& own = ownRegistrations();
        const auto found = std::find(own.begin(), own.end(), library.registry);
        if (library.path == home && found != own.end()) {
            own.erase(found);
            for (size_t i = 0; i < kOperators.size(); ++i) {
                Registry(library).remove(creator(i));
            }
        }
    }
}

/// Returns "" or why the library's registry does not have the creators.
std::string registerIn(const TensorRTLibrary& library) {
    const Registry registry(library);
    if (!registry.known()) {
        return "TensorRT " + std::to_string(library.version.major) + "." + std::to_string(library.version.minor) +
               " ('" + library.path + "') is not known; 10, 11 and TensorRT-RTX from 1.7 are taken";
    }
    for (size_t i = 0; i < kOperators.size(); ++i) {
        if (registry.has(creator(i))) {
            continue;
        }
        if (!registry.add(creator(i))) {
            return std::string(kOperators[i].name) + " was not taken by the plugin registry of '" + library.path + "'";
        }
        if (i == 0) {
            ownRegistrations().push_back(library.registry);
        }
    }
    return "";
}

}  // namespace

int32_t registerInLoadedLibraries() {
    const std::lock_guard<std::mutex> lock(registrationMutex());
    int32_t count = 0;
    bool refused = false;
    for (const TensorRTLibrary& library : loadedTensorRTLibraries()) {
        if (std::string line = registerIn(library); !line.empty()) {
            refuse(line);
            refused = true;
        } else {
            ++count;
        }
    }
    return refused ? -1 : count;
}

}  // namespace moetrt

MOETRT_EXPORT void setLoggerFinder(nvinfer1::ILoggerFinder* finder) {
    moetrt::setTensorRTLoggerFinder(finder);
    moetrt::handOver(finder);
}

MOETRT_EXPORT nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& count) {
    static const std::array<nvinfer1::IPluginCreatorInterface*, 2> list{&moetrt::creator(0), &moetrt::creator(1)};
    count = static_cast<int32_t>(list.size());
    return list.data();
}

MOETRT_EXPORT nvinfer1::IPluginCreator* const* getPluginCreators(int32_t& count) {
    count = 0;
    return nullptr;
}
