// Bytes from anywhere as an .npz file: refused, or arrays that are all there.
#include "chorus/data/numpy.h"
#include "client/data/fuzz_reader.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto arrays = chorus::data::ParseNpz("file", chorus::data::FuzzBytes(data, size));
  if (arrays.ok()) {
    for (const auto& array : *arrays) chorus::data::CheckArray(array.second);
  } else {
    chorus::data::CheckRefused(arrays.status());
  }
  return 0;
}
