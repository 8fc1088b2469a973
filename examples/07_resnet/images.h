// Fashion-MNIST as batches of tensors, for lessons 7 to 9: the one place where they read data.
//
// Threads: one at a time. Ownership: an Images has its images; tensors are handles.
// Errors: Read's are ReadDataset's; batches carry theirs.
#ifndef CHORUS_EXAMPLES_RESNET_IMAGES_H_
#define CHORUS_EXAMPLES_RESNET_IMAGES_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "chorus/chorus.h"
#include "examples/05_trainer/dataset.h"

namespace resnet {

class Images {
 public:
  // `name`: "train" or "t10k".
  static absl::StatusOr<Images> Read(const std::string& name,
                                     const std::string& directory = kDirectory);

  int64_t count() const { return data_.count; }
  // Batch `number`, from 0 and without end, of `size` images: images [size, 1, height, width] of
  // u8, and labels [size]. Each epoch has an order of its own and leaves out what is less than a
  // batch; ranks that take every n-th batch see different images. More than there are:
  // INVALID_ARGUMENT.
  std::vector<chorus::Tensor> Batch(const chorus::DeviceRef& device, int64_t number, int64_t size);

  static constexpr const char* kDirectory = "/usr/share/datasets/fashion-mnist";

 private:
  explicit Images(trainer::Dataset data) : data_(std::move(data)) {}

  trainer::Dataset data_;
  int64_t epoch_ = -1;  // of order_
  std::vector<int64_t> order_;
};

}  // namespace resnet

#endif  // CHORUS_EXAMPLES_RESNET_IMAGES_H_
