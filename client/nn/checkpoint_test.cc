#include "chorus/nn/checkpoint.h"

#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <iostream>
#include <iterator>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "chorus/chorus.h"
#include "chorus/functional/math.h"
#include "chorus/nn/batch_norm.h"
#include "chorus/nn/layers.h"
#include "chorus/nn/loss.h"
#include "chorus/nn/safetensors.h"
#include "chorus/nn/shards.h"
#include "chorus/nn/train_step.h"
#include "client/testing/fake_daemon.h"
#include "client/testing/values.h"
#include "core/base/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace chorus {
namespace nn {
namespace {

using chorus::testing::FakeDaemon;
using chorus::testing::Numbers;
using chorus::testing::Values;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

using Tensors = std::vector<Tensor>;

class CheckpointTest : public ::testing::Test {
 protected:
  CheckpointTest() {
    std::string name = ::testing::TempDir() + "/checkpoint.XXXXXX";
    EXPECT_NE(mkdtemp(&name[0]), nullptr);
    folder_ = name;
    path_ = folder_ + "/file.safetensors";
  }
  ~CheckpointTest() override { std::system(("rm -rf " + folder_).c_str()); }

  std::string ReadAll() const {
    std::ifstream file(path_, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  void WriteAll(const std::string& bytes) const {
    std::ofstream file(path_, std::ios::binary | std::ios::trunc);
    file << bytes;
  }
  // A file with this header, and so many bytes behind it.
  void WriteFile(const std::string& header, size_t data) const {
    std::string bytes;
    for (int i = 0; i < 8; ++i) bytes.push_back(static_cast<char>(header.size() >> (8 * i)));
    WriteAll(bytes + header + std::string(data, '\1'));
  }
  std::string OpenError() const {
    const absl::StatusOr<TensorFile> file = TensorFile::Open(path_);
    EXPECT_FALSE(file.ok());
    if (file.ok()) return "";
    EXPECT_EQ(ErrorOf(file.status()).reason, Reason::kMalformed) << file.status();
    return std::string(file.status().message());
  }

  std::string folder_;
  std::string path_;
  FakeDaemon daemon_;
  const Session session_ = daemon_.Open();
};

TEST_F(CheckpointTest, EveryTypeComesBackBitForBit) {
  const Tensor f32 = FromHost<float>(session_, {1.5f, -0.0f, 3e38f}, {3});
  const std::vector<NamedTensor> tensors = {
      {"f64", FromHost<double>(session_, {0.1, -2}, {2, 1})},
      {"f32", f32},
      {"f16", Cast(f32, DType::kF16)},
      {"bf16", Cast(f32, DType::kBF16)},
      {"i64", FromHost<int64_t>(session_, {int64_t{1} << 40}, {})},
      {"i32", FromHost<int32_t>(session_, {-1, 2}, {2})},
      {"i16", FromHost<int16_t>(session_, {-300}, {1})},
      {"i8", FromHost<int8_t>(session_, {-3, 4, 5}, {3})},
      {"u8", FromHost<uint8_t>(session_, {200}, {1})},
      {"bool", FromHost<bool>(session_, {true, false}, {2})},
      {"none", FromHost<float>(session_, {}, {0, 4})}};
  ASSERT_TRUE(SaveTensors(path_, tensors, {{"who", "me"}}).ok());
  const absl::StatusOr<TensorFile> file = TensorFile::Open(path_);
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->entries().size(), tensors.size());
  EXPECT_EQ(file->metadata().at("who"), "me");
  for (const NamedTensor& named : tensors) {
    const absl::StatusOr<Tensor> read = file->Read(named.name, session_);
    ASSERT_TRUE(read.ok()) << read.status();
    EXPECT_EQ(read->dtype(), named.tensor.dtype());
    EXPECT_EQ(read->shape(), named.tensor.shape());
  }
  EXPECT_EQ(Values<float>(*file->Read("f32", session_)), Values<float>(f32));
  EXPECT_THAT(Values<double>(*file->Read("f64", session_)), ElementsAre(0.1, -2));
  EXPECT_THAT(Values<int64_t>(*file->Read("i64", session_)), ElementsAre(int64_t{1} << 40));
  EXPECT_THAT(Values<int8_t>(*file->Read("i8", session_)), ElementsAre(-3, 4, 5));
  EXPECT_THAT(Values<bool>(*file->Read("bool", session_)), ElementsAre(true, false));
  EXPECT_EQ(Values<float>(Cast(*file->Read("f16", session_), DType::kF32))[0], 1.5f);
  EXPECT_EQ(ErrorOf(file->Read("other", session_).status()).reason, Reason::kUnknownName);
}

// As another writer lays it out.
TEST_F(CheckpointTest, OthersFilesOpen) {
  WriteFile(R"({"b":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},)"
            R"("a":{"dtype":"F32","shape":[],"data_offsets":[2,6]}}  )",
            6);
  const absl::StatusOr<TensorFile> file = TensorFile::Open(path_);
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_THAT(Values<uint8_t>(*file->Read("b", session_)), ElementsAre(1, 1));
  EXPECT_EQ(file->Find("a")->shape, Shape());
}

TEST_F(CheckpointTest, WhatDoesNotFitIsRefusedWithItsReason) {
  const auto entry = [](const std::string& shape, const std::string& offsets,
                        const std::string& dtype = "F32") {
    return "{\"a\":{\"dtype\":\"" + dtype + "\",\"shape\":" + shape +
           ",\"data_offsets\":" + offsets + "}}";
  };
  const struct {
    std::string header;
    size_t data;
    const char* text;
  } cases[] = {
      {"[]", 0, "no JSON object"},
      {"{\"a\":", 0, "no JSON object"},
      {entry("[1]", "[0,4]"), 3, "more bytes than the file"},
      {entry("[1]", "[0,4]"), 5, "1 bytes at the end are no tensor's"},
      {entry("[1]", "[4,8]"), 8, "there is a hole at byte 0"},
      {entry("[2]", "[0,4]"), 8, "4 bytes, expected 8 for F32[2]"},
      {entry("[-1]", "[0,4]"), 4, "expected sizes from 0"},
      {entry("[1.5]", "[0,4]"), 4, "expected sizes from 0"},
      {entry("[4611686018427387904,4]", "[0,4]"), 4, "more bytes than the file"},
      {entry("[4611686018427387904,4,0]", "[0,0]"), 0, "more bytes than there can be"},
      {entry("[9999999999999999999999]", "[0,4]"), 4, "expected sizes from 0"},
      {entry("[1]", "[4,0]"), 4, "not within"},
      {entry("[1]", "[0,4,8]"), 4, "two data_offsets"},
      {entry("[1]", "[0,4]", "F8_E4M3"), 4, "\"F8_E4M3\" is none that is known"},
      {"{\"a\":1}", 0, "expected dtype"},
      {"{\"__metadata__\":{\"a\":1}}", 0, "metadata are no strings"},
      {"{\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]},"
       "\"b\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[1,3]}}",
       3, "tensors overlap at byte 1"},
      {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},"
       "\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}",
       1, "\"a\" is there twice"},
      {"{\"a\":[[[[[[0]]]]]]}", 0, "nested too deeply"},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(c.header);
    WriteFile(c.header, c.data);
    EXPECT_THAT(OpenError(), HasSubstr(c.text));
  }
  WriteAll("");
  EXPECT_THAT(OpenError(), HasSubstr("shorter than a header's length"));
  WriteAll(std::string(8, '\xff') + "{}");
  EXPECT_THAT(OpenError(), HasSubstr("at most 2 were expected"));
  EXPECT_EQ(ErrorOf(TensorFile::Open(folder_ + "/none").status()).reason, Reason::kUnknownName);
  EXPECT_FALSE(TensorFile::Open(folder_).ok());
}

// Damaged anywhere: refused, or of tensors that are within the file.
TEST_F(CheckpointTest, DamagedFilesAreRefusedOrReadable) {
  ASSERT_TRUE(SaveTensors(path_,
                          {{"weight", FromHost<float>(session_, std::vector<float>(12), {3, 4})},
                           {"bias", FromHost<double>(session_, {1, 2}, {2})}},
                          {{"step", "3"}})
                  .ok());
  const std::string good = ReadAll();
  const uint32_t seed = 20261125;
  std::cout << "seed " << seed << std::endl;
  std::mt19937 random(seed);
  int opened = 0;
  for (int i = 0; i < 1500; ++i) {
    std::string bytes = good;
    const int changes = 1 + static_cast<int>(random() % 3);
    for (int c = 0; c < changes; ++c) bytes[random() % bytes.size()] = static_cast<char>(random());
    if (random() % 4 == 0) bytes.resize(random() % (bytes.size() + 1));
    WriteAll(bytes);
    const absl::StatusOr<TensorFile> file = TensorFile::Open(path_);
    if (!file.ok()) {
      EXPECT_EQ(ErrorOf(file.status()).reason, Reason::kMalformed) << file.status();
      continue;
    }
    ++opened;
    for (const TensorFile::Entry& entry : file->entries()) {
      EXPECT_TRUE(file->Read(entry.name, session_).ok());
    }
  }
  EXPECT_GT(opened, 0);
  EXPECT_LT(opened, 1500);
}

TEST_F(CheckpointTest, ASaveThatFailsLeavesTheOldFile) {
  const Tensor one = FromHost<float>(session_, {1}, {1});
  ASSERT_TRUE(SaveTensors(path_, {{"a", one}}).ok());
  const std::string before = ReadAll();
  EXPECT_FALSE(SaveTensors(path_, {{"a", one}, {"a", one}}).ok());
  EXPECT_FALSE(SaveTensors(path_, {{"__metadata__", one}}).ok());
  EXPECT_FALSE(SaveTensors(path_, {{"\xff", one}}).ok());
  const Tensor failed = FromError(session_, absl::InternalError("lost"));
  EXPECT_THAT(std::string(SaveTensors(path_, {{"a", failed}}).message()), HasSubstr("lost"));
  // No reader would take it.
  std::string too_long;
  too_long.resize(100000001, 'x');
  EXPECT_THAT(std::string(SaveTensors(path_, {{"a", one}}, {{"text", too_long}}).message()),
              HasSubstr("metadata of 100000000 bytes at most, got 10000"));
  EXPECT_EQ(ReadAll(), before);
  EXPECT_FALSE(SaveTensors(folder_ + "/no/such", {{"a", one}}).ok());
}

struct Training {
  explicit Training(const Session& session, LossScaler* scaler = nullptr)
      : model({Make<Linear>(4, 8), GeluLayer(), Make<Dropout>(0.25), Make<Linear>(8, 2)}) {
    EXPECT_TRUE(model.Init(session, 1).ok());
    optimizer = std::make_unique<Adam>(model.parameters(), Adam::Options());
    TrainStep::Options options;
    options.scaler = scaler;
    const auto loss = [this](const Tensors& in) { return MseLoss(model(in[0]), in[1]); };
    step = std::make_unique<TrainStep>(&model, optimizer.get(), loss, options);
  }
  void Run(const Session& session, int from, int to) {
    for (int i = from; i < to; ++i) {
      std::vector<float> x(8);
      for (size_t e = 0; e < 8; ++e) x[e] = static_cast<float>((i + static_cast<int>(e)) % 5);
      const auto loss =
          (*step)({FromHost(session, x, {2, 4}), FromHost<float>(session, {1, 2, 3, 4}, {2, 2})});
      ASSERT_TRUE(loss.ok()) << loss.status();
    }
  }
  Sequential model;
  std::unique_ptr<Adam> optimizer;
  std::unique_ptr<TrainStep> step;
};

TEST_F(CheckpointTest, AResumedTrainingIsTheOneThatWasNeverInterrupted) {
  Training whole(session_);
  whole.Run(session_, 0, 3);
  whole.optimizer->SetLearningRate(3e-4);
  whole.Run(session_, 3, 6);
  Training first(session_);
  first.Run(session_, 0, 3);
  first.optimizer->SetLearningRate(3e-4);
  ASSERT_TRUE(SaveCheckpoint(path_, first.model, first.optimizer.get(), {{"step", "3"}}).ok());
  Training second(session_);
  ASSERT_TRUE(second.model.Init(session_, 99).ok());
  const auto progress = LoadCheckpoint(path_, &second.model, second.optimizer.get());
  ASSERT_TRUE(progress.ok()) << progress.status();
  EXPECT_EQ(progress->size(), 1u);
  EXPECT_EQ(progress->at("step"), "3");
  EXPECT_EQ(second.optimizer->steps(0), 3);
  EXPECT_EQ(second.optimizer->learning_rate(), 3e-4);
  second.step->SetSteps(3);
  second.Run(session_, 3, 6);
  const std::vector<Variable> expected = whole.model.variables();
  const std::vector<Variable> got = second.model.variables();
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_EQ(Values<float>(got[i]()), Values<float>(expected[i]()));
  }
  // The model alone.
  Training third(session_);
  EXPECT_TRUE(LoadCheckpoint(path_, &third.model).ok());
}

// Hugging Face's loaders refuse a file with metadata that does not name its format.
TEST_F(CheckpointTest, AFileNamesItsFormatAndTheProgressIsWhatWasSaved) {
  Training training(session_);
  training.Run(session_, 0, 1);
  WorldOptions alone;
  alone.name = "alone";
  alone.rank = 0;
  alone.size = 1;
  const absl::StatusOr<World> world = session_.Join(alone);
  ASSERT_TRUE(world.ok()) << world.status();
  for (const Progress& progress :
       {Progress(), Progress{{"step", "1"}}, Progress{{"format", "a trainer's"}, {"step", "1"}}}) {
    const std::string format = progress.count("format") > 0 ? progress.at("format") : "pt";
    ASSERT_TRUE(SaveCheckpoint(path_, training.model, training.optimizer.get(), progress).ok());
    EXPECT_EQ(TensorFile::Open(path_)->metadata().at("format"), format);
    EXPECT_EQ(*LoadCheckpoint(path_, &training.model, training.optimizer.get()), progress);

    const std::string name = folder_ + "/sharded" + std::to_string(progress.size());
    ASSERT_TRUE(SaveShardedCheckpoint(name, world->group(), training.model,
                                      training.optimizer.get(), progress)
                    .ok());
    const absl::StatusOr<TensorFile> shard = TensorFile::Open(name + "-00001-of-00001.safetensors");
    ASSERT_TRUE(shard.ok()) << shard.status();
    EXPECT_EQ(shard->metadata().at("format"), format);
    EXPECT_EQ(*LoadCheckpoint(ShardIndexPath(name), &training.model, training.optimizer.get()),
              progress);
  }
  // What a load would take for the optimizer's.
  for (const std::string word :
       {"optimizer.steps.critic", "optimizer.skipped.critic", "optimizer.learning_rate"}) {
    EXPECT_THAT(
        std::string(SaveCheckpoint(path_, training.model, nullptr, {{word, "7"}}).message()),
        HasSubstr("\"" + word + "\" is an optimizer's, and no progress"));
  }
}

// Of a scale that is too large at first, and grows again soon.
TEST_F(CheckpointTest, AScalerGoesOnAsWell) {
  LossScaler::Options options;
  options.scale = 0x1p127;
  options.interval = 2;
  LossScaler of_whole(options), of_first(options), of_second(options);
  Training whole(session_, &of_whole);
  whole.Run(session_, 0, 12);
  Training first(session_, &of_first);
  first.Run(session_, 0, 7);
  Progress progress;
  ASSERT_TRUE(SaveScaler(session_, &of_first, &progress).ok());
  EXPECT_NE(progress.at("scaler.skipped"), "0");
  ASSERT_TRUE(SaveCheckpoint(path_, first.model, first.optimizer.get(), progress).ok());

  Training second(session_, &of_second);
  const auto loaded = LoadCheckpoint(path_, &second.model, second.optimizer.get());
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_EQ(*loaded, progress);
  EXPECT_EQ(std::to_string(second.optimizer->skipped(0)), progress.at("scaler.skipped"));
  ASSERT_TRUE(LoadScaler(*loaded, session_, &of_second).ok());
  second.step->SetSteps(7);
  second.Run(session_, 7, 12);
  const std::vector<Variable> expected = whole.model.variables();
  const std::vector<Variable> got = second.model.variables();
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_EQ(Values<float>(got[i]()), Values<float>(expected[i]()));
  }
  Progress of_both[2];
  ASSERT_TRUE(SaveScaler(session_, &of_whole, &of_both[0]).ok());
  ASSERT_TRUE(SaveScaler(session_, &of_second, &of_both[1]).ok());
  EXPECT_EQ(of_both[1], of_both[0]);
  EXPECT_EQ(Values<float>(of_second.StateOn(session_).scale),
            Values<float>(of_whole.StateOn(session_).scale));
  EXPECT_NE(of_both[0], progress);
}

