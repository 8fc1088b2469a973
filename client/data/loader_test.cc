#include "chorus/data/loader.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "chorus/chorus.h"
#include "client/testing/fake_daemon.h"
#include "client/testing/values.h"
#include "core/base/clock.h"
#include "core/base/error.h"
#include "core/base/mutex.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace chorus {
namespace data {
namespace {

using ::testing::ElementsAre;
using testing::FakeDaemon;
using ::testing::HasSubstr;
using testing::Values;

using Indices = std::vector<int64_t>;
using LoaderPtr = std::unique_ptr<DataLoader>;

constexpr int64_t kNone = -1;

// Sample i is [i, 10 i] and its seed; what happens when it is asked for is up to the test.
class Numbers : public Dataset {
 public:
  explicit Numbers(int64_t size) : size_(size) {}

  int64_t size() const override { return size_; }
  absl::StatusOr<HostTensors> Get(int64_t index, uint64_t seed) const override {
    {
      MutexLock lock(&mutex_);
      ++asked_;
      changed_.SignalAll();
      while (index == held_) changed_.Wait(&mutex_);
    }
    if (index == bad) return BadType("spoilt");
    if (index == thrown) throw std::runtime_error("bad file");
    if (index == thrown_number) throw 7;
    const int64_t width = index == wide ? 3 : 2;
    Indices values(static_cast<size_t>(width), 10 * index);
    values[0] = index;
    return HostTensors{HostTensor::Of<int64_t>(std::move(values), {width}),
                       HostTensor::Of<int64_t>({static_cast<int64_t>(seed >> 1)}, {})};
  }
  // Whoever asks for it waits until another one is held, or none.
  void Hold(int64_t index) {
    MutexLock lock(&mutex_);
    held_ = index;
    changed_.SignalAll();
  }
  int64_t asked() const {
    MutexLock lock(&mutex_);
    return asked_;
  }
  // Waits until samples have been asked for so many times.
  bool AwaitAsked(int64_t count) const {
    const absl::Time deadline = SteadyNow() + absl::Minutes(5);
    MutexLock lock(&mutex_);
    while (asked_ < count && SteadyNow() < deadline) {
      changed_.WaitFor(&mutex_, deadline - SteadyNow());
    }
    return asked_ >= count;
  }

  int64_t bad = kNone;   // has an error
  int64_t wide = kNone;  // has another shape
  int64_t thrown = kNone;
  int64_t thrown_number = kNone;  // that is no std::exception

