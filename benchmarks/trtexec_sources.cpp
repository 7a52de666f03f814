// Runs the option parser and the writers of NVIDIA's own trtexec sources on what trtexec_sources.py gives it.
//
//   parse WORD...           the options as trtexec holds them, name and value each ended by a NUL; code 1: refused
//   times FILE WARM_UP_MS   reads "compute_start compute_end" a query from stdin, writes FILE, prints trtexec's summary
//   profile FILE            reads "milliseconds name" a layer and iteration from stdin, names ended by a NUL
//   load FILE BYTES         the bytes that an input of that size gets from FILE
//   log 0|1                 a warning, an error and the lines around a run that passed (1) or failed

#include "NvInfer.h"
#include "logger.h"
#include "sampleOptions.h"
#include "sampleReporting.h"
#include "sampleUtils.h"

#include <cuda_runtime_api.h>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

// All of CUDA that is called: the parser asks which device there is. There is none here, and nothing depends on it.
extern "C" {
cudaError_t cudaGetDevice(int* device) {
    *device = 0;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
    *value = 0;
    return cudaSuccess;
}
char const* cudaGetErrorString(cudaError_t) {
    return "no CUDA here";
}
}

namespace {

// What is told from version to version by the members that there are: the first overload that compiles is taken.
template <class Options>
auto transfers(Options& options, int) -> decltype(bool(options.includeTransfers)) {
    return options.includeTransfers;
}
template <class Options>
bool transfers(Options& options, long) {
    return !options.skipTransfers;
}
template <class Options>
auto separate(Options& options, int) -> decltype(bool(options.rerun)) {
    return options.rerun;
}
template <class Options>
bool separate(Options&, long) {
    return true;
}
template <class Options>
auto inputs(Options& options, int) -> decltype((options.refPairs.at(0).first)) {
    return options.refPairs.at(0).first;
}
template <class Options>
auto& inputs(Options& options, long) {
    return options.inputs;
}
template <class Options>
auto take_static_plugins(Options& options, int) -> decltype(options.enableStaticPlugins, void()) {
    options.enableStaticPlugins = true;
}
template <class Options>
void take_static_plugins(Options&, long) {}

template <class Value>
void tell(std::string const& name, Value const& value) {
    std::cout << name << '\0' << value << '\0';
}

template <class Shape>
std::string text(Shape const& shape) {
    if (shape.empty()) {
        return "scalar";
    }
    std::ostringstream out;
    for (size_t axis = 0; axis < shape.size(); ++axis) {
        out << (axis ? "x" : "") << shape[axis];
    }
    return out.str();
}

int parse(int count, char** words) {
    auto arguments = sample::argsToArgumentsMap(count, words);
    sample::AllOptions options;
    take_static_plugins(options.system, 0);
    try {
        options.parse(arguments);
    } catch (std::exception const& error) {
        std::cerr << error.what() << std::endl;
        return 1;
    }
    for (auto const& argument : arguments) {
        std::cerr << "Unknown option: " << argument.first << std::endl;
    }
    if (!arguments.empty()) {
        return 1;
    }
    auto const& build = options.build;
    auto& inference = options.inference;
    tell("model", options.model.baseModel.model);
    tell("engine", build.engine);
    tell("load", build.load);
    tell("save", build.save);
    tell("skip inference", build.skipInference);
    tell("strongly typed", build.stronglyTyped);
    tell("detailed", build.profilingVerbosity == nvinfer1::ProfilingVerbosity::kDETAILED);
    for (auto const& library : options.system.dynamicPlugins) {
        tell("plugin", library);
    }
    for (auto const& library : options.system.plugins) {
        tell("static plugin", library);
    }
    for (auto const& profile : build.optProfiles) {
        for (auto const& bounds : profile) {
            std::string sizes;
            for (auto const& shape : bounds.second) {
                sizes += (sizes.empty() ? "" : " ") + text(shape);
            }
            tell("profile of " + bounds.first, sizes);
        }
    }
    for (auto const& shape : inference.shapes) {
        tell("shape of " + shape.first, text(shape.second));
    }
    for (auto const& input : inputs(inference, 0)) {
        tell("file of " + input.first, input.second);
    }
    tell("iterations", inference.iterations);
    tell("seconds", inference.duration);
    tell("warm-up", inference.warmup);
    tell("streams", inference.infStreams);
    tell("transfers", transfers(inference, 0));
    tell("spin", inference.spin);
    tell("graph", inference.graph);
    tell("profile apart", separate(inference, 0));
    tell("times file", options.reporting.exportTimes);
    tell("profile file", options.reporting.exportProfile);
    tell("layers file", options.reporting.exportLayerInfo);
    return 0;
}

int times(char const* file, float warm_up) {
    std::vector<sample::InferenceTrace> trace;
    float start, end;
    while (std::cin >> start >> end) {
        trace.emplace_back(0, start, start, start, start, start, end, end, end);
    }
    sample::ReportingOptions reporting;
    reporting.exportTimes = file;
    sample::InferenceOptions inference;
    inference.warmup = warm_up;
    std::ostringstream rest;
    sample::printPerformanceReport(trace, reporting, inference, std::cout, std::cout, rest);
    return 0;
}

int profile(char const* file) {
    sample::Profiler profiler;
    float milliseconds;
    std::string name;
    while (std::cin >> milliseconds && std::cin.get() && std::getline(std::cin, name, '\0')) {
        profiler.reportLayerTime(name.c_str(), milliseconds);
    }
    profiler.exportJSONProfile(file);
    profiler.print(std::cout);
    return 0;
}

int load(char const* file, size_t bytes) {
    std::vector<char> memory(bytes);
    try {
        sample::loadFromFile(file, memory.data(), bytes);
    } catch (std::exception const& error) {
        std::cerr << error.what() << std::endl;
        return 1;
    }
    std::cout.write(memory.data(), memory.size());
    return 0;
}

int log(bool passed, int count, char** words) {
    auto test = sample::gLogger.defineTest("TensorRT.trtexec", count, words);
    sample::gLogger.reportTestStart(test);
    sample::gLogWarning << "a warning" << std::endl;
    sample::gLogError << "an error" << std::endl;
    sample::gLogger.reportTestEnd(test,
                                  passed ? sample::Logger::TestResult::kPASSED : sample::Logger::TestResult::kFAILED);
    return 0;
}

}  // namespace

int main(int count, char** words) {
    std::string const what = count > 1 ? words[1] : "";
    if (what == "parse") {
        return parse(count - 1, words + 1);
    }
    if (what == "times" && count == 4) {
        return times(words[2], std::stof(words[3]));
    }
    if (what == "profile" && count == 3) {
        return profile(words[2]);
    }
    if (what == "load" && count == 4) {
        return load(words[2], std::stoul(words[3]));
    }
    if (what == "log" && count == 3) {
        return log(words[2] == std::string("1"), count, words);
    }
    std::cerr << "parse, times, profile, load or log is taken" << std::endl;
    return 2;
}