TEST_F(CheckpointTest, AnOptimizersStepsThatCannotBeAreRefused) {
  Linear model(2, 2, /*bias=*/false);
  ASSERT_TRUE(model.Init(session_, 1).ok());
  Sgd sgd(model.parameters(), {});
  const auto load = [&](const Progress& metadata) {
    EXPECT_TRUE(SaveTensors(path_, {{"weight", model.weight()()}}, metadata).ok());
    return LoadCheckpoint(path_, &model, &sgd).status();
  };
  for (const Progress& bad : std::vector<Progress>{
           {},
           {{"optimizer.steps.weight", "-1"}},
           {{"optimizer.steps.weight", "9223372036854775807"}},
           {{"optimizer.steps.weight", "3"}, {"optimizer.skipped.weight", "4"}},
           {{"optimizer.steps.weight", "3"}, {"optimizer.skipped.weight", "x"}}}) {
    EXPECT_THAT(std::string(load(bad).message()), HasSubstr("the steps of \"weight\" are missing"));
  }
  const std::string rate = "optimizer.learning_rate";
  for (const std::string bad : {"fast", "nan", "inf"}) {
    EXPECT_THAT(std::string(load({{"optimizer.steps.weight", "3"}, {rate, bad}}).message()),
                HasSubstr("\"optimizer.learning_rate\": expected a number, got '" + bad + "'"));
  }
  // As a file has none that was written before there was one.
  ASSERT_TRUE(load({{"optimizer.steps.weight", "3"}, {"optimizer.skipped.weight", "3"}}).ok());
  EXPECT_EQ(sgd.learning_rate(), Sgd::Options().learning_rate);
  EXPECT_EQ(sgd.steps(0), 3);
  EXPECT_EQ(sgd.skipped(0), 3);
}