 private:
  const int64_t size_;
  mutable Mutex mutex_;
  mutable CondVar changed_;
  mutable int64_t asked_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t held_ ABSL_GUARDED_BY(mutex_) = kNone;
};

std::shared_ptr<DistributedSampler> SamplerOf(int64_t size, bool shuffle = false, int rank = 0,
                                              int replicas = 1) {
  DistributedSampler::Options options;
  options.shuffle = shuffle;
  options.rank = rank;
  options.replicas = replicas;
  return *DistributedSampler::Create(size, options);
}

DataLoader::Options Batches(int64_t size, int threads, int prefetch = 2) {
  DataLoader::Options options;
  options.batch_size = size;
  options.threads = threads;
  options.prefetch = prefetch;
  return options;
}

Indices IndicesOf(const HostTensor& values) {
  const Indices all = *values.Read<int64_t>();
  Indices indices;
  for (size_t i = 0; i < all.size(); i += 2) {
    EXPECT_EQ(all[i + 1], 10 * all[i]);
    indices.push_back(all[i]);
  }
  return indices;
}

// What the batches that are left have.
std::vector<Indices> Rest(DataLoader* loader) {
  std::vector<Indices> batches;
  while (true) {
    const absl::StatusOr<Batch> batch = loader->Next();
    EXPECT_TRUE(batch.ok()) << batch.status();
    if (!batch.ok() || batch->empty()) return batches;
    EXPECT_EQ(batch->host[0].shape(), Shape({batch->size, 2}));
    batches.push_back(IndicesOf(batch->host[0]));
    EXPECT_EQ(static_cast<int64_t>(batches.back().size()), batch->size);
  }
}

// Of the sampler's indices, one after the other.
std::vector<Indices> Naive(const Sampler& sampler, int64_t size, bool drop_last) {
  std::vector<Indices> batches;
  for (int64_t i = 0; i < sampler.size(); ++i) {
    if (i % size == 0) batches.emplace_back();
    batches.back().push_back(sampler.At(i));
  }
  if (drop_last && !batches.empty() && static_cast<int64_t>(batches.back().size()) < size) {
    batches.pop_back();
  }
  return batches;
}

TEST(DataLoaderTest, BatchesAreTheSamplersWhateverTheThreads) {
  for (const int64_t size : {0, 1, 7, 24}) {
    const auto dataset = std::make_shared<Numbers>(size);
    for (const int64_t batch : {1, 3, 8, 30}) {
      for (const int threads : {0, 1, 3}) {
        for (const int prefetch : {1, 5, std::numeric_limits<int>::max()}) {
          for (const bool drop_last : {false, true}) {
            DataLoader::Options options = Batches(batch, threads, prefetch);
            options.drop_last = drop_last;
            const auto sampler = SamplerOf(size, true, 1, 2);
            const LoaderPtr loader = *DataLoader::Create(dataset, sampler, options);
            for (const int64_t epoch : {0, 1}) {
              if (epoch > 0) loader->SetEpoch(epoch);
              const std::vector<Indices> expected = Naive(*sampler, batch, drop_last);
              EXPECT_EQ(loader->batches(), static_cast<int64_t>(expected.size()));
              EXPECT_EQ(Rest(loader.get()), expected) << size << " by " << batch;
              EXPECT_TRUE(loader->Next()->empty());
            }
          }
        }
      }
    }
  }
}

TEST(DataLoaderTest, SamplesGetTheSamplersSeeds) {
  const auto sampler = SamplerOf(5, true);
  const LoaderPtr loader =
      *DataLoader::Create(std::make_shared<Numbers>(5), sampler, Batches(5, 2));
  const Indices seeds = *loader->Next()->host[1].Read<int64_t>();
  for (size_t i = 0; i < 5; ++i) {
    EXPECT_EQ(seeds[i], static_cast<int64_t>(sampler->SeedAt(static_cast<int64_t>(i)) >> 1));
  }
}

TEST(DataLoaderTest, ALaterBatchThatIsReadyFirstWaitsForItsTurn) {
  const auto dataset = std::make_shared<Numbers>(6);
  dataset->Hold(0);
  const LoaderPtr loader = *DataLoader::Create(dataset, SamplerOf(6), Batches(2, 2));
  // The second batch comes while the first one is held; then the first is let go.
  std::thread other([&] {
    EXPECT_TRUE(dataset->AwaitAsked(3));
    dataset->Hold(kNone);
  });
  EXPECT_THAT(Rest(loader.get()),
              ElementsAre(ElementsAre(0, 1), ElementsAre(2, 3), ElementsAre(4, 5)));
  other.join();
}

TEST(DataLoaderTest, SoManyBatchesArePrefetchedAndNoMore) {
  // Often, for one batch more would be begun only if nothing ends the threads before.
  for (int round = 0; round < 200; ++round) {
    const auto dataset = std::make_shared<Numbers>(100);
    {
      const LoaderPtr loader =
          *DataLoader::Create(dataset, SamplerOf(100), Batches(2, 1 + round % 4, 3));
      EXPECT_EQ(dataset->asked(), 0);
      ASSERT_TRUE(loader->Next().ok());
      // Without being asked for: three batches besides the one.
      EXPECT_TRUE(dataset->AwaitAsked(8));
      ASSERT_TRUE(loader->Next().ok());
      EXPECT_TRUE(dataset->AwaitAsked(10));
    }
    EXPECT_EQ(dataset->asked(), 10);
  }
}

TEST(DataLoaderTest, AnErrorIsItsBatchsAndNamesBatchAndIndex) {
  for (const int threads : {0, 1, 3}) {
    const auto dataset = std::make_shared<Numbers>(6);
    dataset->bad = 3;
    const LoaderPtr loader = *DataLoader::Create(dataset, SamplerOf(6), Batches(2, threads));
    EXPECT_THAT(IndicesOf(loader->Next()->host[0]), ElementsAre(0, 1));
    const absl::StatusOr<Batch> failed = loader->Next();
    EXPECT_EQ(ErrorOf(failed.status()).reason, Reason::kBadType);
    EXPECT_EQ(ErrorOf(failed.status()).message, "DataLoader: batch 1: index 3: spoilt");
    // It counts as received.
    EXPECT_EQ(loader->state().at("sampler.received"), "4");
    EXPECT_THAT(IndicesOf(loader->Next()->host[0]), ElementsAre(4, 5));
    EXPECT_TRUE(loader->Next()->empty());
  }
}

TEST(DataLoaderTest, AnExceptionIsAnErrorOfItsBatch) {
  for (const int threads : {2, 1, 0}) {
    const auto dataset = std::make_shared<Numbers>(10);
    dataset->thrown = 5;
    dataset->thrown_number = 6;
    DataLoader::Options options = Batches(2, threads);
    options.collate = [](const std::vector<HostTensors>& samples) -> absl::StatusOr<HostTensors> {
      if ((*samples[0][0].Read<int64_t>())[0] == 2) throw std::runtime_error("no pairs of two");
      return Stack(samples);
    };
    const LoaderPtr loader = *DataLoader::Create(dataset, SamplerOf(10), options);
    EXPECT_THAT(IndicesOf(loader->Next()->host[0]), ElementsAre(0, 1));
    for (const char* text : {"DataLoader: batch 1: it threw an exception: no pairs of two",
                             "DataLoader: batch 2: index 5: it threw an exception: bad file",
                             "DataLoader: batch 3: index 6: it threw an exception"}) {
      const absl::Status failed = loader->Next().status();
      EXPECT_EQ(ErrorOf(failed).reason, Reason::kCancelled) << failed;
      EXPECT_EQ(ErrorOf(failed).message, text);
    }
    EXPECT_THAT(IndicesOf(loader->Next()->host[0]), ElementsAre(8, 9));
    EXPECT_TRUE(loader->Next()->empty());
  }
}

TEST(DataLoaderTest, SamplesThatDoNotFitTogetherAreRefused) {
  const auto dataset = std::make_shared<Numbers>(4);
  dataset->wide = 3;
  const LoaderPtr loader = *DataLoader::Create(dataset, SamplerOf(4), Batches(4, 1));
  EXPECT_EQ(ErrorOf(loader->Next().status()).message,
            "DataLoader: batch 0: Stack: sample 3 of the batch: tensor 0: expected i64[2], as the "
            "first one has, got i64[3]");
  const HostTensor one = HostTensor::Of<float>({1}, {1});
  EXPECT_THAT(std::string(Stack({{one}, {one, one}}).status().message()),
              HasSubstr("sample 1 of the batch: expected 1 tensors, as the first one has, got 2"));
  EXPECT_THAT(std::string(Stack({{one}, {HostTensor::Of<double>({1}, {1})}}).status().message()),
              HasSubstr("expected f32[1], as the first one has, got f64[1]"));
  EXPECT_FALSE(Stack({}).ok());
  EXPECT_FALSE(Stack({{HostTensor()}}).ok());
  const absl::StatusOr<HostTensors> empty =
      Stack({{HostTensor::Of<float>({}, {0})}, {HostTensor::Of<float>({}, {0})}});
  ASSERT_TRUE(empty.ok()) << empty.status();
  EXPECT_EQ((*empty)[0].shape(), Shape({2, 0}));
}

TEST(DataLoaderTest, AnotherWayToCollate) {
  for (const int threads : {0, 2}) {
    DataLoader::Options options = Batches(2, threads);
    options.collate = [](const std::vector<HostTensors>& samples) -> absl::StatusOr<HostTensors> {
      if ((*samples[0][0].Read<int64_t>())[0] == 2) return BadType("no pairs from two on");
      if ((*samples[0][0].Read<int64_t>())[0] == 4) return HostTensors{HostTensor()};
      return HostTensors{HostTensor::Of<int64_t>({static_cast<int64_t>(samples.size())}, {})};
    };
    const LoaderPtr loader =
        *DataLoader::Create(std::make_shared<Numbers>(7), SamplerOf(7), options);
    EXPECT_THAT(*loader->Next()->host[0].Read<int64_t>(), ElementsAre(2));
    EXPECT_EQ(ErrorOf(loader->Next().status()).message,
              "DataLoader: batch 1: no pairs from two on");
    EXPECT_THAT(ErrorOf(loader->Next().status()).message, HasSubstr("batch 2: an undefined"));
    EXPECT_THAT(*loader->Next()->host[0].Read<int64_t>(), ElementsAre(1));
  }
}

TEST(DataLoaderTest, BatchesComeToTheDevice) {
  for (const int threads : {0, 2}) {
    FakeDaemon daemon;
    const Session session = daemon.Open(2);
    DataLoader::Options options = Batches(3, threads);
    options.device = session.device(1);
    const LoaderPtr loader =
        *DataLoader::Create(std::make_shared<Numbers>(5), SamplerOf(5), options);
    const Batch batch = *loader->Next();
    EXPECT_TRUE(batch.host.empty());
    EXPECT_EQ(batch.tensors[0].device().slot(), 1);
    EXPECT_EQ(batch.tensors[0].shape(), Shape({3, 2}));
    EXPECT_THAT(Values<int64_t>(batch.tensors[0]), ElementsAre(0, 0, 1, 10, 2, 20));
    EXPECT_THAT(Values<int64_t>(loader->Next()->tensors[0]), ElementsAre(3, 30, 4, 40));
    options.device = Session();
    const LoaderPtr nowhere =
        *DataLoader::Create(std::make_shared<Numbers>(5), SamplerOf(5), options);
    EXPECT_THAT(std::string(nowhere->Next().status().message()), HasSubstr("batch 0"));
  }
}

TEST(DataLoaderTest, ItsStateIsBehindWhatWasReceivedNotWhatWasPrefetched) {
  for (const int threads : {0, 2}) {
    for (const int64_t received : {0, 1, 3, 4}) {
      const auto dataset = std::make_shared<Numbers>(23);
      const auto sampler = SamplerOf(23, true, 0, 2);
      const LoaderPtr loader = *DataLoader::Create(dataset, sampler, Batches(3, threads, 3));
      loader->SetEpoch(6);
      std::vector<Indices> expected = Naive(*sampler, 3, false);
      for (int64_t i = 0; i < received; ++i) ASSERT_TRUE(loader->Next().ok());
      const State state = loader->state();
      EXPECT_EQ(state, sampler->StateAfter(std::min<int64_t>(3 * received, sampler->size())));

      const LoaderPtr restored =
          *DataLoader::Create(dataset, SamplerOf(23, true, 0, 2), Batches(3, threads, 1));
      ASSERT_TRUE(restored->Next().ok());  // of something else
      ASSERT_TRUE(restored->Restore(state).ok());
      EXPECT_EQ(restored->epoch(), 6);
      EXPECT_EQ(restored->batches(), loader->batches() - received);
      expected.erase(expected.begin(), expected.begin() + received);
      EXPECT_EQ(Rest(restored.get()), expected);
      EXPECT_EQ(Rest(loader.get()), expected);
    }
  }
}

TEST(DataLoaderTest, ARestoreThatFailsChangesNothing) {
  for (const int threads : {0, 2}) {
    const auto dataset = std::make_shared<Numbers>(6);
    const LoaderPtr loader = *DataLoader::Create(dataset, SamplerOf(6), Batches(2, threads));
    ASSERT_TRUE(loader->Next().ok());
    const int64_t made = threads == 0 ? 2 : 6;  // by then, or soon
    ASSERT_TRUE(dataset->AwaitAsked(made));
    EXPECT_FALSE(loader->Restore({{"step", "3"}}).ok());
    EXPECT_THAT(Rest(loader.get()), ElementsAre(ElementsAre(2, 3), ElementsAre(4, 5)));
    // What was prefetched is made again, and nothing else.
    EXPECT_EQ(dataset->asked(), made + 4);
  }
}

TEST(DataLoaderTest, ItEndsWhateverItsThreadsDo) {
  for (int i = 0; i < 100; ++i) {
    const LoaderPtr loader = *DataLoader::Create(std::make_shared<Numbers>(100), SamplerOf(100),
                                                 Batches(2, 3, 1 + i % 4));
    for (int n = 0; n < i % 3; ++n) ASSERT_TRUE(loader->Next().ok());
    if (i % 5 == 0) loader->SetEpoch(i);
    if (i % 10 == 0) {
      ASSERT_TRUE(loader->Next().ok());
    }
  }
}

TEST(DataLoaderTest, AWaitThatTakesTooLongEndsAndTheBatchIsStillToBeHad) {
  const auto dataset = std::make_shared<Numbers>(4);
  dataset->Hold(0);
  DataLoader::Options options = Batches(2, 1);
  options.timeout = absl::Milliseconds(1);
  const LoaderPtr loader = *DataLoader::Create(dataset, SamplerOf(4), options);
  const absl::Status late = loader->Next().status();
  EXPECT_EQ(ErrorOf(late).reason, Reason::kTransportTimeout);
  EXPECT_EQ(ErrorOf(late).message, "DataLoader: batch 0 was not made within 1ms");
  EXPECT_EQ(loader->state().at("sampler.received"), "0");
  dataset->Hold(kNone);
  for (const int64_t first : {0, 2}) {
    absl::StatusOr<Batch> batch = loader->Next();
    while (!batch.ok()) {
      ASSERT_EQ(ErrorOf(batch.status()).reason, Reason::kTransportTimeout);
      batch = loader->Next();
    }
    EXPECT_EQ(IndicesOf(batch->host[0])[0], first);
  }
}

TEST(DataLoaderTest, WhatNextWaitedIsCounted) {
  constexpr absl::Duration kEach = absl::Milliseconds(1);
  for (const int threads : {0, 1}) {
    DataLoader::Options options = Batches(1, threads, 1);
    options.collate = [kEach](const std::vector<HostTensors>& samples) {
      const absl::Time until = SteadyNow() + kEach;
      while (SteadyNow() < until) {
      }
      return Stack(samples);
    };
    const LoaderPtr loader =
        *DataLoader::Create(std::make_shared<Numbers>(8), SamplerOf(8), options);
    EXPECT_EQ(loader->waited(), absl::ZeroDuration());
    const absl::Time start = SteadyNow();
    const size_t batches = Rest(loader.get()).size();
    EXPECT_EQ(batches, 8u);
    EXPECT_LE(loader->waited(), SteadyNow() - start);
    // The first one at least was not ready.
    EXPECT_GE(loader->waited(), threads == 0 ? 8 * kEach : kEach);
  }
}

TEST(DataLoaderTest, OptionsThatMakeNoSenseAreRefused) {
  const auto refused = [](const DataLoader::Options& options) {
    const absl::Status status =
        DataLoader::Create(std::make_shared<Numbers>(4), SamplerOf(4), options).status();
    EXPECT_EQ(ErrorOf(status).reason, Reason::kBadType) << status;
    return std::string(status.message());
  };
  EXPECT_THAT(refused(Batches(0, 1)), HasSubstr("got 0, 1 and 2"));
  EXPECT_THAT(refused(Batches(1, -1)), HasSubstr("got 1, -1 and 2"));
  EXPECT_THAT(refused(Batches(1, 1, 0)), HasSubstr("got 1, 1 and 0"));
  DataLoader::Options none = Batches(1, 1);
  none.collate = nullptr;
  refused(none);
  EXPECT_FALSE(DataLoader::Create(nullptr, SamplerOf(4), Batches(1, 1)).ok());
  EXPECT_FALSE(DataLoader::Create(std::make_shared<Numbers>(4), nullptr, Batches(1, 1)).ok());
}

}  // namespace
}  // namespace data
}  // namespace chorus
