// Bytes from anywhere as a safetensors file: refused, or tensors that are all there.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "chorus/nn/safetensors.h"
#include "core/base/error.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using chorus::nn::TensorFile;
  const auto file = TensorFile::Of("file", std::string(reinterpret_cast<const char*>(data), size));
  if (!file.ok()) {
    if (chorus::ErrorOf(file.status()).reason != chorus::Reason::kMalformed) std::abort();
    return 0;
  }
  for (const TensorFile::Entry& entry : file->entries()) {
    int64_t bytes = chorus::DTypeBytes(entry.dtype);
    for (const int64_t dim : entry.shape) bytes *= dim;
    const auto elements = file->Bytes(entry.name);
    if (!elements.ok() || static_cast<int64_t>(elements->size()) != bytes) std::abort();
    int sum = 0;
    for (const char byte : *elements) sum += byte;
    volatile int used = sum;
    (void)used;
  }
  return 0;
}