TEST_F(CheckpointTest, AScalersStateThatCannotBeIsRefused) {
  const Progress good = {
      {"scaler.scale", "65536"}, {"scaler.streak", "3"}, {"scaler.skipped", "1"}};
  LossScaler scaler;
  ASSERT_TRUE(LoadScaler(good, session_, &scaler).ok());
  for (const auto& [name, values] : std::map<std::string, std::vector<std::string>>{
           {"scaler.scale", {"", "x", "0", "-1", "inf", "nan", "1e99"}},
           {"scaler.streak", {"", "-1", "1.5", "9223372036854775807"}},
           {"scaler.skipped", {"", "-1", "99999999999999999999"}}}) {
    for (const std::string& value : values) {
      Progress bad = good;
      bad[name] = value;
      const absl::Status status = LoadScaler(bad, session_, &scaler);
      EXPECT_EQ(ErrorOf(status).reason, Reason::kBadType) << name << " " << value;
      EXPECT_THAT(std::string(status.message()), HasSubstr("\"" + name + "\": expected "));
      EXPECT_THAT(std::string(status.message()), HasSubstr("got '" + value + "'"));
    }
    Progress missing = good;
    missing.erase(name);
    EXPECT_THAT(std::string(LoadScaler(missing, session_, &scaler).message()),
                HasSubstr("got none"));
  }
  EXPECT_EQ(Values<float>(scaler.StateOn(session_).scale), std::vector<float>{65536});
}

