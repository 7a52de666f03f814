// The TensorRT libraries of this process: which are loaded, of which version, and where one may be opened.
//
// Nothing here links against TensorRT. A library counts as TensorRT (full, lean or RTX) when it exports both
// getPluginRegistry and getInferLibVersion.
#ifndef MOETRT_PLUGIN_TENSORRT_LIBRARY_H
#define MOETRT_PLUGIN_TENSORRT_LIBRARY_H

#include <string>
#include <vector>

namespace nvinfer1 {
class IPluginRegistry;
}

namespace moetrt {

/// TensorRT 11.4 is {11, 4}; TensorRT-RTX 1.7 is {1, 7}; {0, 0} is no TensorRT.
struct TensorRTVersion {
    int major;
    int minor;
};

struct TensorRTLibrary {
    std::string path;
    TensorRTVersion version;
    nvinfer1::IPluginRegistry* registry;
};

/// Every TensorRT library that is loaded now, in the order of loading.
std::vector<TensorRTLibrary> loadedTensorRTLibraries();

/// Opens the first TensorRT library that is found: by the sonames of the linker's search path, then in the folders of
/// Python's packages beside this library, in VIRTUAL_ENV and in CONDA_PREFIX. TensorRT-RTX comes first where
/// POLYGRAPHY_USE_TENSORRT_RTX is set, and is left out elsewhere. Returns false where none is found.
bool openTensorRTLibrary();

/// The version of the library that holds the class of `object`, a polymorphic object.
TensorRTVersion tensorRTVersionOfObject(const void* object);

}  // namespace moetrt

#endif
