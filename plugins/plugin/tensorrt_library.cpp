// The TensorRT libraries of this process, found through the dynamic linker.
#include "tensorrt_library.h"

#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string_view>
#include <system_error>

#include "errors.h"

namespace moetrt {
namespace {

namespace fs = std::filesystem;

using GetVersion = int32_t (*)();
using GetRegistry = void* (*)();

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
    explicit Handle(const std::string& path) : path_(path), handle_(dlopen(path.c_str(), RTLD_LAZY | RTLD_NOLOAD)) {}
    ~Handle() {
        if (handle_ != nullptr) {
            dlclose(handle_);
        }
    }
    Handle(const Handle&) = delete;
    Handle& operator=(const Handle&) = delete;

    /// Null where the library lacks the function; dlsym looks into its dependencies too, so the function's home counts.
    template <typename Function>
    Function ownFunction(const char* name) const {
        void* const address = handle_ == nullptr ? nullptr : dlsym(handle_, name);
        Dl_info home{};
        const bool own = address != nullptr && dladdr(address, &home) != 0 && path_ == home.dli_fname;
        return own ? reinterpret_cast<Function>(address) : nullptr;
    }

private:
    const std::string path_;
    void* const handle_;
};

TensorRTVersion versionOf(int32_t number) {
    // TensorRT 8 and 9 count in thousands; they have no IPluginV3 and are not told apart any further.
    return {number / 10000, number / 100 % 100};
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

/// What is in a folder, in no order; nothing where it cannot be read.
std::vector<fs::path> entriesOf(const fs::path& folder) {
    std::vector<fs::path> entries;
    std::error_code error;
    for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error)) {
        entries.push_back(entry->path());
    }
    return entries;
}

bool open(const std::string& name) {
    // The handle is kept for good: the registry in there holds our creators from now on.
    return dlopen(name.c_str(), RTLD_LAZY | RTLD_LOCAL) != nullptr;
}

/// argv[0] as a path: a virtual environment's python is a link in PREFIX/bin to one that lies elsewhere.
fs::path commandPath() {
    std::ifstream file("/proc/self/cmdline", std::ios::binary);
    std::string command;
    std::getline(file, command, '\0');
    const char* const search = std::getenv("PATH");
    if (command.find('/') != std::string::npos || search == nullptr) {
        return command;
    }
    std::istringstream folders(search);
    for (std::string folder; std::getline(folders, folder, ':');) {
        std::error_code ignored;
        if (fs::exists(fs::path(folder) / command, ignored)) {
            return fs::path(folder) / command;
        }
    }
    return command;
}

/// Folders that may hold Python's packages: that of this library (it is installed as moetrt/lib/...), and those of the
/// Python that runs or is active.
std::vector<fs::path> siteFolders() {
    std::vector<fs::path> folders;
    std::error_code ignored;
    Dl_info self{};
    if (dladdr(reinterpret_cast<void*>(&siteFolders), &self) != 0 && self.dli_fname != nullptr) {
        folders.push_back(fs::absolute(self.dli_fname, ignored).parent_path().parent_path().parent_path());
    }
    std::vector<fs::path> prefixes{fs::absolute(commandPath(), ignored).parent_path().parent_path()};
    for (const char* const variable : {"VIRTUAL_ENV", "CONDA_PREFIX"}) {
        if (const char* const value = std::getenv(variable); value != nullptr && value[0] != '\0') {
            prefixes.emplace_back(value);
        }
    }
    for (const fs::path& prefix : prefixes) {
        for (const fs::path& entry : entriesOf(prefix / "lib")) {
            if (entry.filename().string().starts_with("python3")) {
                folders.push_back(entry / "site-packages");
            }
        }
    }
    return folders;
}

bool openFromSite(const std::vector<fs::path>& sites, const SiteFolder& wanted) {
    for (const fs::path& site : sites) {
        std::vector<std::string> found;
        for (const fs::path& entry : entriesOf(site / wanted.package)) {
            if (entry.filename().string().starts_with(wanted.prefix)) {
                found.push_back(entry.string());
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
        const Handle library(path);
        const auto getVersion = library.ownFunction<GetVersion>("getInferLibVersion");
        const auto getRegistry = library.ownFunction<GetRegistry>("getPluginRegistry");
        if (getVersion != nullptr && getRegistry != nullptr) {
            libraries.push_back({path, versionOf(getVersion()), getRegistry()});
        }
    }
    return libraries;
}

bool openTensorRTLibrary() {
    if (const char* const named = std::getenv("MOETRT_TENSORRT_LIBRARY"); named != nullptr && named[0] != '\0') {
        if (open(named)) {
            return true;
        }
        refuse(std::string("MOETRT_TENSORRT_LIBRARY was '") + named + "', which cannot be opened; " +
               "the path of a TensorRT library is taken");
        return false;
    }
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

std::string libraryOfObject(const void* object) {
    if (object == nullptr) {
        return "";
    }
    // The first word of a polymorphic object points to its class's vtable, inside the library that made it.
    Dl_info home{};
    const bool found = dladdr(*static_cast<const void* const*>(object), &home) != 0 && home.dli_fname != nullptr;
    return found ? home.dli_fname : "";
}

TensorRTVersion tensorRTVersionOf(const std::string& path) {
    const auto getVersion = path.empty() ? nullptr : Handle(path).ownFunction<GetVersion>("getInferLibVersion");
    return getVersion == nullptr ? TensorRTVersion{0, 0} : versionOf(getVersion());
}

}  // namespace moetrt