// As after a step that could not be made: of what has failed at once nobody knows a type.
TEST_F(CheckpointTest, AModelWhoseTensorsHaveFailedIsWholeAgain) {
  const Session two = daemon_.Open(2);
  struct Case {
    DeviceRef device;
    bool all = false;
  };
  for (const Case& c : {Case{two.device(1), false}, Case{session_, true}}) {
    Sequential model({Make<Linear>(2, 3), Make<BatchNorm>(3)});
    ASSERT_TRUE(model.Init(c.device, 1, DType::kF64).ok());
    Adam adam(model.parameters(), Adam::Options());
    ASSERT_TRUE(SaveCheckpoint(path_, model, &adam).ok());
    Tensors expected;
    for (const Variable& variable : model.variables()) expected.push_back(variable());
    const auto fail = [&](const Variable& variable) {
      variable.Set(FromError(c.device, absl::InternalError("lost")));
    };
    for (const Variable& variable : model.variables()) {
      if (c.all || variable.shape().size() != 2) fail(variable);
    }
    const Tensor x = Numbers(c.device, {2, 2});
    ASSERT_FALSE(model(x).status().ok());
    const absl::StatusOr<Progress> loaded = LoadCheckpoint(path_, &model, &adam);
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    for (size_t i = 0; i < expected.size(); ++i) {
      const Tensor value = model.variables()[i]();
      EXPECT_TRUE(value.Wait().ok());
      EXPECT_EQ(value.dtype(), expected[i].dtype());
      EXPECT_EQ(value.shape(), expected[i].shape());
      EXPECT_EQ(value.device().slot(), c.device.slot());
    }
    EXPECT_TRUE(model(x).Wait().ok());
    // The shape is known all the same.
    const Variable weight = model.variables()[0];
    fail(weight);
    Sequential other({Make<Linear>(4, 3), Make<BatchNorm>(3)});
    ASSERT_TRUE(other.Init(c.device, 1, DType::kF64).ok());
    ASSERT_TRUE(SaveCheckpoint(path_, other).ok());
    const absl::Status refused = LoadCheckpoint(path_, &model).status();
    EXPECT_EQ(ErrorOf(refused).reason, Reason::kBadType) << refused;
    EXPECT_THAT(std::string(refused.message()),
                HasSubstr("\"0.weight\": expected f64[3,2], got f64[3,4]"));
    EXPECT_THAT(std::string(weight().status().message()), HasSubstr("lost"));
  }
}

