// The TensorRT libraries of this process, found through the dynamic linker.
#include "tensorrt_library.h"

#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <string_view>
#include <system_error>

namespace moetrt {
namespace {

namespace fs = std::filesystem;

using GetVersion = int32_t (*)();
using GetRegistry = nvinfer1::IPluginRegistry* (*)();

struct SiteFolder {
    const char* package;
    const char* prefix;  // of the library's file name
};

constexpr SiteFolder kFull{"tensorrt_libs", "libnvinfer.so"};
constexpr SiteFolder kRtx{"tensorrt_rtx_libs", "libtensorrt_rtx.so"};
constexpr SiteFolder kLean{"tensorrt_lean_libs", "libnvinfer_lean.so"};

/// An open handle of a library that is loaded already; closed at the end of its scope, which unloads nothing.
class Handle {
public:
    explicit Handle(const char* path) : handle_(dlopen(path, RTLD_LAZY | RTLD_NOLOAD)) {}
    ~Handle() {
        if (handle_ != nullptr) {
            dlclose(handle_);
        }
    }
    Handle(const Handle&) = delete;
    Handle& operator=(const Handle&) = delete;

    template <typename Function>
    Function function(const char* name) const {
        return handle_ == nullptr ? nullptr : reinterpret_cast<Function>(dlsym(handle_, name));
    }

private:
    void* handle_;
};

TensorRTVersion versionOf(int32_t number) {
    // TensorRT 8 and 9 count in thousands; they have no IPluginV3 and are not told apart any further.
    return {number / 10000, number / 100 % 100};
}

/// The version of the library at `path`; dlsym looks into its dependencies too, so the symbol's own home is compared.
TensorRTVersion versionOfLibrary(const Handle& library, const char* path) {
    const auto getVersion = library.function<GetVersion>("getInferLibVersion");
    Dl_info home{};
    if (getVersion == nullptr || dladdr(reinterpret_cast<void*>(getVersion), &home) == 0 ||
        std::string_view(home.dli_fname) != path) {
        return {0, 0};
    }
    return versionOf(getVersion());
}

std::vector<std::string> loadedPaths() {
    std::vector<std::string> paths;
    dl_iterate_phdr(
        [](dl_phdr_info* info, size_t, void* into) {
            if (info->dlpi_name != nullptr && info->dlpi_name[0] != '\0') {
                static_cast<std::vector<std::string>*>(into)->emplace_back(info->dlpi_name);
            }
            return 0;
        },
        &paths);
    return paths;
}

bool open(const std::string& name) {
    // The handle is kept for good: the registry in there holds our creators from now on.
    return dlopen(name.c_str(), RTLD_LAZY | RTLD_LOCAL) != nullptr;
}

/// Folders that may hold Python's packages: those above this library (it is installed in moetrt/lib), and those of
/// the environment that is active.
std::vector<fs::path> siteFolders() {
    std::vector<fs::path> folders;
    std::error_code ignored;
    Dl_info self{};
    if (dladdr(reinterpret_cast<void*>(&siteFolders), &self) != 0 && self.dli_fname != nullptr) {
        folders.push_back(fs::absolute(self.dli_fname, ignored).parent_path().parent_path().parent_path());
    }
    std::vector<fs::path> prefixes;
    for (const char* const variable : {"VIRTUAL_ENV", "CONDA_PREFIX"}) {
        if (const char* const value = std::getenv(variable); value != nullptr && value[0] != '\0') {
            prefixes.emplace_back(value);
        }
    }
    // A virtual environment that was never activated: its python lies in PREFIX/bin as a link out of it.
    if (const char* const command = std::getenv("_"); command != nullptr) {
        prefixes.push_back(fs::path(command).parent_path().parent_path());
    }
    for (const fs::path& prefix : prefixes) {
        for (const auto& entry : fs::directory_iterator(prefix / "lib", ignored)) {
            if (entry.path().filename().string().starts_with("python3")) {
                folders.push_back(entry.path() / "site-packages");
            }
        }
    }
    return folders;
}

bool openFromSite(const std::vector<fs::path>& sites, const SiteFolder& wanted) {
    for (const fs::path& site : sites) {
        std::error_code ignored;
        std::vector<std::string> found;
        for (const auto& entry : fs::directory_iterator(site / wanted.package, ignored)) {
            if (entry.path().filename().string().starts_with(wanted.prefix)) {
                found.push_back(entry.path().string());
            }
        }
        std::sort(found.rbegin(), found.rend());
        if (std::any_of(found.begin(), found.end(), open)) {
            return true;
        }
    }
    return false;
}

bool isSet(const char* variable) {
    const char* const value = std::getenv(variable);
    return value != nullptr && value[0] != '\0' && std::string_view(value) != "0";
}

}  // namespace

std::vector<TensorRTLibrary> loadedTensorRTLibraries() {
    std::vector<TensorRTLibrary> libraries;
    for (const std::string& path : loadedPaths()) {
        const Handle library(path.c_str());
        const TensorRTVersion version = versionOfLibrary(library, path.c_str());
        const auto getRegistry = library.function<GetRegistry>("getPluginRegistry");
        if (version.major > 0 && getRegistry != nullptr) {
            libraries.push_back({path, version, getRegistry()});
        }
    }
    return libraries;
}

bool openTensorRTLibrary() {
    const std::vector<fs::path> sites = siteFolders();
    if (isSet("POLYGRAPHY_USE_TENSORRT_RTX")) {
        return open("libtensorrt_rtx.so.1") || openFromSite(sites, kRtx);
    }
    if (open("libnvinfer.so.11") || open("libnvinfer.so.10") || openFromSite(sites, kFull)) {
        return true;
    }
    const bool rtx = openFromSite(sites, kRtx);
    const bool lean = openFromSite(sites, kLean);
    return rtx || lean;
}

TensorRTVersion tensorRTVersionOfObject(const void* object) {
    // The first word of a polymorphic object points to its class's vtable, inside the library that made it.
    const void* const vtable = *static_cast<const void* const*>(object);
    Dl_info home{};
    if (dladdr(vtable, &home) == 0 || home.dli_fname == nullptr) {
        return {0, 0};
    }
    return versionOfLibrary(Handle(home.dli_fname), home.dli_fname);
}

}  // namespace moetrt
