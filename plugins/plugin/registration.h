// How the creators reach TensorRT's plugin registries.
#ifndef MOETRT_PLUGIN_REGISTRATION_H
#define MOETRT_PLUGIN_REGISTRATION_H

#include <cstdint>

namespace moetrt {

/// Registers the creators with every TensorRT library that is loaded and does not have them yet. Returns the number of
/// libraries that have them now, or -1 where one refused (the reason is the last refusal).
int32_t registerInLoadedLibraries();

}  // namespace moetrt

#endif
