// Refusals: where the line is kept, and the way it takes to the user.
#include "errors.h"

#include <atomic>
#include <cstdio>

#include "tensorrt_library.h"

namespace moetrt {
namespace {

thread_local std::string lastLine;
std::atomic<nvinfer1::ILoggerFinder*> loggerFinder{nullptr};
std::atomic<bool> shows{true};

nvinfer1::ILogger* findLogger() {
    // Asked at each refusal: the finder answers null until the first builder or runtime exists.
    nvinfer1::ILoggerFinder* const finder = loggerFinder.load();
    return finder == nullptr ? nullptr : finder->findLogger();
}

}  // namespace

void refuse(const std::string& line) {
    lastLine = line;
    if (!shows.load()) {
        return;
    }
    const std::string shown = "[moetrt] " + line;
    if (nvinfer1::ILogger* const logger = findLogger()) {
        logger->log(nvinfer1::ILogger::Severity::kERROR, shown.c_str());
        return;
    }
    std::fprintf(stderr, "%s\n", shown.c_str());
    std::fflush(stderr);
}

bool showRefusals(bool show) {
    return shows.exchange(show);
}

const char* lastRefusal() {
    return lastLine.c_str();
}

void clearRefusal() {
    lastLine.clear();
}

void setTensorRTLoggerFinder(nvinfer1::ILoggerFinder* finder) {
    // findLogger and log sit in other vtable slots in TensorRT 11 and TensorRT-RTX than in TensorRT 10, so a finder of
    // another major version must not be called.
    const bool usable = finder != nullptr && tensorRTVersionOf(libraryOfObject(finder)).major == NV_TENSORRT_MAJOR;
    loggerFinder.store(usable ? finder : nullptr);
}

}  // namespace moetrt
