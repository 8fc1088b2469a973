// Bytes from anywhere as an IDX file: refused, or an array that is all there.
#include "chorus/data/idx.h"
#include "client/data/fuzz_reader.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto array = chorus::data::ParseIdx("file", chorus::data::FuzzBytes(data, size));
  if (array.ok()) {
    chorus::data::CheckArray(*array);
  } else {
    chorus::data::CheckRefused(array.status());
  }
  return 0;
}