TEST_F(CheckpointTest, WhereAModelWasThatHasFailedMustBeKnown) {
  const Session two = daemon_.Open(2);
  for (const DeviceRef& device : {DeviceRef(two), DeviceRef()}) {
    Linear model(2, 3);
    ASSERT_TRUE(model.Init(two, 1).ok());
    ASSERT_TRUE(SaveCheckpoint(path_, model).ok());
    for (const Variable& variable : model.variables()) {
      variable.Set(FromError(device, absl::InternalError("lost")));
    }
    const absl::Status status = LoadCheckpoint(path_, &model).status();
    EXPECT_EQ(ErrorOf(status).reason, Reason::kWrongState) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("weight has failed"));
    ASSERT_TRUE(model.Init(two.device(1), 2).ok());
    EXPECT_TRUE(LoadCheckpoint(path_, &model).ok());
    EXPECT_EQ(model.weight()().device().slot(), 1);
  }
}

TEST_F(CheckpointTest, WhereOneOfAModelOnTwoDevicesWasThatHasFailedMustBeKnown) {
  const Session two = daemon_.Open(2);
  const auto first = std::make_shared<Linear>(2, 3);
  const auto second = std::make_shared<Linear>(2, 3);
  ASSERT_TRUE(first->Init(two, 1).ok());
  ASSERT_TRUE(second->Init(two.device(1), 2).ok());
  Sequential model({first, second});
  ASSERT_TRUE(SaveCheckpoint(path_, model).ok());
  second->bias().Set(FromError(two, absl::InternalError("lost")));
  const absl::Status status = LoadCheckpoint(path_, &model).status();
  EXPECT_EQ(ErrorOf(status).reason, Reason::kWrongState) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("1.bias has failed"));
  EXPECT_FALSE(second->bias()().status().ok());
  // Of those that have not failed each says where it is.
  ASSERT_TRUE(second->Init(two.device(1), 3).ok());
  ASSERT_TRUE(LoadCheckpoint(path_, &model).ok());
  EXPECT_EQ(first->bias()().device().slot(), 0);
  EXPECT_EQ(second->bias()().device().slot(), 1);
}

