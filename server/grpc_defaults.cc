#include "server/grpc_defaults.h"

#include <dlfcn.h>
#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "core/base/error.h"
#include "core/base/mutex.h"
#include "grpcpp/grpcpp.h"

namespace chorus::server {
namespace {

// A row of grpc_chttp2_settings_parameters. An internal of the library: hence the checks.
struct Setting {
  const char* name;
  uint32_t default_value;
  uint32_t min_value;
  uint32_t max_value;
  int on_invalid;
  uint32_t error;
};
constexpr size_t kRows = 7;
constexpr uint32_t kHeaderListSize = 16777216;
constexpr uint32_t kConcurrentStreams = 4294967295u;

absl::Status Unknown(absl::string_view what) {
  return MakeError(Reason::kCannotServe,
                   absl::StrCat("gRPC ", grpc::Version(), " is none that chorusd knows: ", what,
                                "; expected gRPC 1.51"));
}

// The row named `name`. `is_changed`: this process has changed it; else its default has to be
// `expected`.
absl::StatusOr<Setting*> RowOf(Setting* rows, absl::string_view name, uint32_t expected,
                               bool is_changed) {
  for (size_t i = 0; i < kRows; ++i) {
    if (rows[i].name == nullptr || rows[i].name != name) continue;
    if (is_changed || rows[i].default_value == expected) return &rows[i];
    return Unknown(absl::StrCat(name, " is ", rows[i].default_value, " unless acknowledged"));
  }
  return Unknown(absl::StrCat("it has no setting ", name));
}

}  // namespace

absl::Status SetHttpDefaults(const HttpDefaults& defaults) {
  static bool is_changed = false;
  static Mutex* const mutex = new Mutex;
  MutexLock lock(mutex);
  auto* const rows = static_cast<Setting*>(dlsym(RTLD_DEFAULT, "grpc_chttp2_settings_parameters"));
  if (rows == nullptr) return Unknown("it has no table of HTTP/2's settings");
  CHORUS_ASSIGN_OR_RETURN(Setting* const headers,
                          RowOf(rows, "MAX_HEADER_LIST_SIZE", kHeaderListSize, is_changed));
  CHORUS_ASSIGN_OR_RETURN(Setting* const streams,
                          RowOf(rows, "MAX_CONCURRENT_STREAMS", kConcurrentStreams, is_changed));
  // The loader has made it read-only.
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t begin = reinterpret_cast<uintptr_t>(rows) / page * page;
  const size_t size = reinterpret_cast<uintptr_t>(rows + kRows) - begin;
  void* const pages = reinterpret_cast<void*>(begin);
  if (mprotect(pages, size, PROT_READ | PROT_WRITE) != 0) {
    return Unknown(absl::StrCat("its settings cannot be changed: ", strerror(errno)));
  }
  headers->default_value = defaults.max_header_list_size;
  streams->default_value = defaults.max_concurrent_streams;
  mprotect(pages, size, PROT_READ);
  is_changed = true;
  return absl::OkStatus();
}

}  // namespace chorus::server
