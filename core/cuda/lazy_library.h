// A library of functions and the one handle that it is used by, opened when it is first wanted: it
// takes seconds and hundreds of megabytes, and a program that does not want it does without.
//
// Threads: any. Ownership: the handle is destroyed with it. Errors: where it cannot be had there is
// no handle, which is told on the standard error once.
#ifndef CHORUS_CORE_CUDA_LAZY_LIBRARY_H_
#define CHORUS_CORE_CUDA_LAZY_LIBRARY_H_

#include <cstdio>
#include <functional>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "core/base/error.h"
#include "core/base/mutex.h"

namespace chorus {

// Api has Create and Destroy of a Handle, and a StatusText for what they return.
template <typename Api, typename Handle>
class LazyLibrary {
 public:
  using Load = std::function<absl::StatusOr<Api>()>;

  // No `load`: there is none, and nothing is told of it. `without`: what is done otherwise then,
  // "matrix products without cuBLASLt".
  LazyLibrary(Load load, std::string without)
      : load_(std::move(load)), without_(std::move(without)) {}
  // In the GPU's context, as Open().
  ~LazyLibrary() {
    MutexLock lock(&mutex_);
    if (handle_ != nullptr) api_.Destroy(handle_);
  }
  LazyLibrary(const LazyLibrary&) = delete;
  LazyLibrary& operator=(const LazyLibrary&) = delete;

  // Null: it cannot be had.
  Handle Open() ABSL_LOCKS_EXCLUDED(mutex_) {
    if (load_ == nullptr) return nullptr;
    MutexLock lock(&mutex_);
    if (asked_) return handle_;
    asked_ = true;
    const auto without = [this](const std::string& why) {
      std::fprintf(stderr, "cuda backend: %s: %s\n", without_.c_str(), why.c_str());
      return nullptr;
    };
    auto api = load_();
    if (!api.ok()) return without(ErrorOf(api.status()).message);
    Handle handle = nullptr;
    const auto status = api->Create(&handle);
    if (static_cast<int>(status) != 0) {
      return without(api->path + " gives no handle: " + StatusText(*api, status));
    }
    api_ = *std::move(api);
    handle_ = handle;
    return handle_;
  }
  // Does not change once there is a handle.
  const Api& api() const { return api_; }

  // Tells the first such text.
  void TellOnce(const std::string& text) ABSL_LOCKS_EXCLUDED(mutex_) {
    MutexLock lock(&mutex_);
    if (!told_) std::fprintf(stderr, "cuda backend: %s\n", text.c_str());
    told_ = true;
  }

 private:
  const Load load_;
  const std::string without_;
  Mutex mutex_;
  bool asked_ ABSL_GUARDED_BY(mutex_) = false;
  bool told_ ABSL_GUARDED_BY(mutex_) = false;
  Handle handle_ ABSL_GUARDED_BY(mutex_) = nullptr;
  Api api_;
};

}  // namespace chorus

#endif  // CHORUS_CORE_CUDA_LAZY_LIBRARY_H_