// Whichever of its tensors that is, which the daemon says when it gets there.
TEST_F(CheckpointTest, ALoadForWhichThereIsNoMemoryChangesNothing) {
  Linear model(4, 17);  // more than travels with runs
  ASSERT_TRUE(model.Init(session_, 1).ok());
  Adam adam(model.parameters(), Adam::Options());
  const auto step = [&] { ASSERT_TRUE(adam.Step({model.weight()(), model.bias()() + 1}).ok()); };
  const auto all = [&] {
    std::vector<std::vector<float>> values;
    for (const Variable& variable : model.variables()) values.push_back(Values<float>(variable()));
    const auto state = adam.State();
    EXPECT_TRUE(state.ok()) << state.status();
    for (const Optimizer::ParameterState& of_parameter : *state) {
      for (const Tensor& slot : of_parameter.slots) values.push_back(Values<float>(slot));
    }
    return values;
  };
  step();
  ASSERT_TRUE(SaveCheckpoint(path_, model, &adam).ok());
  const std::vector<std::vector<float>> saved = all();
  step();
  const std::vector<std::vector<float>> before = all();
  ASSERT_NE(before, saved);
  for (int tensor = 0; tensor < 6; ++tensor) {
    daemon_.FailTensors(1, /*after=*/tensor);
    const absl::Status refused = LoadCheckpoint(path_, &model, &adam).status();
    EXPECT_EQ(ErrorOf(refused).reason, Reason::kOutOfMemory) << refused;
    ASSERT_EQ(all(), before) << tensor;
    EXPECT_EQ(adam.steps(0), 2);
  }
  const auto loaded = LoadCheckpoint(path_, &model, &adam);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_EQ(all(), saved);
  EXPECT_EQ(adam.steps(0), 1);
}

