// Refusals: one line each, kept for the thread that caused it and shown before whatever TensorRT says about it.
#ifndef MOETRT_PLUGIN_ERRORS_H
#define MOETRT_PLUGIN_ERRORS_H

#include <NvInferRuntime.h>

#include <string>

namespace moetrt {

/// Keeps `line` as this thread's last refusal and shows it with the prefix "[moetrt] ": through TensorRT's logger where
/// one can be reached, on stderr otherwise.
void refuse(const std::string& line);

/// Whether refuse() shows the line too; returns what held before.
bool showRefusals(bool show);

/// The last refusal of this thread, "" when there was none. Valid until this thread's next refusal.
const char* lastRefusal();

/// Forgets the last refusal of this thread.
void clearRefusal();

/// Takes the finder that a TensorRT library hands out; it is used only where that library's major version is the one
/// of the headers this file was compiled with. Null forgets the finder.
void setTensorRTLoggerFinder(nvinfer1::ILoggerFinder* finder);

}  // namespace moetrt

#endif
