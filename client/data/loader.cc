#include "chorus/data/loader.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <map>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/data/host_elements.h"
#include "core/base/clock.h"
#include "core/base/error.h"
#include "core/base/mutex.h"

namespace chorus {
namespace data {
namespace {

// "batch 3: sample 17: " before the text.
absl::Status Under(const std::string& where, const absl::Status& status) {
  Error error = ErrorOf(status);
  error.message = absl::StrCat(where, ": ", error.message);
  return ToStatus(error);
}

// What `ask`, which is the trainer's, gives. An exception would end the process: the loader's
// threads have nobody to catch it.
template <typename Ask>
absl::StatusOr<HostTensors> Caught(Ask ask) {
  constexpr char kThrew[] = "it threw an exception";
  try {
    return ask();
  } catch (const std::exception& exception) {
    return MakeError(Reason::kCancelled, absl::StrCat(kThrew, ": ", exception.what()));
  } catch (...) {
    return MakeError(Reason::kCancelled, kThrew);
  }
}

std::string TypeText(const HostTensor& tensor) {
  return TensorType(tensor.dtype(), {tensor.shape().begin(), tensor.shape().end()}).ToString();
}

}  // namespace

absl::StatusOr<HostTensors> Stack(const std::vector<HostTensors>& samples) {
  if (samples.empty()) return BadType("Stack: expected a sample or more, got none");
  const HostTensors& first = samples[0];
  for (size_t s = 0; s < samples.size(); ++s) {
    if (samples[s].size() != first.size()) {
      return BadType(absl::StrCat("Stack: sample ", s, " of the batch: expected ", first.size(),
                                  " tensors, as the first one has, got ", samples[s].size()));
    }
    for (size_t t = 0; t < first.size(); ++t) {
      const HostTensor& tensor = samples[s][t];
      const absl::Status status = CheckInPlace(tensor);
      if (!status.ok()) return Under(absl::StrCat("Stack: sample ", s, " of the batch"), status);
      if (tensor.dtype() != first[t].dtype() || tensor.shape() != first[t].shape()) {
        return BadType(absl::StrCat("Stack: sample ", s, " of the batch: tensor ", t, ": expected ",
                                    TypeText(first[t]), ", as the first one has, got ",
                                    TypeText(tensor)));
      }
    }
  }
  HostTensors stacked;
  for (size_t t = 0; t < first.size(); ++t) {
    Shape shape = first[t].shape();
    const auto elements = static_cast<size_t>(ElementsOf(shape));
    const size_t bytes = elements * static_cast<size_t>(DTypeBytes(first[t].dtype()));
    std::shared_ptr<char[]> all(new char[bytes * samples.size()]);
    for (size_t s = 0; s < samples.size() && bytes > 0; ++s) {
      std::memcpy(all.get() + s * bytes, samples[s][t].bytes(), bytes);
    }
    shape.insert(shape.begin(), static_cast<int64_t>(samples.size()));
    const char* const data = all.get();
    stacked.push_back(HostTensor::OfBytes(std::move(all), first[t].dtype(), data,
                                          elements * samples.size(), shape));
    CHORUS_RETURN_IF_ERROR(stacked.back().status());
  }
  return stacked;
}

// The threads that make batches, and what they have made.
class DataLoader::Workers {
 public:
  using MakeBatch = std::function<absl::StatusOr<Batch>(int64_t number)>;
  Workers(MakeBatch make, int threads) : make_(std::move(make)), most_threads_(threads) {}
  ~Workers() { Stop(); }

  // Until batch `number` is ready, while those below `limit` are made, from `number` on where there
  // are no threads yet. False: it was not by then.
  bool Await(int64_t number, int64_t limit, absl::Time deadline) ABSL_LOCKS_EXCLUDED(mutex_);
  // One that is ready.
  absl::StatusOr<Batch> Take(int64_t number) ABSL_LOCKS_EXCLUDED(mutex_);
  // Ends the threads; what they have made is gone.
  void Stop() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  // A thread's life: batches, one by one, until there are none or it is to end.
  void Work() ABSL_LOCKS_EXCLUDED(mutex_);

  const MakeBatch make_;
  const int most_threads_;
  std::vector<std::thread> threads_;  // of the caller's thread alone

