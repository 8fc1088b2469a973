// Images and their labels, from files in the format of MNIST (chorus/data/idx.h), such as Debian's
// package dataset-fashion-mnist.
//
// Threads: plain functions and values. Ownership: a Dataset has its images. Errors: the statuses
//   name the file and what was expected.
#ifndef CHORUS_EXAMPLES_TRAINER_DATASET_H_
#define CHORUS_EXAMPLES_TRAINER_DATASET_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace trainer {

struct Dataset {
  int64_t count = 0;
  int64_t pixels = 0;           // of one image
  std::vector<uint8_t> images;  // [count, pixels]
  std::vector<uint8_t> labels;  // [count]
};

// `name`: "train" or "t10k". INVALID_ARGUMENT kBadType: files of other types, or with other numbers
// of images and labels.
absl::StatusOr<Dataset> ReadDataset(const std::string& directory, const std::string& name);

// One rank's part of a step: the images order[begin], order[begin + 1], ...
struct Batch {
  int64_t size = 0;
  std::vector<uint8_t> images;  // [size, pixels]
  std::vector<uint8_t> labels;  // [size]
};
Batch TakeBatch(const Dataset& data, const std::vector<int64_t>& order, int64_t begin,
                int64_t size);

}  // namespace trainer

#endif  // CHORUS_EXAMPLES_TRAINER_DATASET_H_
