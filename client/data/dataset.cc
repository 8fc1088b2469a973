#include "chorus/data/dataset.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "client/data/host_elements.h"
#include "core/base/error.h"
#include "core/base/mix_bits.h"

namespace chorus {
namespace data {
absl::Status Dataset::CheckIndex(int64_t index) const {
  if (index >= 0 && index < size()) return absl::OkStatus();
  return BadType(absl::StrCat("a dataset of ", size(), " samples has none with index ", index));
}

absl::StatusOr<std::shared_ptr<const TensorDataset>> TensorDataset::Create(
    HostTensors arrays, std::vector<std::string> names) {
  if (arrays.empty()) return BadType("TensorDataset: expected an array or more, got none");
  if (!names.empty() && names.size() != arrays.size()) {
    return BadType(absl::StrCat("TensorDataset: expected a name for each of ", arrays.size(),
                                " arrays, got ", names.size()));
  }
  for (size_t i = 0; i < arrays.size(); ++i) {
    const auto refuse = [i](const std::string& what) {
      return BadType(absl::StrCat("TensorDataset: array ", i, ": ", what));
    };
    const absl::Status status = CheckInPlace(arrays[i]);
    if (!status.ok()) return refuse(ErrorOf(status).message);
    if (arrays[i].shape().empty()) return refuse("a tensor of no dimensions has no rows");
    if (arrays[i].shape()[0] != arrays[0].shape()[0]) {
      return refuse(absl::StrCat("expected ", arrays[0].shape()[0], " rows, as array 0 has, got ",
                                 arrays[i].shape()[0]));
    }
  }
  return std::shared_ptr<const TensorDataset>(
      new TensorDataset(std::move(arrays), std::move(names)));
}

TensorDataset::TensorDataset(HostTensors arrays, std::vector<std::string> names)
    : arrays_(std::move(arrays)), names_(std::move(names)) {
  for (const HostTensor& array : arrays_) {
    rows_.emplace_back(array.shape().begin() + 1, array.shape().end());
  }
}

absl::StatusOr<HostTensors> TensorDataset::Get(int64_t index, uint64_t) const {
  CHORUS_RETURN_IF_ERROR(CheckIndex(index));
  HostTensors sample;
  sample.reserve(arrays_.size());
  for (size_t i = 0; i < arrays_.size(); ++i) {
    const int64_t elements = ElementsOf(rows_[i]);
    const char* const row = arrays_[i].bytes() + index * elements * DTypeBytes(arrays_[i].dtype());
    sample.push_back(HostTensor::OfBytes(std::make_shared<const HostTensor>(arrays_[i]),
                                         arrays_[i].dtype(), row, static_cast<size_t>(elements),
                                         rows_[i]));
  }
  return sample;
}

TransformedDataset::TransformedDataset(std::shared_ptr<const Dataset> dataset, Transform transform,
                                       std::vector<std::string> names)
    : dataset_(std::move(dataset)),
      transform_(std::move(transform)),
      names_(names.empty() ? dataset_->names() : std::move(names)) {}

absl::StatusOr<HostTensors> TransformedDataset::Get(int64_t index, uint64_t seed) const {
  if (transform_ == nullptr) {
    return BadType("TransformedDataset: expected a transform, got none");
  }
  CHORUS_ASSIGN_OR_RETURN(HostTensors sample, dataset_->Get(index, MixBits(seed + kMixStep)));
  return transform_(std::move(sample), seed);
}

}  // namespace data
}  // namespace chorus
