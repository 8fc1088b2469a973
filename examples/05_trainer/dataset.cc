#include "examples/05_trainer/dataset.h"

#include <cstring>

#include "absl/strings/str_cat.h"
#include "chorus/chorus.h"
#include "chorus/data/idx.h"
#include "core/base/error.h"

namespace trainer {
namespace {

using chorus::parallel::HostTensor;

// The bytes of an IDX file with so many dimensions.
absl::StatusOr<HostTensor> ReadBytes(const std::string& path, size_t rank) {
  CHORUS_ASSIGN_OR_RETURN(HostTensor idx, chorus::data::ReadIdx(path));
  if (idx.dtype() != chorus::DType::kU8 || idx.shape().size() != rank) {
    return chorus::BadType(
        absl::StrCat(path, ": expected an IDX file of bytes with ", rank, " dimensions"));
  }
  return idx;
}

}  // namespace

absl::StatusOr<Dataset> ReadDataset(const std::string& directory, const std::string& name) {
  const std::string base = absl::StrCat(directory, "/", name);
  CHORUS_ASSIGN_OR_RETURN(const HostTensor images,
                          ReadBytes(absl::StrCat(base, "-images-idx3-ubyte.gz"), 3));
  CHORUS_ASSIGN_OR_RETURN(const HostTensor labels,
                          ReadBytes(absl::StrCat(base, "-labels-idx1-ubyte.gz"), 1));
  const chorus::Shape& shape = images.shape();
  if (shape[0] != labels.shape()[0]) {
    return chorus::BadType(
        absl::StrCat(base, ": ", shape[0], " images, but ", labels.shape()[0], " labels"));
  }
  Dataset data;
  data.count = shape[0];
  data.pixels = shape[1] * shape[2];
  CHORUS_ASSIGN_OR_RETURN(data.images, images.Read<uint8_t>());
  CHORUS_ASSIGN_OR_RETURN(data.labels, labels.Read<uint8_t>());
  return data;
}

Batch TakeBatch(const Dataset& data, const std::vector<int64_t>& order, int64_t begin,
                int64_t size) {
  Batch batch;
  batch.size = size;
  batch.images.resize(static_cast<size_t>(size * data.pixels));
  batch.labels.resize(static_cast<size_t>(size));
  for (int64_t i = 0; i < size; ++i) {
    const int64_t from = order[static_cast<size_t>(begin + i)];
    std::memcpy(batch.images.data() + i * data.pixels, data.images.data() + from * data.pixels,
                static_cast<size_t>(data.pixels));
    batch.labels[static_cast<size_t>(i)] = data.labels[static_cast<size_t>(from)];
  }
  return batch;
}

}  // namespace trainer
