#include "examples/07_resnet/images.h"

#include "absl/strings/str_cat.h"
#include "chorus/data/sampler.h"
#include "core/base/error.h"

namespace resnet {
namespace {

constexpr uint64_t kSeed = 1;
constexpr int64_t kSide = 28;

}  // namespace

absl::StatusOr<Images> Images::Read(const std::string& name, const std::string& directory) {
  CHORUS_ASSIGN_OR_RETURN(trainer::Dataset data, trainer::ReadDataset(directory, name));
  if (data.pixels != kSide * kSide) {
    return absl::InvalidArgumentError(absl::StrCat(directory, "/", name, ": expected images of ",
                                                   kSide * kSide, " pixels, got ", data.pixels));
  }
  return Images(std::move(data));
}

std::vector<chorus::Tensor> Images::Batch(const chorus::DeviceRef& device, int64_t number,
                                          int64_t size) {
  const int64_t batches = size > 0 ? data_.count / size : 0;
  if (batches == 0) {
    const absl::Status error = chorus::BadType(
        absl::StrCat("expected batches of 1 to ", data_.count, " images, got ", size));
    return {chorus::FromError(device, error), chorus::FromError(device, error)};
  }
  if (epoch_ != number / batches) {
    epoch_ = number / batches;
    order_ = chorus::data::EpochOrder(data_.count, kSeed, epoch_);
  }
  const trainer::Batch batch = trainer::TakeBatch(data_, order_, number % batches * size, size);
  return {chorus::FromHost(device, batch.images, {size, 1, kSide, kSide}),
          chorus::FromHost(device, batch.labels, {size})};
}

}  // namespace resnet
