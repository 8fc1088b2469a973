#include "core/base/counting_malloc.h"

#include <errno.h>
#include <malloc.h>

#include <cstddef>

#if defined(__SANITIZE_ADDRESS__)
#define CHORUS_SANITIZERS_MALLOC 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define CHORUS_SANITIZERS_MALLOC 1
#endif
#endif

namespace chorus {
namespace {

// Of the thread's own page: no allocation of its own, which would come back here.
__attribute__((tls_model("initial-exec"))) thread_local int64_t t_bytes = 0;
__attribute__((tls_model("initial-exec"))) thread_local int64_t t_most_bytes = 0;

void Count(int64_t bytes) {
  t_bytes += bytes;
  if (t_bytes > t_most_bytes) t_most_bytes = t_bytes;
}

}  // namespace

MallocUse::MallocUse() : bytes_before_(t_bytes) { t_most_bytes = t_bytes; }
int64_t MallocUse::bytes() const { return t_bytes - bytes_before_; }
int64_t MallocUse::most_bytes() const { return t_most_bytes - bytes_before_; }

}  // namespace chorus

#ifdef CHORUS_SANITIZERS_MALLOC

// A sanitizer has a malloc of its own, and tells of it.
extern "C" int __sanitizer_install_malloc_and_free_hooks(void (*malloc_hook)(const volatile void*,
                                                                             size_t),
                                                         void (*free_hook)(const volatile void*));
extern "C" size_t __sanitizer_get_allocated_size(const volatile void* block);

namespace {
const int installed = __sanitizer_install_malloc_and_free_hooks(
    [](const volatile void*, size_t bytes) { chorus::Count(static_cast<int64_t>(bytes)); },
    [](const volatile void* block) {
      if (block == nullptr) return;
      chorus::Count(-static_cast<int64_t>(__sanitizer_get_allocated_size(block)));
    });
}  // namespace

#else

// The C library's own, by the names that it has for those who stand before it.
extern "C" {
void* __libc_malloc(size_t bytes);
void* __libc_calloc(size_t count, size_t bytes);
void* __libc_realloc(void* block, size_t bytes);
void* __libc_memalign(size_t alignment, size_t bytes);
void __libc_free(void* block);
}

namespace {

void* Counted(void* block) {
  if (block != nullptr) chorus::Count(static_cast<int64_t>(malloc_usable_size(block)));
  return block;
}
void Uncount(void* block) {
  if (block != nullptr) chorus::Count(-static_cast<int64_t>(malloc_usable_size(block)));
}

}  // namespace

extern "C" {

void* malloc(size_t bytes) { return Counted(__libc_malloc(bytes)); }
void* calloc(size_t count, size_t bytes) { return Counted(__libc_calloc(count, bytes)); }
void* memalign(size_t alignment, size_t bytes) {
  return Counted(__libc_memalign(alignment, bytes));
}
void* aligned_alloc(size_t alignment, size_t bytes) { return memalign(alignment, bytes); }
int posix_memalign(void** block, size_t alignment, size_t bytes) {
  if (alignment % sizeof(void*) != 0 || (alignment & (alignment - 1)) != 0 || alignment == 0) {
    return EINVAL;
  }
  void* const got = memalign(alignment, bytes);
  if (got == nullptr) return ENOMEM;
  *block = got;
  return 0;
}
void* realloc(void* block, size_t bytes) {
  const auto before = block == nullptr ? size_t{0} : malloc_usable_size(block);
  void* const now = __libc_realloc(block, bytes);
  // One of nothing is freed; one that fails stays as it was.
  if (now != nullptr || bytes == 0) chorus::Count(-static_cast<int64_t>(before));
  return Counted(now);
}
void free(void* block) {
  Uncount(block);
  __libc_free(block);
}

}  // extern "C"

#endif
