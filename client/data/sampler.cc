#include "chorus/data/sampler.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/base/mix_bits.h"

namespace chorus {
namespace data {
namespace {

constexpr char kSize[] = "sampler.size";
constexpr char kShuffle[] = "sampler.shuffle";
constexpr char kSeed[] = "sampler.seed";
constexpr char kEpoch[] = "sampler.epoch";
constexpr char kReceived[] = "sampler.received";

// Seeds of epochs are far from each other, whatever the seeds and the epochs.
uint64_t SeedOf(uint64_t seed, int64_t epoch) {
  return MixBits(MixBits(seed + kMixStep) + kMixStep * (static_cast<uint64_t>(epoch) + 1));
}

template <typename T>
absl::Status Take(const State& state, const char* name, T* out) {
  const auto it = state.find(name);
  if (it == state.end()) {
    return BadType(absl::StrCat("a sampler's state: \"", name, "\" is missing"));
  }
  if (!absl::SimpleAtoi(it->second, out)) {
    return BadType(absl::StrCat("a sampler's state: \"", name, "\": expected a number, got \"",
                                Printable(it->second), "\""));
  }
  return absl::OkStatus();
}

}  // namespace

std::vector<int64_t> EpochOrder(int64_t size, uint64_t seed, int64_t epoch) {
  std::vector<int64_t> order(static_cast<size_t>(size));
  std::iota(order.begin(), order.end(), int64_t{0});
  uint64_t state = SeedOf(seed, epoch);
  // Fisher and Yates. std::shuffle's choices are each library's own.
  for (size_t i = order.size(); i > 1; --i) {
    state += kMixStep;
    std::swap(order[i - 1], order[MixBits(state) % i]);
  }
  return order;
}

absl::StatusOr<std::shared_ptr<DistributedSampler>> DistributedSampler::Create(
    int64_t size, const Options& options) {
  if (size < 0) {
    return BadType(absl::StrCat("DistributedSampler: expected 0 samples or more, got ", size));
  }
  if (options.replicas < 1 || options.rank < 0 || options.rank >= options.replicas) {
    return BadType(
        absl::StrCat("DistributedSampler: expected a rank of 1 replica or more, got rank ",
                     options.rank, " of ", options.replicas));
  }
  std::shared_ptr<DistributedSampler> sampler(new DistributedSampler(size, options));
  sampler->SetEpoch(0);
  return sampler;
}

void DistributedSampler::SetEpoch(int64_t epoch) { Begin(epoch, 0); }

void DistributedSampler::Begin(int64_t epoch, int64_t received) {
  epoch_ = epoch;
  received_ = received;
  if (options_.shuffle) order_ = EpochOrder(size_, options_.seed, epoch);
  const int64_t left = std::max<int64_t>(0, size_ - received);
  const int64_t rounded = options_.drop_last ? left : left + options_.replicas - 1;
  count_ = rounded / options_.replicas;
}

int64_t DistributedSampler::At(int64_t i) const {
  // Behind its end the order begins again, more than once where there are more ranks than samples.
  const int64_t index = (received_ + i * options_.replicas + options_.rank) % size_;
  return options_.shuffle ? order_[static_cast<size_t>(index)] : index;
}

uint64_t DistributedSampler::SeedAt(int64_t i) const {
  return MixBits(SeedOf(options_.seed, epoch_) ^
                 MixBits(kMixStep * (static_cast<uint64_t>(At(i)) + 1)));
}

State DistributedSampler::StateAfter(int64_t received) const {
  return {{kSize, absl::StrCat(size_)},
          {kShuffle, absl::StrCat(options_.shuffle ? 1 : 0)},
          {kSeed, absl::StrCat(options_.seed)},
          {kEpoch, absl::StrCat(epoch_)},
          {kReceived, absl::StrCat(received_ + received * options_.replicas)}};
}

absl::Status DistributedSampler::Restore(const State& state) {
  int64_t size = 0, shuffle = 0, epoch = 0, received = 0;
  uint64_t seed = 0;
  CHORUS_RETURN_IF_ERROR(Take(state, kSize, &size));
  CHORUS_RETURN_IF_ERROR(Take(state, kShuffle, &shuffle));
  CHORUS_RETURN_IF_ERROR(Take(state, kSeed, &seed));
  CHORUS_RETURN_IF_ERROR(Take(state, kEpoch, &epoch));
  CHORUS_RETURN_IF_ERROR(Take(state, kReceived, &received));
  if (size != size_) {
    return BadType(absl::StrCat("a sampler's state of another dataset: expected ", size_,
                                " samples, got ", size));
  }
  if (shuffle != (options_.shuffle ? 1 : 0)) {
    return BadType(absl::StrCat("a sampler's state: expected shuffle ", options_.shuffle ? 1 : 0,
                                ", got ", shuffle));
  }
  // A last round that was filled up may have gone beyond the order.
  constexpr int64_t kMost = int64_t{1} << 62;  // what is added to either stays a number
  if (epoch < 0 || epoch > kMost || received < 0 || received > kMost) {
    return BadType(absl::StrCat("a sampler's state: no epoch ", epoch, " with ", received,
                                " samples received"));
  }
  options_.seed = seed;
  Begin(epoch, received);
  return absl::OkStatus();
}

}  // namespace data
}  // namespace chorus
