// Reading images, the order of an epoch, and what a training shows of itself.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <initializer_list>
#include <set>
#include <string>
#include <vector>

#include "core/base/clock.h"
#include "examples/05_trainer/dataset.h"
#include "examples/05_trainer/progress.h"
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

  for (size_t size = 0; size < images.size(); ++size) {
    Write("images-idx3", images.substr(0, size));
    EXPECT_NE(Error(), "") << size;
  }
  Write("images-idx3", labels);
  EXPECT_THAT(Error(), HasSubstr("expected an IDX file of bytes with 3 dimensions"));
  Write("images-idx3",
        Bytes({0, 0, 8, 3, 127, 255, 255, 255, 127, 255, 255, 255, 127, 255, 255, 255}));
  EXPECT_THAT(Error(), HasSubstr("more than"));
  Write("images-idx3", images);
  Write("labels-idx1", Bytes({0, 0, 8, 1, 0, 0, 0, 1, 9}));
  EXPECT_THAT(Error(), HasSubstr("2 images, but 1 labels"));
}

TEST(EpochOrderTest, EveryImageOnceInAnOrderThatIsTheSameEverywhere) {
  const std::vector<int32_t> order = EpochOrder(1000, 7, 2);
  EXPECT_EQ(std::set<int32_t>(order.begin(), order.end()).size(), 1000u);
  EXPECT_EQ(*std::max_element(order.begin(), order.end()), 999);
  EXPECT_EQ(order, EpochOrder(1000, 7, 2));
  EXPECT_NE(order, EpochOrder(1000, 7, 3));
  EXPECT_NE(order, EpochOrder(1000, 8, 2));
  EXPECT_THAT(EpochOrder(8, 1, 0), ElementsAre(4, 6, 3, 5, 1, 7, 2, 0));
}

TEST(ProgressTest, WhatIsNoTerminalGetsPlainLines) {
  EXPECT_EQ(ProgressBar(0, 10, 4), "....");
  EXPECT_EQ(ProgressBar(5, 10, 4), "##..");
  EXPECT_EQ(ProgressBar(10, 10, 4), "####");
  std::FILE* const file = std::tmpfile();
  ASSERT_NE(file, nullptr);
  {
    Progress progress(file, 3);
    const absl::Time now = chorus::SteadyNow();
    progress.Show(1, 0.5, now);
    progress.Show(2, 0.25, now);  // too soon
    progress.Say("epoch 1");
    progress.Show(3, 0.125, now);  // the last one
  }
  std::rewind(file);
  std::string text(1000, '\0');
  text.resize(std::fread(&text[0], 1, text.size(), file));
  std::fclose(file);
  EXPECT_THAT(text, ::testing::MatchesRegex("step 1/3 loss 0.5000 [0-9.]+ steps/s\nepoch 1\n"
                                            "step 3/3 loss 0.1250 [0-9.]+ steps/s\n"));
}

}  // namespace
}  // namespace trainer
