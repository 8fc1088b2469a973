// Which samples a rank gets in an epoch, in which order, and how that goes on after a restart.
//
// Threads: At and SeedAt: any, while nothing changes the sampler. Ownership: plain values.
// Errors: returned. INVALID_ARGUMENT kBadType: options that make no sense, a state of another
//   dataset.
#ifndef CHORUS_CLIENT_DATA_SAMPLER_H_
#define CHORUS_CLIENT_DATA_SAMPLER_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace chorus {
namespace data {

// What a checkpoint keeps (nn::Progress is one).
using State = std::map<std::string, std::string>;

class Sampler {
 public:
  virtual ~Sampler() = default;

  // Begins an epoch, from 0, whatever is left of the last one.
  virtual void SetEpoch(int64_t epoch) = 0;
  virtual int64_t epoch() const = 0;
  // How many indices this rank gets in the epoch; after a Restore, in what was left of it.
  virtual int64_t size() const = 0;
  // The i-th of them.
  virtual int64_t At(int64_t i) const = 0;
  // What is random in a sample, in this epoch: its own for each, the same on every rank.
  virtual uint64_t SeedAt(int64_t i) const = 0;
  // Where it is when this rank, and every other one, has received `received` of them.
  virtual State StateAfter(int64_t received) const = 0;
  // Goes on from there. Of a map that has other words too these are left alone. What fails has
  // changed nothing.
  virtual absl::Status Restore(const State& state) = 0;
};

// A permutation of 0 .. size - 1, by seed and epoch: the same on every machine, and not the one
// that PyTorch makes of them.
std::vector<int64_t> EpochOrder(int64_t size, uint64_t seed, int64_t epoch);

// torch.utils.data.DistributedSampler: an order of all samples, by seed and epoch, of which rank r
// gets those at r, r + replicas, r + 2 replicas, ... Every rank gets as many: to the last round the
// first samples of the order are added again, or, with drop_last, it is left out.
//
// Restored by as many ranks it goes on exactly as if nothing had been. Restored by more or fewer,
// what of the order no rank has received is shared out among them in the same manner: so in an
// epoch each sample is received once, but for what the last round adds or leaves out. All ranks
// restore one state, which one of them saved when all had received as many.
class DistributedSampler : public Sampler {
 public:
  struct Options {
    int rank = 0;
    int replicas = 1;
    bool shuffle = true;  // false: in the order of their indices
    uint64_t seed = 0;
    bool drop_last = false;
  };
  // Of a dataset of `size` samples, in epoch 0.
  static absl::StatusOr<std::shared_ptr<DistributedSampler>> Create(int64_t size,
                                                                    const Options& options);

  void SetEpoch(int64_t epoch) override;
  int64_t epoch() const override { return epoch_; }
  int64_t size() const override { return count_; }
  int64_t At(int64_t i) const override;
  uint64_t SeedAt(int64_t i) const override;
  // "sampler.size", "sampler.shuffle", "sampler.seed", "sampler.epoch" and "sampler.received": of
  // the epoch, by all ranks together. The seed is the state's from then on.
  State StateAfter(int64_t received) const override;
  absl::Status Restore(const State& state) override;

 private:
  DistributedSampler(int64_t size, const Options& options) : size_(size), options_(options) {}
  void Begin(int64_t epoch, int64_t received);

  const int64_t size_;
  Options options_;
  int64_t epoch_ = 0;
  int64_t received_ = 0;        // of the order, by all ranks, before this one's first index
  int64_t count_ = 0;           // of this rank's indices
  std::vector<int64_t> order_;  // of the epoch; empty: as the indices are
};

}  // namespace data
}  // namespace chorus

#endif  // CHORUS_CLIENT_DATA_SAMPLER_H_
