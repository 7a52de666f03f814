// The library's C interface, for callers without TensorRT.
#include <algorithm>

#include "errors.h"
#include "kernel/moe_finalize_launch.h"
#include "moetrt/moe_finalize.h"
#include "moetrt/registration.h"
#include "registration.h"
#include "run.h"

#define MOETRT_EXPORT extern "C" __attribute__((visibility("default")))

namespace moetrt {
namespace {

std::string notStarted(cudaError_t error) {
    return std::string("the kernel was not started: ") + cudaGetErrorName(error) + ", " + cudaGetErrorString(error);
}

int32_t answer(const char* function, const std::string& line) {
    if (line.empty()) {
        return 0;
    }
    refuse(std::string(function) + ": " + line);
    return 1;
}

}  // namespace

std::string runMoEFinalize(const moetrt_moe_finalize_params& params, const Device* device, int32_t tactic,
                           TacticUse use, cudaStream_t stream) {
    if (std::string line = checkMoEFinalize(params); !line.empty()) {
        return line;
    }
    if (params.num_tokens == 0) {
        return "";
    }
    if (device == nullptr) {
        if (const cudaError_t error = currentDevice(device); error != cudaSuccess) {
            return notStarted(error);
        }
    }
    const Tactic* chosen = findTactic(tactic);
    if (use == TacticUse::kRequired && tactic != MOETRT_TACTIC_DEFAULT) {
        if (chosen == nullptr || !runsTactic(*chosen, params, device->properties)) {
            return "tactic " + (chosen == nullptr ? std::to_string(tactic) : std::string(chosen->name)) +
                   " does not run these params on this device, taken are those of moetrt_moe_finalize_tactics";
        }
    } else {
        const TacticList useful = usefulTactics(params, device->properties);
        if (std::find(useful.begin(), useful.end(), chosen) == useful.end()) {
            chosen = *useful.begin();
        }
    }
    const cudaError_t error = launchMoEFinalize(params, *device, *chosen, stream);
    return error == cudaSuccess ? "" : notStarted(error);
}

}  // namespace moetrt

MOETRT_EXPORT int32_t moetrt_abi_version(void) {
    return MOETRT_ABI_VERSION;
}

MOETRT_EXPORT const char* moetrt_version(void) {
    return MOETRT_VERSION;
}

MOETRT_EXPORT const char* moetrt_last_error(void) {
    return moetrt::lastRefusal();
}

MOETRT_EXPORT void moetrt_clear_last_error(void) {
    moetrt::clearRefusal();
}

MOETRT_EXPORT int32_t moetrt_show_errors(int32_t show) {
    return moetrt::showRefusals(show != 0) ? 1 : 0;
}

MOETRT_EXPORT int32_t moetrt_register_creators(void) {
    return moetrt::registerInLoadedLibraries();
}

MOETRT_EXPORT int32_t moetrt_moe_finalize(const moetrt_moe_finalize_params* params, void* stream) {
    return moetrt_moe_finalize_with_tactic(params, MOETRT_TACTIC_DEFAULT, stream);
}

MOETRT_EXPORT int32_t moetrt_moe_finalize_with_tactic(const moetrt_moe_finalize_params* params, int32_t tactic,
                                                      void* stream) {
    return moetrt::answer("moetrt_moe_finalize",
                          params == nullptr
                              ? "params is null, taken is a moetrt_moe_finalize_params"
                              : moetrt::runMoEFinalize(*params, nullptr, tactic, moetrt::TacticUse::kRequired,
                                                       static_cast<cudaStream_t>(stream)));
}

MOETRT_EXPORT int32_t moetrt_moe_finalize_tactics(const moetrt_moe_finalize_params* params, const moetrt_device* device,
                                                  int32_t* tactics, int32_t capacity) {
    const moetrt::TacticList useful = moetrt::usefulTactics(*params, *device);
    int32_t written = 0;
    for (const moetrt::Tactic* tactic : useful) {
        if (written < capacity) {
            tactics[written++] = tactic->id;
        }
    }
    return useful.count;
}

MOETRT_EXPORT const char* moetrt_tactic_name(int32_t tactic) {
    const moetrt::Tactic* const found = moetrt::findTactic(tactic);
    return found == nullptr ? nullptr : found->name;
}

MOETRT_EXPORT int32_t moetrt_current_device(moetrt_device* device) {
    const moetrt::Device* current = nullptr;
    if (const cudaError_t error = moetrt::currentDevice(current); error != cudaSuccess) {
        return moetrt::answer("moetrt_current_device", std::string("the device is not known: ") +
                                                           cudaGetErrorName(error) + ", " + cudaGetErrorString(error));
    }
    *device = current->properties;
    return 0;
}
