// What kernels need of a GPU, in one header, so that their bodies have no #ifdef and run as plain
// functions on a CPU, too: there a "thread of the GPU" is a call. The host's kernels share functors
// with them.
//
// Threads: each function is of the one thread that calls it. Ownership: none. Errors: none.
#ifndef CHORUS_CORE_BASE_DEVICE_H_
#define CHORUS_CORE_BASE_DEVICE_H_

#include <cstdint>

#ifdef __CUDACC__
#define CHORUS_DEVICE __host__ __device__ __forceinline__
#define CHORUS_UNROLL _Pragma("unroll")
#define CHORUS_KEEP_LOOP _Pragma("unroll 1")
#else
#define CHORUS_DEVICE inline
#define CHORUS_UNROLL _Pragma("GCC unroll 16")
#define CHORUS_KEEP_LOOP _Pragma("GCC unroll 1")
#include <time.h>
#endif

namespace chorus {
namespace cuda {

// What a thread of the GPU loads and stores at a time.
struct alignas(16) Pack {
  float f[4];
};

// In a block of every kernel.
inline constexpr int kBlockThreads = 128;

// A thread's position in its launch, in which all take the same part.
struct Lane {
  int64_t index = 0;  // in the whole grid
  int64_t count = 1;  // of the grid's threads
  // Memory of its own block, in which scratch[i * stride] is this thread's.
  Pack* scratch = nullptr;
  int stride = 1;
};

// A clock that all threads of a device share.
CHORUS_DEVICE int64_t DeviceNanos() {
#ifdef __CUDA_ARCH__
  int64_t nanos;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(nanos));
  return nanos;
#elif !defined(__CUDACC__)
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * int64_t{1000000000} + now.tv_nsec;
#else
  return 0;
#endif
}

// Words that others write or read meanwhile: the host, other kernels, other processes. What a
// thread wrote before it stores one is seen by every thread that sees the word.
CHORUS_DEVICE uint32_t LoadShared(const uint32_t* word) {
#ifdef __CUDA_ARCH__
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
#else
  return __atomic_load_n(word, __ATOMIC_ACQUIRE);
#endif
}
CHORUS_DEVICE void StoreShared(uint32_t* word, uint32_t value) {
#ifdef __CUDA_ARCH__
  asm volatile("st.release.sys.global.u32 [%0], %1;" : : "l"(word), "r"(value) : "memory");
#else
  __atomic_store_n(word, value, __ATOMIC_RELEASE);
#endif
}
CHORUS_DEVICE void AddShared(uint64_t* sum, uint64_t value) {
#ifdef __CUDA_ARCH__
  atomicAdd(reinterpret_cast<unsigned long long*>(sum), static_cast<unsigned long long>(value));
#else
  __atomic_fetch_add(sum, value, __ATOMIC_RELAXED);
#endif
}

CHORUS_DEVICE void StoreLeast(uint64_t* word, uint64_t value) {
#ifdef __CUDA_ARCH__
  atomicMin(reinterpret_cast<unsigned long long*>(word), static_cast<unsigned long long>(value));
#else
  uint64_t current = __atomic_load_n(word, __ATOMIC_RELAXED);
  while (value < current && !__atomic_compare_exchange_n(word, &current, value, true,
                                                         __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
#endif
}

// Lets others have the processor for a moment, in a loop that waits.
CHORUS_DEVICE void Relax() {
#ifdef __CUDA_ARCH__
  __nanosleep(100);
#else
  __builtin_ia32_pause();
#endif
}

// The memory at an address that is in no thread's or block's own, which the compiler may rely on.
template <typename T>
CHORUS_DEVICE T* GlobalMemory(uint64_t address) {
#ifdef __CUDA_ARCH__
  return static_cast<T*>(__cvta_global_to_generic(address));
#else
  return reinterpret_cast<T*>(address);
#endif
}

// In branches with a kBranch of their own, the compiler does not take what they begin with out of
// them, away from what follows.
template <int kBranch>
CHORUS_DEVICE void KeepApart() {
#ifdef __CUDA_ARCH__
  asm volatile("// %0" : : "n"(kBranch) : "memory");
#endif
}

CHORUS_DEVICE uint32_t BitsOf(float value) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(value);
#else
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof(bits));
  return bits;
#endif
}
CHORUS_DEVICE float FloatOf(uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  float value;
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
#endif
}
CHORUS_DEVICE uint64_t BitsOf(double value) {
#ifdef __CUDA_ARCH__
  return static_cast<uint64_t>(__double_as_longlong(value));
#else
  uint64_t bits;
  __builtin_memcpy(&bits, &value, sizeof(bits));
  return bits;
#endif
}
CHORUS_DEVICE double DoubleOf(uint64_t bits) {
#ifdef __CUDA_ARCH__
  return __longlong_as_double(static_cast<int64_t>(bits));
#else
  double value;
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
#endif
}

}  // namespace cuda
}  // namespace chorus

#endif  // CHORUS_CORE_BASE_DEVICE_H_
