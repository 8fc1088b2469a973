#include "chorus/nn/shards.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <iostream>
#include <iterator>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "chorus/chorus.h"
#include "chorus/nn/batch_norm.h"
#include "chorus/nn/checkpoint.h"
#include "chorus/nn/distributed_data_parallel.h"
#include "chorus/nn/layers.h"
#include "chorus/nn/optim.h"
#include "client/testing/fake_daemon.h"
#include "client/testing/ranks.h"
#include "client/testing/values.h"
#include "core/base/error.h"
#include "core/base/file.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace chorus {
namespace nn {
namespace {

using chorus::testing::FakeDaemon;
using chorus::testing::JoinAll;
using chorus::testing::Numbers;
using chorus::testing::OnRanks;
using chorus::testing::Ranks;
using chorus::testing::Values;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class ShardsTest : public ::testing::Test {
 protected:
  ShardsTest() {
    folder_ = ::testing::TempDir() + "/shards.XXXXXX";
    EXPECT_NE(mkdtemp(&folder_[0]), nullptr);
    name_ = folder_ + "/step-30";
  }
  ~ShardsTest() override { (void)std::system(("rm -rf " + folder_).c_str()); }

  static std::string ReadAll(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  static void WriteAll(const std::string& path, const std::string& bytes) {
    std::ofstream file(path, std::ios::binary | std::ios::trunc);
    file << bytes;
  }
  // f64[rows, 2] whose element i is first + i.
  Tensor Rows(int64_t rows, double first) const {
    std::vector<double> values;
    for (int64_t i = 0; i < 2 * rows; ++i) values.push_back(first + static_cast<double>(i));
    return FromHost(session_, values, {rows, 2});
  }
  Tensor Of(std::vector<float> values) const {
    const auto count = static_cast<int64_t>(values.size());
    return FromHost<float>(session_, values, {count});
  }
  std::string OpenError(Reason reason = Reason::kMalformed) const {
    const absl::Status status = TensorFiles::Open(ShardIndexPath(name_)).status();
    EXPECT_EQ(ErrorOf(status).reason, reason) << status;
    return std::string(status.message());
  }
  // That it finishes with this error, and no index.
  std::string FinishError(int shards, Reason reason = Reason::kMalformed) const {
    const absl::Status status = FinishShards(name_, shards);
    EXPECT_EQ(ErrorOf(status).reason, reason) << status;
    EXPECT_NE(access(ShardIndexPath(name_).c_str(), F_OK), 0);
    return std::string(status.message());
  }

  std::string folder_;
  std::string name_;
  FakeDaemon daemon_;
  const Session session_ = daemon_.Open();
};

// A rank's part [first, second) of so many rows.
std::pair<int64_t, int64_t> PartOf(int64_t rows, int rank, int ranks) {
  return {rows * rank / ranks, rows * (rank + 1) / ranks};
}

TEST_F(ShardsTest, WhatAnyNumberOfRanksHasWrittenAnyOtherReads) {
  int saving = 0;
  for (const int64_t rows : {1, 2, 13}) {
    for (const int saved : {1, 2, 3, 5}) {
      const std::string name = absl::StrCat(folder_, "/", saving++);
      const Tensor whole = Rows(rows, 100);
      const std::vector<double> all = Values<double>(whole);
      for (int r = 0; r < saved; ++r) {
        const auto part = PartOf(rows, r, saved);
        std::vector<TensorPiece> pieces;
        pieces.push_back({"optimizer.w.0",
                          Rows(part.second - part.first, 100 + 2 * static_cast<double>(part.first)),
                          part.first, rows});
        pieces.push_back({absl::StrCat("own.", r), Of({static_cast<float>(r)})});
        if (r == saved - 1) pieces.push_back({"scalar", Scalar<float>(session_, 7)});
        ASSERT_TRUE(SaveShard(name, r, saved, pieces, {{"step", "30"}}).ok());
      }
      const absl::Status finished = FinishShards(name, saved);
      ASSERT_TRUE(finished.ok()) << finished;
      const absl::StatusOr<TensorFiles> files = TensorFiles::Open(ShardIndexPath(name));
      ASSERT_TRUE(files.ok()) << files.status();
      EXPECT_EQ(files->entries().size(), static_cast<size_t>(saved) + 2);
      EXPECT_EQ(files->Find("optimizer.w.0")->shape, Shape({rows, 2}));
      EXPECT_EQ(files->metadata().at("step"), "30");
      EXPECT_EQ(Values<double>(*files->Read("optimizer.w.0", session_)), all);
      EXPECT_THAT(Values<float>(*files->Read("scalar", session_)), ElementsAre(7));
      EXPECT_THAT(Values<float>(*files->Read(absl::StrCat("own.", saved - 1), session_)),
                  ElementsAre(static_cast<float>(saved - 1)));
      for (int64_t begin = 0; begin <= rows; ++begin) {
        for (int64_t end = begin; end <= rows; ++end) {
          const auto read = files->ReadRows("optimizer.w.0", begin, end, session_);
          ASSERT_TRUE(read.ok()) << read.status();
          EXPECT_EQ(read->shape(), Shape({end - begin, 2}));
          EXPECT_EQ(Values<double>(*read),
                    std::vector<double>(all.begin() + 2 * begin, all.begin() + 2 * end));
        }
      }
      EXPECT_EQ(ErrorOf(files->Read("none", session_).status()).reason, Reason::kUnknownName);
      EXPECT_THAT(
          std::string(files->ReadRows("optimizer.w.0", 0, rows + 1, session_).status().message()),
          HasSubstr("has no rows 0 to"));
      EXPECT_FALSE(files->ReadRows("optimizer.w.0", -1, 1, session_).ok());
      EXPECT_FALSE(files->ReadRows("scalar", 0, 1, session_).ok());
      EXPECT_FALSE(files->ReadRows("none", 0, 1, session_).ok());
    }
  }
}

TEST_F(ShardsTest, TheIndexIsTheDocumentedOne) {
  ASSERT_TRUE(
      SaveShard(name_, 0, 2, {{"a", Of({1, 2})}, {"b", Rows(1, 0), 0, 3}}, {{"step", "3"}}).ok());
  ASSERT_TRUE(SaveShard(name_, 1, 2, {{"b", Rows(2, 2), 1, 3}}, {{"step", "3"}}).ok());
  ASSERT_TRUE(FinishShards(name_, 2).ok());
  EXPECT_EQ(ReadAll(ShardIndexPath(name_)), R"({
  "metadata": {
    "progress": {
      "step": "3"
    },
    "total_size": 56
  },
  "weight_map": {
    "a": "step-30-00001-of-00002.safetensors",
    "b[0:1/3]": "step-30-00001-of-00002.safetensors",
    "b[1:3/3]": "step-30-00002-of-00002.safetensors"
  }
}
)");
  // A shard is a file of safetensors like any other.
  const absl::StatusOr<TensorFile> shard = TensorFile::Open(ShardPath(name_, 1, 2));
  ASSERT_TRUE(shard.ok()) << shard.status();
  EXPECT_THAT(Values<double>(*shard->Read("b[1:3/3]", session_)), ElementsAre(2, 3, 4, 5));
}

TEST_F(ShardsTest, TensorsWithoutRowsAndRanksWithoutPieces) {
  const Tensor none = FromHost<float>(session_, {}, {0, 4});
  for (int r = 0; r < 3; ++r) {
    std::vector<TensorPiece> pieces = {{"none", none, 0, 0}};
    pieces.push_back({"few", r == 1 ? Of({5}) : Of({}), r < 2 ? 0 : 1, 1});
    ASSERT_TRUE(SaveShard(name_, r, 3, pieces).ok());
  }
  const absl::Status finished = FinishShards(name_, 3);
  ASSERT_TRUE(finished.ok()) << finished;
  const absl::StatusOr<TensorFiles> files = TensorFiles::Open(ShardIndexPath(name_));
  ASSERT_TRUE(files.ok()) << files.status();
  EXPECT_EQ(files->Read("none", session_)->shape(), Shape({0, 4}));
  EXPECT_THAT(Values<float>(*files->Read("few", session_)), ElementsAre(5));
}

TEST_F(ShardsTest, OthersIndexesOpen) {
  ASSERT_TRUE(
      SaveTensors(folder_ + "/model-1.safetensors", {{"a", Of({1})}}, {{"format", "pt"}}).ok());
  ASSERT_TRUE(SaveTensors(folder_ + "/model-2.safetensors", {{"b", Of({2})}}).ok());
  WriteAll(ShardIndexPath(name_), R"({"metadata": {"total_size": 8}, "weight_map":
      {"a": "model-1.safetensors", "b": "model-2.safetensors"}})");
  const absl::StatusOr<TensorFiles> files = TensorFiles::Open(ShardIndexPath(name_));
  ASSERT_TRUE(files.ok()) << files.status();
  EXPECT_THAT(Values<float>(*files->Read("b", session_)), ElementsAre(2));
  EXPECT_TRUE(files->metadata().empty());
}

TEST_F(ShardsTest, WhatIsNotFinishedIsNotThereAndANameIsUsedOnce) {
  ASSERT_TRUE(SaveShard(name_, 0, 1, {{"a", Of({1})}}).ok());
  OpenError(Reason::kUnknownName);
  // Once more, after an interruption.
  ASSERT_TRUE(SaveShard(name_, 0, 1, {{"a", Of({2})}}).ok());
  ASSERT_TRUE(FinishShards(name_, 1).ok());
  for (const absl::Status& again :
       {SaveShard(name_, 0, 1, {{"a", Of({3})}}), FinishShards(name_, 1)}) {
    EXPECT_EQ(ErrorOf(again).reason, Reason::kWrongState) << again;
    EXPECT_THAT(std::string(again.message()), HasSubstr("a name is used once"));
  }
  EXPECT_THAT(Values<float>(*TensorFiles::Open(ShardIndexPath(name_))->Read("a", session_)),
              ElementsAre(2));
}

TEST_F(ShardsTest, PiecesThatMakeNoTensorAreRefusedBeforeTheIndex) {
  const auto finish = [&](const std::vector<std::vector<TensorPiece>>& pieces) {
    const int shards = static_cast<int>(pieces.size());
    for (int r = 0; r < shards; ++r) {
      const absl::Status saved = SaveShard(name_, r, shards, pieces[static_cast<size_t>(r)]);
      EXPECT_TRUE(saved.ok()) << saved;
    }
    return FinishError(shards);
  };
  EXPECT_THAT(finish({{{"w", Rows(1, 0), 0, 4}}, {{"w", Rows(2, 0), 2, 4}}}),
              HasSubstr("\"w\": rows 1 to 1 are missing"));
  EXPECT_THAT(finish({{{"w", Rows(1, 0), 0, 4}}, {{"w", Rows(2, 0), 1, 4}}}),
              HasSubstr("\"w\": rows 3 to 3 are missing"));
  EXPECT_THAT(finish({{{"w", Rows(1, 0), 1, 4}}, {{"w", Rows(2, 0), 2, 4}}}),
              HasSubstr("\"w\": rows 0 to 0 are missing"));
  EXPECT_THAT(finish({{{"w", Rows(3, 0), 0, 4}}, {{"w", Rows(2, 0), 2, 4}}}),
              HasSubstr("\"w\": row 2 is there twice"));
  EXPECT_THAT(finish({{{"w", Rows(2, 0), 0, 4}}, {{"w", Rows(3, 0), 2, 5}}}),
              HasSubstr("pieces that are of no one tensor: w[0:2/4] is f64[2,2], w[2:5/5]"));
  EXPECT_THAT(
      finish({{{"w", Rows(2, 0), 0, 4}}, {{"w", Of({1, 2}), 2, 4}}}),
      HasSubstr("pieces that are of no one tensor: w[0:2/4] is f64[2,2], w[2:4/4] is f32[2]"));
  EXPECT_THAT(finish({{{"w", Rows(2, 0)}}, {{"w", Rows(1, 0), 0, 4}}}),
              HasSubstr("pieces that are of no one tensor"));
  EXPECT_THAT(finish({{{"w", Of({1})}}, {{"w", Of({1})}}}), HasSubstr("\"w\" is in step-30-00001"));
  // Of another saving.
  ASSERT_TRUE(SaveShard(name_, 0, 2, {{"a", Of({1})}}, {{"step", "1"}}).ok());
  ASSERT_TRUE(SaveShard(name_, 1, 2, {{"b", Of({1})}}, {{"step", "2"}}).ok());
  EXPECT_THAT(FinishError(2), HasSubstr("step-30-00002-of-00002.safetensors: it was saved with"));
  ASSERT_TRUE(SaveShard(name_, 1, 2, {}, {{"step", "2"}}).ok());
  EXPECT_THAT(FinishError(2), HasSubstr("other metadata than the first shard"));
  EXPECT_THAT(FinishError(3, Reason::kUnknownName), HasSubstr("step-30-00001-of-00003"));
  EXPECT_THAT(FinishError(0, Reason::kBadType), HasSubstr("a shard or more, got 0"));
}

TEST_F(ShardsTest, PiecesThatCannotBeAreRefused) {
  const auto refused = [&](const TensorPiece& piece, int shard = 0) {
    const absl::Status status = SaveShard(name_, shard, 2, {piece});
    EXPECT_FALSE(status.ok());
    return std::string(status.message());
  };
  EXPECT_THAT(refused({"a[0:1/2]", Of({1})}), HasSubstr("it is a piece's"));
  EXPECT_THAT(refused({"a", Of({1, 2}), 3, 4}), HasSubstr("expected rows of 4 from 3 on"));
  EXPECT_THAT(refused({"a", Of({1}), -1, 4}), HasSubstr("expected rows of 4 from -1 on"));
  EXPECT_THAT(refused({"a", Scalar<float>(session_, 1), 0, 1}), HasSubstr("expected rows of 1"));
  EXPECT_THAT(refused({"a", Of({1})}, 2), HasSubstr("got shard 2 of 2"));
  EXPECT_THAT(refused({"a", FromError(session_, absl::InternalError("lost"))}), HasSubstr("lost"));
  // What only looks like a piece's name is one like any other.
  for (const char* name : {"a[0:1]", "a[01:1/2]", "a[1:1/2]", "a[0:3/2]", "[0:1/2", "a/b:c[0]"}) {
    EXPECT_TRUE(SaveShard(name_, 0, 1, {{name, Of({1})}}).ok()) << name;
  }
}

TEST_F(ShardsTest, IndexesThatDoNotFitAreRefused) {
  ASSERT_TRUE(
      SaveShard(name_, 0, 2, {{"a", Of({1, 2})}, {"b", Rows(1, 0), 0, 3}}, {{"step", "3"}}).ok());
  ASSERT_TRUE(SaveShard(name_, 1, 2, {{"b", Rows(2, 2), 1, 3}}, {{"step", "3"}}).ok());
  ASSERT_TRUE(FinishShards(name_, 2).ok());
  const std::string good = ReadAll(ShardIndexPath(name_));
  const auto error = [&](const std::string& from, const std::string& to,
                         Reason reason = Reason::kMalformed) {
    const std::string bad = absl::StrReplaceAll(good, {{from, to}});
    EXPECT_NE(bad, good);
    WriteAll(ShardIndexPath(name_), bad);
    return OpenError(reason);
  };
  EXPECT_THAT(error("weight_map", "map"), HasSubstr("it has no \"weight_map\""));
  EXPECT_THAT(error("{", "["), HasSubstr("no JSON object"));
  EXPECT_THAT(error("\"a\"", "\"b[0:1/3]\""), HasSubstr("is there twice"));
  EXPECT_THAT(error("\"step\": \"3\"", "\"step\": 3"), HasSubstr("its progress are no strings"));
  EXPECT_THAT(error("\"step\": \"3\"", "\"step\": \"4\""), HasSubstr("other metadata than"));
  EXPECT_THAT(error("\"step-30-00001", "\"../step-30-00001"),
              HasSubstr("\"a\": expected a file beside the index"));
  EXPECT_THAT(error("\"step-30-00001-of-00002.safetensors\"", "7"), HasSubstr("a file beside"));
  EXPECT_THAT(error("step-30-00001", "\\u0000step"), HasSubstr("expected a file beside"));
  error("step-30-00001", "step-31-00001", Reason::kUnknownName);
  EXPECT_THAT(error("\"a\"", "\"c\""), HasSubstr("\"a\" is not of this file"));
  EXPECT_THAT(error("\"a\"", "\"c\": \"step-30-00001-of-00002.safetensors\", \"a\""),
              HasSubstr("expected 3 tensors, as"));
  EXPECT_THAT(error("00002-of", "00001-of"), HasSubstr("expected 3 tensors"));
  // One for the other.
  WriteAll(ShardIndexPath(name_),
           absl::StrReplaceAll(good, {{"\"a\"", "\"b[1:3/3]\""}, {"\"b[1:3/3]\"", "\"a\""}}));
  EXPECT_THAT(OpenError(), HasSubstr("is not of this file"));
  EXPECT_THAT(error(",\n    \"b[1:3/3]\": \"step-30-00002-of-00002.safetensors\"", ""),
              HasSubstr("\"b\": rows 1 to 2 are missing"));
  // A shard that is cut, or of another saving.
  WriteAll(ShardIndexPath(name_), good);
  const std::string shard = ReadAll(ShardPath(name_, 1, 2));
  WriteAll(ShardPath(name_, 1, 2), shard.substr(0, shard.size() - 1));
  EXPECT_THAT(OpenError(), HasSubstr("step-30-00002-of-00002.safetensors"));
  ASSERT_TRUE(
      SaveTensors(ShardPath(name_, 1, 2), {{"b[1:3/3]", Rows(2, 2)}}, {{"step", "2"}}).ok());
  EXPECT_THAT(OpenError(), HasSubstr("other metadata than"));
  ASSERT_TRUE(
      SaveTensors(ShardPath(name_, 1, 2), {{"b[1:3/3]", Rows(1, 2)}}, {{"step", "3"}}).ok());
  EXPECT_THAT(OpenError(), HasSubstr("\"b[1:3/3]\": expected 2 rows, got f64[1,2]"));
}

TEST_F(ShardsTest, DamagedIndexesAndShardsAreRefusedOrReadable) {
  ASSERT_TRUE(
      SaveShard(name_, 0, 2, {{"a", Of({1, 2})}, {"b", Rows(1, 0), 0, 3}}, {{"step", "3"}}).ok());
  ASSERT_TRUE(SaveShard(name_, 1, 2, {{"b", Rows(2, 2), 1, 3}}, {{"step", "3"}}).ok());
  ASSERT_TRUE(FinishShards(name_, 2).ok());
  const uint32_t seed = 20261125;
  std::cout << "seed " << seed << std::endl;
  std::mt19937 random(seed);
  for (const std::string& path : {ShardIndexPath(name_), ShardPath(name_, 1, 2)}) {
    const std::string good = ReadAll(path);
    int opened = 0;
    for (int i = 0; i < 500; ++i) {
      std::string bytes = good;
      const int changes = 1 + static_cast<int>(random() % 3);
      for (int c = 0; c < changes; ++c) {
        bytes[random() % bytes.size()] = static_cast<char>(random());
      }
      if (random() % 4 == 0) bytes.resize(random() % (bytes.size() + 1));
      WriteAll(path, bytes);
      const absl::StatusOr<TensorFiles> files = TensorFiles::Open(ShardIndexPath(name_));
      if (!files.ok()) {
        const Reason reason = ErrorOf(files.status()).reason;
        // An index may come to name a file that is not there.
        EXPECT_TRUE(reason == Reason::kMalformed ||
                    (path == ShardIndexPath(name_) && reason == Reason::kUnknownName))
            << files.status();
        continue;
      }
      ++opened;
      for (const TensorFile::Entry& entry : files->entries()) {
        EXPECT_TRUE(files->Read(entry.name, session_).ok());
      }
    }
    EXPECT_GT(opened, 0);
    EXPECT_LT(opened, 500);
    WriteAll(path, good);
  }
}

// --- Checkpoints
// ----------------------------------------------------------------------------------

struct Model {
  explicit Model(const DeviceRef& device, uint64_t seed = 1)
      : model({Make<Linear>(3, 5), Make<Linear>(5, 2)}) {
    EXPECT_TRUE(model.Init(device, seed).ok());
    optimizer = std::make_unique<Adam>(model.parameters(), Adam::Options());
    std::vector<Tensor> gradients;
    for (const Variable& parameter : model.parameters()) {
      gradients.push_back(
          Cast(Numbers(device, parameter.shape(), static_cast<int>(seed)), DType::kF32));
    }
    EXPECT_TRUE(optimizer->Step(gradients).ok());
  }
  // Of all that a training goes on from.
  std::vector<std::vector<float>> All() {
    std::vector<std::vector<float>> all;
    for (const Variable& variable : model.variables()) all.push_back(Values<float>(variable()));
    const auto state = optimizer->State();
    EXPECT_TRUE(state.ok()) << state.status();
    for (const Optimizer::ParameterState& of_parameter : *state) {
      for (const Tensor& slot : of_parameter.slots) all.push_back(Values<float>(slot));
    }
    return all;
  }
  Sequential model;
  std::unique_ptr<Adam> optimizer;
};

// Each rank in a thread of its own.
template <typename F>
std::vector<absl::Status> OnEach(const Ranks& ranks, const F& call) {
  std::vector<absl::Status> statuses(static_cast<size_t>(ranks.size()));
  ranks.Run(
      [&](const World& world, int rank) { statuses[static_cast<size_t>(rank)] = call(world); });
  return statuses;
}

TEST_F(ShardsTest, ACheckpointOfSeveralRanksIsReadByAnyOne) {
  Ranks ranks(3, &daemon_);
  for (const absl::Status& saved : OnEach(ranks, [&](const World& world) {
         Model model(world);
         return SaveShardedCheckpoint(name_, world.group(), model.model, model.optimizer.get(),
                                      {{"step", "30"}});
       })) {
    EXPECT_TRUE(saved.ok()) << saved;
  }
  Model expected(session_);
  Model loaded(session_, /*seed=*/2);
  ASSERT_NE(loaded.All(), expected.All());
  const absl::StatusOr<Progress> progress =
      LoadCheckpoint(ShardIndexPath(name_), &loaded.model, loaded.optimizer.get());
  ASSERT_TRUE(progress.ok()) << progress.status();
  EXPECT_THAT(*progress, ElementsAre(std::make_pair("step", "30")));
  EXPECT_EQ(loaded.All(), expected.All());
  EXPECT_EQ(loaded.optimizer->steps(0), 1);
  // Every rank has written some.
  for (int r = 0; r < 3; ++r) {
    EXPECT_FALSE(TensorFile::Open(ShardPath(name_, r, 3))->entries().empty());
  }
  // The model alone; and another model's is refused, with nothing changed.
  Linear other(3, 5);
  ASSERT_TRUE(other.Init(session_, 1).ok());
  EXPECT_THAT(std::string(LoadCheckpoint(ShardIndexPath(name_), &other).status().message()),
              HasSubstr("\"weight\" is missing"));
  EXPECT_TRUE(LoadCheckpoint(ShardIndexPath(name_), &loaded.model).ok());
}

// Which rank writes what goes by the module, not by the order of an optimizer's parameters; and a
// parameter and its state are of one rank.
TEST_F(ShardsTest, RanksWhoseOptimizersListParametersInOtherOrdersWriteOneCheckpoint) {
  const auto make = [](Sequential* module, const DeviceRef& device,
                       const std::vector<size_t>& order) {
    EXPECT_TRUE(module->Init(device, 1, DType::kF64).ok());
    std::vector<Variable> parameters;
    for (const size_t i : order) parameters.push_back(module->parameters()[i]);
    Sgd::Options options;
    options.momentum = 0.9;
    auto sgd = std::make_shared<Sgd>(parameters, options);
    const Tensor y = (*module)(Numbers(device, {4, 3}, 1));
    EXPECT_TRUE(Backward(Sum(y * y)).ok());
    EXPECT_TRUE(sgd->Step().ok());
    return sgd;
  };
  const auto layers = [] { return Modules{Make<Linear>(3, 5), Make<Linear>(5, 2)}; };
  const std::vector<size_t> in_order = {0, 1, 2, 3};
  int saving = 0;
  for (const std::vector<size_t>& other :
       {std::vector<size_t>{0, 1, 3, 2}, std::vector<size_t>{3, 2, 1, 0}}) {
    const std::string name = name_ + std::to_string(++saving);
    OnRanks(2, [&](const World& world, int rank) {
      Sequential module(layers());
      const auto sgd = make(&module, world, rank == 0 ? in_order : other);
      const absl::Status saved = SaveShardedCheckpoint(name, world.group(), module, sgd.get());
      EXPECT_TRUE(saved.ok()) << saved;
    });
    Sequential module(layers());
    const auto sgd = make(&module, session_, in_order);
    const auto expected = *sgd->State();
    for (size_t i = 0; i < 4; ++i) sgd->SetState(i, {{}, 0});
    const auto loaded = LoadCheckpoint(ShardIndexPath(name), &module, sgd.get());
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    const auto got = *sgd->State();
    for (size_t i = 0; i < 4; ++i) {
      EXPECT_EQ(Values<double>(got[i].slots.at(0)), Values<double>(expected[i].slots.at(0))) << i;
    }
    for (int rank = 0; rank < 2; ++rank) {
      const absl::StatusOr<TensorFile> file = TensorFile::Open(ShardPath(name, rank, 2));
      ASSERT_TRUE(file.ok()) << file.status();
      EXPECT_FALSE(file->entries().empty());
      for (const TensorFile::Entry& entry : file->entries()) {
        if (entry.name.find("optimizer.") == 0) continue;
        EXPECT_NE(file->Find("optimizer." + entry.name + ".0"), nullptr) << entry.name;
      }
    }
  }
}

// Each rank's rows, and so the statistics of its last batch, are its own.
TEST_F(ShardsTest, ACheckpointHasTheFirstRanksBuffersAndNoOthers) {
  constexpr int kSaved = 3;
  constexpr int kSteps = 5;
  std::vector<std::vector<double>> results[2];
  for (const bool is_resumed : {false, true}) {
    const auto train = [&](const World& world, int rank) {
      const auto module =
          std::make_shared<Sequential>(Modules{Make<Linear>(3, 4), Make<BatchNorm>(4)});
      ASSERT_TRUE(module->Init(world, is_resumed ? 2 : 1, DType::kF64).ok());
      if (is_resumed) {
        const auto loaded = LoadCheckpoint(ShardIndexPath(name_), module.get());
        ASSERT_TRUE(loaded.ok()) << loaded.status();
      }
      const auto model = DistributedDataParallel::Create(module, world);
      ASSERT_TRUE(model.ok()) << model.status();
      Sgd sgd(module->parameters(), {0.001});
      for (int i = is_resumed ? kSaved : 0; i < kSteps; ++i) {
        if (i == kSaved && !is_resumed) {
          const absl::Status saved = SaveShardedCheckpoint(name_, world.group(), *module);
          ASSERT_TRUE(saved.ok()) << saved;
        }
        const Tensor y = (**model)(Numbers(world, {4, 3}, 10 * i + rank));
        ASSERT_TRUE(Backward(Sum(y * y * y)).ok());
        ASSERT_TRUE(sgd.Step().ok());
      }
      if (rank > 0) return;
      for (const Variable& variable : module->variables()) {
        results[is_resumed ? 1 : 0].push_back(Values<double>(Cast(variable(), DType::kF64)));
      }
    };
    OnRanks(2, train);
  }
  EXPECT_EQ(results[1], results[0]);
}

TEST_F(ShardsTest, AModelOnTwoDevicesAndOneWithoutVariablesAreSaved) {
  const Session two = daemon_.Open(2);
  const World world = JoinAll(two, "job", 1)[0];
  const auto first = std::make_shared<Linear>(2, 3);
  const auto second = std::make_shared<Linear>(3, 2);
  ASSERT_TRUE(first->Init(two, 1).ok());
  ASSERT_TRUE(second->Init(two.device(1), 2).ok());
  Sequential split({first, second});
  Sequential empty;
  const std::vector<float> weight = Values<float>(second->weight()());
  for (Module* const module : {&split, &empty}) {
    const std::string name = absl::StrCat(name_, ".", module->variables().size());
    const absl::Status saved =
        SaveShardedCheckpoint(name, world.group(), *module, nullptr, {{"step", "30"}});
    EXPECT_TRUE(saved.ok()) << saved;
    for (const Variable& variable : module->variables()) {
      variable.Set(Zeros(variable().device(), DType::kF32, variable.shape()));
    }
    const absl::StatusOr<Progress> loaded = LoadCheckpoint(ShardIndexPath(name), module);
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    EXPECT_THAT(*loaded, ElementsAre(std::make_pair("step", "30")));
  }
  EXPECT_EQ(Values<float>(second->weight()()), weight);
  EXPECT_EQ(second->weight()().device().slot(), 1);
}

TEST_F(ShardsTest, WhereOneRankCannotWriteAllAreToldAndThereIsNoCheckpoint) {
  ASSERT_EQ(mkdir(ShardPath(name_, 1, 2).c_str(), 0700), 0);
  Ranks ranks(2, &daemon_);
  const std::vector<absl::Status> saved = OnEach(ranks, [&](const World& world) {
    Model model(world);
    return SaveShardedCheckpoint(name_, world.group(), model.model);
  });
  EXPECT_EQ(ErrorOf(saved[0]).reason, Reason::kPeerRefused) << saved[0];
  EXPECT_THAT(std::string(saved[0].message()), HasSubstr("rank 1 could not write its part"));
  EXPECT_THAT(std::string(saved[1].message()), HasSubstr("cannot replace"));
  OpenError(Reason::kUnknownName);
}

// Also where it would not be the one that writes it: what has failed at once has no size, by which
// tensors are shared out.
TEST_F(ShardsTest, WhereOneRanksTensorHasFailedAllAreToldAndThereIsNoCheckpoint) {
  Ranks ranks(2, &daemon_);
  for (const bool of_optimizer : {false, true}) {
    const std::vector<absl::Status> saved = OnEach(ranks, [&](const World& world) {
      Model model(world);
      const Tensor failed = FromError(world, absl::InternalError("lost"));
      if (world.rank() == 1 && of_optimizer) {
        const Tensor other = (*model.optimizer->State())[0].slots[0];
        model.optimizer->SetState(0, {{other, failed}, 1});
      } else if (world.rank() == 1) {
        model.model.variables()[0].Set(failed);
      }
      return SaveShardedCheckpoint(name_, world.group(), model.model,
                                   of_optimizer ? model.optimizer.get() : nullptr);
    });
    EXPECT_EQ(ErrorOf(saved[0]).reason, Reason::kPeerRefused) << saved[0];
    EXPECT_THAT(std::string(saved[1].message()), HasSubstr("lost"));
    OpenError(Reason::kUnknownName);
  }
}

// Its files are named in the index, which has no such names.
TEST_F(ShardsTest, ANameThatIsNoUtf8IsRefusedOnEveryRank) {
  const std::string name = folder_ + "/step-\xff";
  Ranks ranks(2, &daemon_);
  for (const absl::Status& saved : OnEach(ranks, [&](const World& world) {
         Model model(world);
         return SaveShardedCheckpoint(name, world.group(), model.model);
       })) {
    EXPECT_EQ(ErrorOf(saved).reason, Reason::kBadType) << saved;
    EXPECT_THAT(std::string(saved.message()), HasSubstr(name));
  }
  // What others have written under it has no index either.
  ASSERT_TRUE(SaveTensors(ShardPath(name, 0, 1), {{"a", Of({1})}}).ok());
  const absl::Status finished = FinishShards(name, 1);
  EXPECT_EQ(ErrorOf(finished).reason, Reason::kBadType) << finished;
  EXPECT_THAT(std::string(finished.message()), HasSubstr(ShardIndexPath(name)));
  EXPECT_NE(access(ShardIndexPath(name).c_str(), F_OK), 0);
  // The folder is not in the index.
  const std::string folder = folder_ + "/\xff";
  ASSERT_EQ(mkdir(folder.c_str(), 0700), 0);
  ASSERT_TRUE(SaveShard(folder + "/a", 0, 1, {{"a", Of({1})}}).ok());
  EXPECT_TRUE(FinishShards(folder + "/a", 1).ok());
}

TEST_F(ShardsTest, WhereOneRankHasNoModelYetAllAreToldAndInLine) {
  Ranks ranks(2, &daemon_);
  for (const bool all : {false, true}) {
    const std::vector<absl::Status> saved = OnEach(ranks, [&](const World& world) {
      Linear model(3, 2);
      if (all || world.rank() == 0) {
        EXPECT_TRUE(model.Init(world, 1).ok());
      }
      return SaveShardedCheckpoint(name_, world.group(), model);
    });
    if (all) {
      EXPECT_TRUE(saved[0].ok() && saved[1].ok()) << saved[0] << saved[1];
    } else {
      EXPECT_EQ(ErrorOf(saved[0]).reason, Reason::kPeerRefused) << saved[0];
      EXPECT_EQ(ErrorOf(saved[1]).reason, Reason::kWrongState) << saved[1];
    }
  }
}

// ZeRO-1: each rank has a piece of each flat moment; three go on with what four have saved.
TEST_F(ShardsTest, AnOptimizersStateByRanksIsSharedOutAnew) {
  constexpr int64_t kElements = 10;
  const std::vector<double> moment = Numbers(kElements);
  for (int r = 0; r < 4; ++r) {
    const auto part = PartOf(kElements, r, 4);
    const std::vector<double> piece(moment.begin() + part.first, moment.begin() + part.second);
    ASSERT_TRUE(SaveShard(name_, r, 4,
                          {{"optimizer.w.0", FromHost(session_, piece, {part.second - part.first}),
                            part.first, kElements}},
                          {{"step", "30"}})
                    .ok());
  }
  ASSERT_TRUE(FinishShards(name_, 4).ok());
  std::vector<double> together;
  for (int r = 0; r < 3; ++r) {
    const auto part = PartOf(kElements, r, 3);
    const absl::StatusOr<TensorFiles> files = TensorFiles::Open(ShardIndexPath(name_));
    ASSERT_TRUE(files.ok()) << files.status();
    for (const double value :
         Values<double>(*files->ReadRows("optimizer.w.0", part.first, part.second, session_))) {
      together.push_back(value);
    }
  }
  EXPECT_EQ(together, moment);
}

}  // namespace
}  // namespace nn
}  // namespace chorus
