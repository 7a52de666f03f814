/* For programs that load a TensorRT library after this one: asks for the registration that loading did for the rest. */
#ifndef MOETRT_REGISTRATION_H
#define MOETRT_REGISTRATION_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/*
 * Registers the plugin creators with every TensorRT library of the process that does not have them yet; calling it
 * again does nothing more. Loading libmoetrt_plugins does the same, and opens a TensorRT library when none is loaded.
 * Returns the number of TensorRT libraries that have the creators now, or -1 with the reason in moetrt_last_error().
 */
int32_t moetrt_register_creators(void);

#ifdef __cplusplus
}
#endif

#endif
