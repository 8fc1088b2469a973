#include "core/cuda/shared_library.h"

#include <dlfcn.h>
#include <glob.h>
#include <limits.h>
#include <link.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "core/base/error.h"

namespace chorus {
namespace cuda {
namespace {

bool IsFolder(const std::string& path) {
  struct stat info {};
  return stat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode);
}

std::vector<std::string> Glob(const std::string& pattern) {
  std::vector<std::string> paths;
  glob_t matches{};
  if (glob(pattern.c_str(), 0, nullptr, &matches) == 0) {
    paths.assign(matches.gl_pathv, matches.gl_pathv + matches.gl_pathc);
  }
  globfree(&matches);
  return paths;
}

std::string Variable(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

// Of a link, where it leads, once; "" of what is none.
std::string LinkTarget(const std::string& path) {
  char target[PATH_MAX];
  const ssize_t bytes = readlink(path.c_str(), target, sizeof(target));
  if (bytes <= 0 || bytes == sizeof(target)) return "";
  const std::string text(target, static_cast<size_t>(bytes));
  return text[0] == '/' ? text : path.substr(0, path.rfind('/') + 1) + text;
}

// Prefixes of Python installations: PREFIX/bin/python3. A virtual environment's interpreter is a
// link to another one, and each on the way may have the packages.
std::vector<std::string> PythonPrefixes() {
  std::vector<std::string> prefixes = {Variable("VIRTUAL_ENV"), Variable("CONDA_PREFIX")};
  for (const auto& folder : absl::StrSplit(Variable("PATH"), ':')) {
    for (const char* name : {"/python3", "/python"}) {
      std::string path = absl::StrCat(folder, name);
      if (access(path.c_str(), X_OK) != 0) continue;
      for (int hop = 0; hop < 8 && !path.empty(); ++hop) {
        const std::string in = path.substr(0, path.rfind('/'));
        prefixes.push_back(in.substr(0, in.rfind('/')));
        path = LinkTarget(path);
      }
    }
  }
  for (const char* usual : {"/usr/local", "/usr", "/opt/conda"}) prefixes.push_back(usual);
  const std::string home = Variable("HOME");
  if (!home.empty()) prefixes.push_back(home + "/.local");
  for (const char* pattern : {"/opt/*", "/opt/*/.venv", "/opt/*/venv"}) {
    for (std::string& path : Glob(pattern)) prefixes.push_back(std::move(path));
  }
  return prefixes;
}

}  // namespace

absl::StatusOr<SharedLibrary> SharedLibrary::Open(const std::vector<std::string>& names,
                                                  const std::vector<std::string>& first,
                                                  const std::vector<std::string>& last) {
  std::string reason;
  const auto load = [&](const std::string& path) {
    void* const handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr && reason.empty()) reason = dlerror();
    return handle;
  };
  const auto make_library = [](void* handle, const std::string& name) {
    link_map* map = nullptr;
    const bool has_path = dlinfo(handle, RTLD_DI_LINKMAP, &map) == 0 && map->l_name[0] != '\0';
    return SharedLibrary(handle, has_path ? map->l_name : name);
  };
  const auto from = [&](const std::vector<std::string>& folders, const std::string& name) -> void* {
    for (const std::string& folder : folders) {
      const std::string path = absl::StrCat(folder, "/", name);
      if (access(path.c_str(), R_OK) != 0) continue;
      if (void* const handle = load(path)) return handle;
    }
    return nullptr;
  };
  for (const std::string& name : names) {
    void* handle = from(first, name);
    if (handle == nullptr) handle = load(name);
    if (handle == nullptr) handle = from(last, name);
    if (handle != nullptr) return make_library(handle, name);
  }
  return MakeError(Reason::kWrongState,
                   absl::StrCat("no ", absl::StrJoin(names, " or "), ": ", reason));
}

void* SharedLibrary::Find(const char* symbol) const { return dlsym(handle_, symbol); }

std::vector<std::string> WithLibraryFolders(std::vector<std::string> folders) {
  for (const auto& folder :
       absl::StrSplit(Variable("CHORUS_CUDA_LIBRARIES"), ':', absl::SkipEmpty())) {
    folders.emplace_back(folder);
  }
  return folders;
}

std::vector<std::string> PythonLibraryFolders(const std::vector<std::string>& parts) {
  std::vector<std::string> packages;
  for (const auto& folder : absl::StrSplit(Variable("PYTHONPATH"), ':', absl::SkipEmpty())) {
    packages.emplace_back(folder);
  }
  for (const std::string& prefix : PythonPrefixes()) {
    if (prefix.empty()) continue;
    for (const char* lib : {"/lib", "/lib64"}) {
      for (const char* kind : {"/site-packages", "/dist-packages"}) {
        const std::string pattern = absl::StrCat(prefix, lib, "/python3*", kind);
        for (std::string& path : Glob(pattern)) packages.push_back(std::move(path));
      }
    }
  }
  std::vector<std::string> folders;
  for (const std::string& package : packages) {
    for (const std::string& part : parts) {
      const std::string folder = absl::StrCat(package, "/nvidia/", part, "/lib");
      if (!IsFolder(folder)) continue;
      if (std::find(folders.begin(), folders.end(), folder) == folders.end()) {
        folders.push_back(folder);
      }
    }
  }
  return folders;
}

}  // namespace cuda
}  // namespace chorus
