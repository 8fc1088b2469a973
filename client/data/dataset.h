// What a training learns from: samples by index, each a few tensors in the trainer's memory.
//
// Threads: a dataset does not change, and any threads may ask it at a time (a DataLoader's do).
// Ownership: a sample's tensors hold their elements, or what holds them.
// Errors: returned. INVALID_ARGUMENT kBadType: an index that is none, arrays that do not fit, a
//   transform that is none.
#ifndef CHORUS_CLIENT_DATA_DATASET_H_
#define CHORUS_CLIENT_DATA_DATASET_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "chorus/parallel/host_tensor.h"

namespace chorus {
namespace data {

using parallel::HostTensor;
using HostTensors = std::vector<HostTensor>;

class Dataset {
 public:
  virtual ~Dataset() = default;

  virtual int64_t size() const = 0;
  // A sample, from 0 to size() - 1. Whatever is random in it is drawn from `seed`, and so is the
  // same whichever thread or rank asks (Sampler::SeedAt).
  virtual absl::StatusOr<HostTensors> Get(int64_t index, uint64_t seed) const = 0;
  // Of the tensors of a sample; none: they have only indices.
  virtual std::vector<std::string> names() const { return {}; }

 protected:
  // That `index` is one of this dataset's.
  absl::Status CheckIndex(int64_t index) const;
};

// Sample i has row i of each array; nothing is copied.
class TensorDataset : public Dataset {
 public:
  // Arrays with as many rows each, at least one; as many names, or none.
  static absl::StatusOr<std::shared_ptr<const TensorDataset>> Create(
      HostTensors arrays, std::vector<std::string> names = {});

  int64_t size() const override { return arrays_[0].shape()[0]; }
  absl::StatusOr<HostTensors> Get(int64_t index, uint64_t seed) const override;
  std::vector<std::string> names() const override { return names_; }

 private:
  TensorDataset(HostTensors arrays, std::vector<std::string> names);

  const HostTensors arrays_;
  const std::vector<std::string> names_;
  std::vector<Shape> rows_;  // by array: the shape of a row
};

// The samples of another dataset, changed one by one. The function is called by any threads. Its
// seed is the sample's; the other dataset is given one that is made of that, so that transforms of
// transforms draw each for itself.
class TransformedDataset : public Dataset {
 public:
  using Transform = std::function<absl::StatusOr<HostTensors>(HostTensors sample, uint64_t seed)>;
  // `names`: of what `transform` gives; none: as the dataset's.
  TransformedDataset(std::shared_ptr<const Dataset> dataset, Transform transform,
                     std::vector<std::string> names = {});

  int64_t size() const override { return dataset_->size(); }
  absl::StatusOr<HostTensors> Get(int64_t index, uint64_t seed) const override;
  std::vector<std::string> names() const override { return names_; }

 private:
  const std::shared_ptr<const Dataset> dataset_;
  const Transform transform_;
  const std::vector<std::string> names_;
};

}  // namespace data
}  // namespace chorus

#endif  // CHORUS_CLIENT_DATA_DATASET_H_