  Mutex mutex_;
  CondVar batch_ready_;  // a batch has come to ready_
  CondVar wanted_;       // there is room for a batch, or the end
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  int64_t next_ ABSL_GUARDED_BY(mutex_) = 0;   // the first batch that nobody makes yet
  int64_t limit_ ABSL_GUARDED_BY(mutex_) = 0;  // and the first for which there is no room
  std::map<int64_t, absl::StatusOr<Batch>> ready_ ABSL_GUARDED_BY(mutex_);
};

bool DataLoader::Workers::Await(int64_t number, int64_t limit, absl::Time deadline) {
  {
    MutexLock lock(&mutex_);
    if (threads_.empty()) next_ = number;
    limit_ = limit;
  }
  wanted_.SignalAll();
  while (static_cast<int>(threads_.size()) < most_threads_) {
    threads_.emplace_back([this] { Work(); });
  }
  MutexLock lock(&mutex_);
  while (ready_.count(number) == 0) {
    const absl::Duration left = deadline - SteadyNow();
    if (left <= absl::ZeroDuration()) return false;
    batch_ready_.WaitFor(&mutex_, left);
  }
  return true;
}

absl::StatusOr<Batch> DataLoader::Workers::Take(int64_t number) {
  MutexLock lock(&mutex_);
  const auto it = ready_.find(number);
  absl::StatusOr<Batch> batch = std::move(it->second);
  ready_.erase(it);
  return batch;
}

void DataLoader::Workers::Work() {
  while (true) {
    int64_t number = 0;
    {
      MutexLock lock(&mutex_);
      while (!stopping_ && next_ == limit_) wanted_.Wait(&mutex_);
      if (stopping_) return;
      number = next_++;
    }
    absl::StatusOr<Batch> batch = make_(number);
    MutexLock lock(&mutex_);
    ready_.emplace(number, std::move(batch));
    batch_ready_.Signal();
  }
}

void DataLoader::Workers::Stop() {
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
  }
  wanted_.SignalAll();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
  MutexLock lock(&mutex_);
  stopping_ = false;
  limit_ = next_;
  ready_.clear();
}

absl::StatusOr<std::unique_ptr<DataLoader>> DataLoader::Create(
    std::shared_ptr<const Dataset> dataset, std::shared_ptr<Sampler> sampler,
    const Options& options, CallSite site) {
  if (dataset == nullptr || sampler == nullptr || options.collate == nullptr) {
    return BadType("DataLoader: expected a dataset, a sampler and a way to collate, got none");
  }
  if (options.batch_size < 1 || options.threads < 0 || options.prefetch < 1) {
    return BadType(absl::StrCat(
        "DataLoader: expected a batch_size of 1 or more, threads of 0 or more and a prefetch of 1 "
        "or more, got ",
        options.batch_size, ", ", options.threads, " and ", options.prefetch));
  }
  return std::unique_ptr<DataLoader>(
      new DataLoader(std::move(dataset), std::move(sampler), options, site));
}

DataLoader::DataLoader(std::shared_ptr<const Dataset> dataset, std::shared_ptr<Sampler> sampler,
                       const Options& options, CallSite site)
    : dataset_(std::move(dataset)),
      sampler_(std::move(sampler)),
      options_(options),
      site_(site),
      // More than there may be batches under way would find nothing to do.
      workers_(std::make_unique<Workers>([this](int64_t number) { return Make(number); },
                                         std::min(options.threads - 1, options.prefetch) + 1)) {
  Begin();
}

DataLoader::~DataLoader() = default;

void DataLoader::Begin() {
  const int64_t samples = sampler_->size();
  const int64_t size = options_.batch_size;
  batches_ = samples / size + (!options_.drop_last && samples % size != 0 ? 1 : 0);
  received_ = 0;
}

void DataLoader::SetEpoch(int64_t epoch) {
  workers_->Stop();
  sampler_->SetEpoch(epoch);
  Begin();
}

State DataLoader::state() const {
  return sampler_->StateAfter(std::min(received_ * options_.batch_size, sampler_->size()));
}

absl::Status DataLoader::Restore(const State& state) {
  workers_->Stop();
  CHORUS_RETURN_IF_ERROR(sampler_->Restore(state));
  Begin();
  return absl::OkStatus();
}

absl::StatusOr<Batch> DataLoader::Make(int64_t number) const {
  const std::string where = absl::StrCat("DataLoader: batch ", number);
  const int64_t begin = number * options_.batch_size;
  const int64_t end = std::min(begin + options_.batch_size, sampler_->size());
  std::vector<HostTensors> samples;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t index = sampler_->At(i);
    absl::StatusOr<HostTensors> sample =
        Caught([&] { return dataset_->Get(index, sampler_->SeedAt(i)); });
    if (!sample.ok()) return Under(absl::StrCat(where, ": index ", index), sample.status());
    samples.push_back(*std::move(sample));
  }
  absl::StatusOr<HostTensors> host = Caught([&] { return options_.collate(samples); });
  if (!host.ok()) return Under(where, host.status());
  Batch batch;
  batch.number = number;
  batch.size = end - begin;
  for (const HostTensor& tensor : *host) {
    absl::Status status = CheckInPlace(tensor);
    if (status.ok() && options_.device.has_value()) {
      batch.tensors.push_back(FromBytes(*options_.device, tensor.dtype(), tensor.shape(),
                                        tensor.bytes(), ElementsOf(tensor.shape()), site_));
      status = batch.tensors.back().status();
    }
    if (!status.ok()) return Under(where, status);
  }
  if (!options_.device.has_value()) batch.host = *std::move(host);
  return batch;
}

absl::StatusOr<Batch> DataLoader::Next() {
  if (received_ == batches_) return Batch();
  const absl::Time begin = SteadyNow();
  if (options_.threads > 0) {
    const int64_t limit = std::min(received_ + 1 + options_.prefetch, batches_);
    const bool ready = workers_->Await(received_, limit, begin + options_.timeout);
    waited_ += SteadyNow() - begin;
    if (!ready) {
      return MakeError(Reason::kTransportTimeout,
                       absl::StrCat("DataLoader: batch ", received_, " was not made within ",
                                    absl::FormatDuration(options_.timeout)));
    }
    return workers_->Take(received_++);
  }
  absl::StatusOr<Batch> batch = Make(received_++);
  waited_ += SteadyNow() - begin;
  return batch;
}

}  // namespace data
}  // namespace chorus
