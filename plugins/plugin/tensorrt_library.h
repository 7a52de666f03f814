// The TensorRT libraries of this process: which are loaded, of which version, and where one may be opened.
//
// Nothing here links against TensorRT. A library counts as TensorRT (full, lean or RTX) when it exports both
// getPluginRegistry and getInferLibVersion.
#ifndef MOETRT_PLUGIN_TENSORRT_LIBRARY_H
#define MOETRT_PLUGIN_TENSORRT_LIBRARY_H

#include <string>
#include <vector>

namespace moetrt {

/// TensorRT 11.4 is {11, 4}; TensorRT-RTX 1.7 is {1, 7}; {0, 0} is no TensorRT.
struct TensorRTVersion {
    int major;
    int minor;
};

struct TensorRTLibrary {
    std::string path;
    TensorRTVersion version;
    void* registry;  ///< its IPluginRegistry, whose layout depends on the version
};

/// Every TensorRT library that is loaded now, in the order of loading.
std::vector<TensorRTLibrary> loadedTensorRTLibraries();

/// Opens a TensorRT library where none is loaded: the file that MOETRT_TENSORRT_LIBRARY names, else what is found by
/// soname on the linker's path and then in Python's packages. TensorRT-RTX alone is looked for where
/// POLYGRAPHY_USE_TENSORRT_RTX is set; elsewhere full TensorRT comes first, and where there is none both TensorRT-RTX
/// and the lean runtime are opened. Returns whether one was opened.
bool openTensorRTLibrary();

/// The path of the library that holds the class of `object`, a polymorphic object; "" where it cannot be told.
std::string libraryOfObject(const void* object);

/// The version of the loaded library at `path`.
TensorRTVersion tensorRTVersionOf(const std::string& path);

}  // namespace moetrt

#endif
