// Batches of a dataset, in a sampler's order, made by threads of their own before they are asked
// for.
//
//   CHORUS_ASSIGN_OR_RETURN(auto loader, DataLoader::Create(dataset, sampler, options));
//   for (int64_t epoch = loader->epoch(); epoch < epochs; ++epoch) {
//     while (true) {
//       CHORUS_ASSIGN_OR_RETURN(const Batch batch, loader->Next());
//       if (batch.empty()) break;
//       ... batch.tensors ...
//     }
//     loader->SetEpoch(epoch + 1);
//   }
//
// What is in a batch, and which batch comes next, depends on dataset, sampler and batch size alone,
// never on the threads.
//
// Threads: one at a time calls a loader; the dataset, its transforms and `collate` are called by
//   several at a time, none of which the loader outlives. The destructor, SetEpoch and Restore wait
//   for the calls that are under way, and for nothing else.
// Ownership: a loader shares its dataset and its sampler, which nobody else changes meanwhile.
// Errors: returned. What a dataset, a transform or `collate` refuses is the error of its batch,
//   which names batch, sample and index; that batch counts as received, and Next goes on with the
//   one behind it. So is an exception of theirs, CANCELLED kCancelled with its text.
//   DEADLINE_EXCEEDED kTransportTimeout: Options::timeout has passed; Next waits for the same batch
//   again.
#ifndef CHORUS_CLIENT_DATA_LOADER_H_
#define CHORUS_CLIENT_DATA_LOADER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "chorus/call_site.h"
#include "chorus/data/dataset.h"
#include "chorus/data/sampler.h"
#include "chorus/session.h"
#include "chorus/tensor.h"

namespace chorus {
namespace data {

// The tensors of samples, one behind the other along a new first axis; all samples have as many, of
// the same types.
absl::StatusOr<HostTensors> Stack(const std::vector<HostTensors>& samples);

struct Batch {
  int64_t number = 0;           // in the epoch, from 0; after a Restore, in what was left of it
  int64_t size = 0;             // how many samples it has; 0: the epoch has ended
  HostTensors host;             // where the loader has no device
  std::vector<Tensor> tensors;  // on the loader's device

  bool empty() const { return size == 0; }
};

class DataLoader {
 public:
  struct Options {
    int64_t batch_size = 1;
    bool drop_last = false;  // a batch that is not full, at the end
    // How many make batches; 0: Next does, when it is called.
    int threads = 1;
    // How many batches may be ready or in the making, besides what has been received.
    int prefetch = 2;
    // How long Next waits for them, at most.
    absl::Duration timeout = absl::Minutes(10);
    std::function<absl::StatusOr<HostTensors>(const std::vector<HostTensors>& samples)> collate =
        Stack;
    // To which a batch is uploaded, by the thread that makes it. Without a device batches stay on
    // the host, for instance for parallel::Scatter.
    absl::optional<DeviceRef> device;
  };
  static absl::StatusOr<std::unique_ptr<DataLoader>> Create(std::shared_ptr<const Dataset> dataset,
                                                            std::shared_ptr<Sampler> sampler,
                                                            const Options& options,
                                                            CallSite site = CallSite::Here());
  ~DataLoader();
  DataLoader(const DataLoader&) = delete;
  DataLoader& operator=(const DataLoader&) = delete;

  // The next batch; an empty one at the end of the epoch, as often as it is asked for.
  absl::StatusOr<Batch> Next();
  // How many batches there are in the epoch, or in what was left of it.
  int64_t batches() const { return batches_; }

  // Begins an epoch; batches that nobody has received are dropped.
  void SetEpoch(int64_t epoch);
  int64_t epoch() const { return sampler_->epoch(); }

  // The sampler's, behind the batches that have been received; what is prefetched does not count.
  State state() const;
  // Goes on with the batch behind them, or shares out what is left (DistributedSampler).
  absl::Status Restore(const State& state);

  // How long Next has waited for batches, all together, since the loader was made: what a step
  // would be faster by if data came at once.
  absl::Duration waited() const { return waited_; }

 private:
  DataLoader(std::shared_ptr<const Dataset> dataset, std::shared_ptr<Sampler> sampler,
             const Options& options, CallSite site);

  // One batch, whole.
  absl::StatusOr<Batch> Make(int64_t number) const;
  // Behind a change of the sampler.
  void Begin();

  const std::shared_ptr<const Dataset> dataset_;
  const std::shared_ptr<Sampler> sampler_;
  const Options options_;
  const CallSite site_;  // of uploads
  int64_t batches_ = 0;
  int64_t received_ = 0;  // batches
  absl::Duration waited_;
  class Workers;
  const std::unique_ptr<Workers> workers_;  // the first to go: they call the others
};

}  // namespace data
}  // namespace chorus

#endif  // CHORUS_CLIENT_DATA_LOADER_H_
