// Fashion-MNIST as batches without end, for lessons 7 to 9: the one place where they read data.
//
// Threads: one at a time. Ownership: an Images has its images; tensors are handles.
// Errors: those of chorus/data/idx.h and chorus/data/loader.h. INVALID_ARGUMENT kBadType: files of
//   other types, or with other numbers of images and labels; fewer images than a batch on each
//   rank.
#ifndef CHORUS_EXAMPLES_RESNET_IMAGES_H_
#define CHORUS_EXAMPLES_RESNET_IMAGES_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "chorus/chorus.h"
#include "chorus/data/loader.h"

namespace resnet {

class Images {
 public:
  // Of `name`, "train" or "t10k", those for one of `ranks`: batches of `size`, on its device.
  static absl::StatusOr<Images> Open(const std::string& name, const chorus::DeviceRef& device,
                                     int64_t size, int rank = 0, int ranks = 1,
                                     const std::string& directory = kDirectory);

  // The next images, [size, 1, height, width] of u8, and their labels, [size]. Each epoch has an
  // order of its own, and leaves out what is less than a batch on each rank.
  absl::StatusOr<std::vector<chorus::Tensor>> Next();

  static constexpr const char* kDirectory = "/usr/share/datasets/fashion-mnist";

 private:
  explicit Images(std::unique_ptr<chorus::data::DataLoader> loader) : loader_(std::move(loader)) {}

  std::unique_ptr<chorus::data::DataLoader> loader_;
};

}  // namespace resnet

#endif  // CHORUS_EXAMPLES_RESNET_IMAGES_H_