TEST_F(CheckpointTest, AnotherModelsFileIsRefusedAndChangesNothing) {
  Linear small(2, 2);
  ASSERT_TRUE(small.Init(session_, 1).ok());
  ASSERT_TRUE(SaveCheckpoint(path_, small).ok());
  const auto refused = [this](Module* module, Optimizer* optimizer = nullptr) {
    const absl::Status status = LoadCheckpoint(path_, module, optimizer).status();
    EXPECT_EQ(ErrorOf(status).reason, Reason::kBadType) << status;
    return std::string(status.message());
  };
  Linear wide(3, 2);
  ASSERT_TRUE(wide.Init(session_, 1).ok());
  const std::vector<float> before = Values<float>(wide.weight()());
  EXPECT_THAT(refused(&wide), HasSubstr("\"weight\": expected f32[2,3], got f32[2,2]"));
  EXPECT_EQ(Values<float>(wide.weight()()), before);
  Sequential nested({Make<Linear>(2, 2)});
  ASSERT_TRUE(nested.Init(session_, 1).ok());
  EXPECT_THAT(refused(&nested), HasSubstr("\"0.weight\" is missing"));
  Linear plain(2, 2, /*bias=*/false);
  ASSERT_TRUE(plain.Init(session_, 1).ok());
  EXPECT_THAT(refused(&plain), HasSubstr("\"bias\" is none of this model's"));
  Adam adam(small.parameters(), Adam::Options());
  EXPECT_THAT(refused(&small, &adam), HasSubstr("\"optimizer.weight.0\" is missing"));
  Linear early(2, 2);
  EXPECT_EQ(ErrorOf(LoadCheckpoint(path_, &early).status()).reason, Reason::kWrongState);
}

}  // namespace
}  // namespace nn
}  // namespace chorus
