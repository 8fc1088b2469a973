// Reading images and their labels.
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <initializer_list>
#include <string>
#include <vector>

#include "examples/05_trainer/dataset.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace trainer {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class DatasetTest : public ::testing::Test {
 protected:
  DatasetTest() {
    char directory[] = "/tmp/chorus_data_XXXXXX";
    directory_ = ::mkdtemp(directory);
  }
  ~DatasetTest() override {
    for (const char* part : {"images-idx3", "labels-idx1"}) {
      ::unlink((directory_ + "/train-" + part + "-ubyte.gz").c_str());
    }
    ::rmdir(directory_.c_str());
  }
  // gzip reads what is not compressed, too.
  void Write(const std::string& part, const std::string& bytes) {
    std::ofstream(directory_ + "/train-" + part + "-ubyte.gz", std::ios::binary) << bytes;
  }
  std::string Error() { return std::string(ReadDataset(directory_, "train").status().message()); }

  std::string directory_;
};

std::string Bytes(std::initializer_list<int> bytes) {
  std::string text;
  for (const int b : bytes) text.push_back(static_cast<char>(b));
  return text;
}

TEST_F(DatasetTest, FilesAreReadAndChecked) {
  const std::string images =
      Bytes({0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 3, 1, 2, 3, 4, 5, 255});
  const std::string labels = Bytes({0, 0, 8, 1, 0, 0, 0, 2, 9, 7});
  EXPECT_EQ(ReadDataset(directory_, "train").status().code(), absl::StatusCode::kNotFound);
  Write("images-idx3", images);
  Write("labels-idx1", labels);
  const absl::StatusOr<Dataset> data = ReadDataset(directory_, "train");
  ASSERT_TRUE(data.ok()) << data.status();
  EXPECT_EQ(data->count, 2);
  EXPECT_EQ(data->pixels, 3);
  EXPECT_THAT(data->images, ElementsAre(1, 2, 3, 4, 5, 255));
  EXPECT_THAT(data->labels, ElementsAre(9, 7));
  const Batch batch = TakeBatch(*data, {1, 0, 1}, 1, 2);
  EXPECT_THAT(batch.images, ElementsAre(1, 2, 3, 4, 5, 255));
  EXPECT_THAT(batch.labels, ElementsAre(9, 7));

  Write("images-idx3", images.substr(0, images.size() - 1));
  EXPECT_THAT(Error(), HasSubstr("expected 6 bytes"));
  Write("images-idx3", labels);
  EXPECT_THAT(Error(), HasSubstr("expected an IDX file of bytes with 3 dimensions"));
  Write("images-idx3", images);
  Write("labels-idx1", Bytes({0, 0, 8, 1, 0, 0, 0, 1, 9}));
  EXPECT_THAT(Error(), HasSubstr("2 images, but 1 labels"));
}

}  // namespace
}  // namespace trainer
