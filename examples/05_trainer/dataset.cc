#include "examples/05_trainer/dataset.h"

#include <zlib.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"

namespace trainer {
namespace {

struct CloseFile {
  void operator()(gzFile_s* file) const { gzclose(file); }
};

// The dimensions and the bytes of an IDX file.
struct Idx {
  std::vector<int64_t> dims;
  std::vector<uint8_t> bytes;
};

absl::StatusOr<Idx> ReadIdx(const std::string& path, size_t rank) {
  const std::unique_ptr<gzFile_s, CloseFile> file(gzopen(path.c_str(), "rb"));
  if (file == nullptr) return absl::NotFoundError(absl::StrCat("cannot open ", path));
  const auto read = [&](void* to, size_t size) {
    return gzread(file.get(), to, static_cast<unsigned>(size)) == static_cast<int>(size);
  };
  // 0, 0, the type (8: unsigned bytes), the number of dimensions; then these, the first byte first.
  uint8_t head[4];
  if (!read(head, sizeof(head)) || head[0] != 0 || head[1] != 0 || head[2] != 8 ||
      head[3] != rank) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": expected an IDX file of bytes with ", rank, " dimensions"));
  }
  constexpr int64_t kMost = int64_t{1} << 30;
  Idx idx;
  int64_t size = 1;
  for (size_t i = 0; i < rank; ++i) {
    uint8_t dim[4];
    if (!read(dim, sizeof(dim))) {
      return absl::InvalidArgumentError(absl::StrCat(path, ": cut off in its head"));
    }
    idx.dims.push_back(int64_t{dim[0]} << 24 | dim[1] << 16 | dim[2] << 8 | dim[3]);
    size *= idx.dims.back();
    if (size > kMost) {
      return absl::InvalidArgumentError(absl::StrCat(path, ": more than ", kMost, " bytes"));
    }
  }
  idx.bytes.resize(static_cast<size_t>(size));
  if (!read(idx.bytes.data(), idx.bytes.size())) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": expected ", size, " bytes behind its head, it has fewer"));
  }
  return idx;
}

}  // namespace

absl::StatusOr<Dataset> ReadDataset(const std::string& directory, const std::string& name) {
  const std::string base = absl::StrCat(directory, "/", name);
  CHORUS_ASSIGN_OR_RETURN(Idx images, ReadIdx(absl::StrCat(base, "-images-idx3-ubyte.gz"), 3));
  CHORUS_ASSIGN_OR_RETURN(Idx labels, ReadIdx(absl::StrCat(base, "-labels-idx1-ubyte.gz"), 1));
  if (images.dims[0] != labels.dims[0]) {
    return absl::InvalidArgumentError(
        absl::StrCat(base, ": ", images.dims[0], " images, but ", labels.dims[0], " labels"));
  }
  Dataset data;
  data.count = images.dims[0];
  data.pixels = images.dims[1] * images.dims[2];
  data.images = std::move(images.bytes);
  data.labels = std::move(labels.bytes);
  return data;
}

std::vector<int32_t> EpochOrder(int64_t count, uint64_t seed, int epoch) {
  std::vector<int32_t> order(static_cast<size_t>(count));
  std::iota(order.begin(), order.end(), 0);
  std::mt19937_64 random(seed + static_cast<uint64_t>(epoch) * 0x9e3779b97f4a7c15);
  // std::shuffle's choices are each library's own; these are the same everywhere.
  for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random() % i]);
  return order;
}

Batch TakeBatch(const Dataset& data, const std::vector<int32_t>& order, int64_t begin,
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
