#include "chorus/nn/checkpoint.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "chorus/collectives.h"
#include "chorus/nn/safetensors.h"
#include "chorus/nn/shards.h"
#include "client/internal/access.h"
#include "client/nn/refused.h"
#include "core/base/error.h"

namespace chorus {
namespace nn {
namespace {

constexpr char kOptimizer[] = "optimizer.";
// In the metadata.
constexpr char kSteps[] = "optimizer.steps.";
constexpr char kSkipped[] = "optimizer.skipped.";
constexpr char kRate[] = "optimizer.learning_rate";
// Hugging Face's loaders want it where there are metadata.
constexpr char kFormat[] = "format";
constexpr char kPyTorch[] = "pt";
constexpr char kScale[] = "scaler.scale";
constexpr char kStreak[] = "scaler.streak";
constexpr char kScalerSkipped[] = "scaler.skipped";

// Of an optimizer, and none of what the caller counts.
bool IsOfOptimizer(const std::string& word) {
  return absl::StartsWith(word, kSteps) || absl::StartsWith(word, kSkipped) || word == kRate;
}

absl::Status BadScaler(const Progress& progress, const std::string& name, const std::string& what) {
  const auto at = progress.find(name);
  return BadType(absl::StrCat("\"", name, "\": expected ", what, ", got ",
                              at == progress.end() ? "none" : absl::StrCat("'", at->second, "'")));
}

absl::StatusOr<int64_t> CountOf(const Progress& progress, const std::string& name) {
  const auto at = progress.find(name);
  int64_t count = 0;
  // What is added to it stays a count.
  const bool is_number = at != progress.end() && absl::SimpleAtoi(at->second, &count);
  if (is_number && count >= 0 && count <= int64_t{1} << 62) return count;
  return BadScaler(progress, name, "a count");
}

// Of the optimizer's parameters, by index.
absl::StatusOr<std::vector<std::string>> NamesOf(const Module& module, const Optimizer& optimizer) {
  const std::vector<NamedVariable> all = module.named_variables();
  std::vector<std::string> names;
  for (const Variable& parameter : optimizer.parameters()) {
    for (const NamedVariable& named : all) {
      if (named.variable == parameter) names.push_back(named.name);
    }
  }
  if (names.size() != optimizer.parameters().size()) {
    return BadType("the optimizer has parameters that are none of the module's");
  }
  return names;
}

std::string SlotName(const std::string& parameter, size_t slot) {
  return absl::StrCat(kOptimizer, parameter, ".", slot);
}

// What a tensor of a file must be, and where it goes.
struct Like {
  DType dtype = DType::kUnspecified;  // the file's
  Shape shape;
  DeviceRef device;
};

Like LikeOf(const Tensor& tensor) { return {tensor.dtype(), tensor.shape(), tensor.device()}; }
// What has failed at once has no dtype, and is on no device: it goes where all others are, or to
// the only one there is.
absl::StatusOr<Like> LikeOf(const NamedVariable& named, const std::vector<NamedVariable>& all) {
  const auto has_type = [](const NamedVariable& one) {
    return one.variable().dtype() != DType::kUnspecified;
  };
  if (has_type(named)) return LikeOf(named.variable());
  const auto other = std::find_if(all.begin(), all.end(), has_type);
  const DeviceRef device = (other == all.end() ? named : *other).variable().device();
  const auto elsewhere = [&](const NamedVariable& one) {
    return has_type(one) && one.variable().device() != device;
  };
  const Session session = internal::SessionFrom(internal::SessionOf(device));
  const char* got = nullptr;
  if (other == all.end() && session.device_count() != 1) got = "none, for they have failed too";
  if (std::any_of(other, all.end(), elsewhere)) got = "several";
  if (got != nullptr) {
    return MakeError(Reason::kWrongState,
                     absl::StrCat(named.name, " has failed, and goes where all others are: ",
                                  "expected one device, got ", got, "; call Init first"));
  }
  return Like{DType::kUnspecified, named.variable.shape(), device};
}

absl::StatusOr<Tensor> ReadLike(const std::string& path, const TensorFiles& file,
                                const std::string& name, const Like& like) {
  const TensorFile::Entry* const entry = file.Find(name);
  if (entry == nullptr) {
    return BadType(absl::StrCat(path, ": \"", name, "\" is missing"));
  }
  const DType dtype = like.dtype == DType::kUnspecified ? entry->dtype : like.dtype;
  if (entry->dtype != dtype || entry->shape != like.shape) {
    const auto text = [](DType of, const Shape& shape) {
      return TensorType(of, {shape.begin(), shape.end()}).ToString();
    };
    return BadType(absl::StrCat(path, ": \"", name, "\": expected ", text(dtype, like.shape),
                                ", got ", text(entry->dtype, entry->shape)));
  }
  return file.Read(name, like.device);
}

absl::Status CheckIsThere(const NamedVariable& named) {
  if (named.variable().defined()) return absl::OkStatus();
  return MakeError(Reason::kWrongState,
                   absl::StrCat(named.name, " is not there yet: call Init first"));
}

struct Saved {
  // Buffers, then each parameter with its slots of the optimizer, in the module's order.
  std::vector<std::vector<NamedTensor>> parts;
  Progress metadata;

  std::vector<NamedTensor> tensors() const {
    std::vector<NamedTensor> all;
    for (const auto& part : parts) all.insert(all.end(), part.begin(), part.end());
    return all;
  }
};

absl::StatusOr<Saved> ToSave(const Module& module, Optimizer* optimizer, const Progress& progress) {
  Saved saved;
  for (const auto& word : progress) {
    if (!IsOfOptimizer(word.first)) continue;
    return BadType(absl::StrCat("\"", word.first, "\" is an optimizer's, and no progress"));
  }
  saved.metadata = progress;
  saved.metadata.emplace(kFormat, kPyTorch);
  std::map<std::string, std::vector<NamedTensor>> slots;  // by parameter
  if (optimizer != nullptr) {
    CHORUS_ASSIGN_OR_RETURN(const std::vector<std::string> names, NamesOf(module, *optimizer));
    CHORUS_ASSIGN_OR_RETURN(const std::vector<Optimizer::ParameterState> state, optimizer->State());
    for (size_t i = 0; i < names.size(); ++i) {
      for (size_t slot = 0; slot < state[i].slots.size(); ++slot) {
        slots[names[i]].push_back({SlotName(names[i], slot), state[i].slots[slot]});
      }
      saved.metadata[absl::StrCat(kSteps, names[i])] = absl::StrCat(state[i].steps);
      if (state[i].skipped == 0) continue;
      saved.metadata[absl::StrCat(kSkipped, names[i])] = absl::StrCat(state[i].skipped);
    }
    // All digits that an f64 has.
    saved.metadata[kRate] = absl::StrFormat("%.17g", optimizer->learning_rate());
  }
  saved.parts.emplace_back();
  for (const NamedVariable& named : module.named_variables()) {
    CHORUS_RETURN_IF_ERROR(CheckIsThere(named));
    const NamedTensor value = {named.name, named.variable().Detach()};
    if (!named.variable.is_parameter()) {
      saved.parts[0].push_back(value);
      continue;
    }
    saved.parts.push_back({value});
    const std::vector<NamedTensor>& of_it = slots[named.name];
    saved.parts.back().insert(saved.parts.back().end(), of_it.begin(), of_it.end());
  }
  return saved;
}

// The tensors that one of `shards` ranks writes. Buffers are the first one's: ranks may have others
// (statistics of their own rows), and some of each would be no rank's state. Of the rest each part
// goes to the rank that has fewest bytes by then.
std::vector<TensorPiece> ShareOf(const Saved& saved, int shard, int shards) {
  std::vector<int64_t> bytes(static_cast<size_t>(shards));
  std::vector<TensorPiece> share;
  for (size_t i = 0; i < saved.parts.size(); ++i) {
    const auto writer = i == 0 ? bytes.begin() : std::min_element(bytes.begin(), bytes.end());
    for (const NamedTensor& named : saved.parts[i]) {
      *writer += named.tensor.num_elements() * DTypeBytes(named.tensor.dtype());
      if (writer - bytes.begin() == shard) share.push_back({named.name, named.tensor});
    }
  }
  return share;
}

// `mine`; where that is OK, and another rank's is not, an error that names it.
absl::Status OnAll(const std::string& name, const Group& ranks, const absl::Status& mine) {
  const int32_t failed = mine.ok() ? -1 : ranks.rank();
  const absl::StatusOr<int32_t> worst =
      AllReduce(Scalar<int32_t>(DeviceOf(ranks), failed), ranks, Reduction::kMax).Item<int32_t>();
  CHORUS_RETURN_IF_ERROR(mine);
  CHORUS_RETURN_IF_ERROR(worst.status());
  if (*worst < 0) return absl::OkStatus();
  return MakeError(Reason::kPeerRefused,
                   absl::StrCat(name, ": rank ", *worst, " could not write its part"));
}

}  // namespace

absl::Status SaveCheckpoint(const std::string& path, const Module& module, Optimizer* optimizer,
                            const Progress& progress) {
  CHORUS_ASSIGN_OR_RETURN(const Saved saved, ToSave(module, optimizer, progress));
  return SaveTensors(path, saved.tensors(), saved.metadata);
}

absl::Status SaveShardedCheckpoint(const std::string& name, const Group& ranks,
                                   const Module& module, Optimizer* optimizer,
                                   const Progress& progress) {
  const auto save = [&]() -> absl::Status {
    CHORUS_ASSIGN_OR_RETURN(const Saved saved, ToSave(module, optimizer, progress));
    // What has failed at once has no size: the others would share out otherwise, and a tensor that
    // none of them writes would be missing from the index.
    for (const NamedTensor& named : saved.tensors()) {
      CHORUS_RETURN_IF_ERROR(named.tensor.status());
    }
    return SaveShard(name, ranks.rank(), ranks.size(), ShareOf(saved, ranks.rank(), ranks.size()),
                     saved.metadata);
  };
  CHORUS_RETURN_IF_ERROR(OnAll(name, ranks, save()));
  return OnAll(name, ranks,
               ranks.rank() == 0 ? FinishShards(name, ranks.size()) : absl::OkStatus());
}

absl::StatusOr<Progress> LoadCheckpoint(const std::string& path, Module* module,
                                        Optimizer* optimizer) {
  CHORUS_ASSIGN_OR_RETURN(const TensorFiles file, TensorFiles::Open(path));
  std::set<std::string> expected;
  std::map<std::string, std::pair<Variable, Tensor>> values;
  const std::vector<NamedVariable> all = module->named_variables();
  for (const NamedVariable& named : all) {
    CHORUS_RETURN_IF_ERROR(CheckIsThere(named));
    CHORUS_ASSIGN_OR_RETURN(const Like like, LikeOf(named, all));
    CHORUS_ASSIGN_OR_RETURN(const Tensor value, ReadLike(path, file, named.name, like));
    values.emplace(named.name, std::make_pair(named.variable, value));
    expected.insert(named.name);
  }
  std::vector<Optimizer::ParameterState> state;
  if (optimizer != nullptr) {
    CHORUS_ASSIGN_OR_RETURN(const std::vector<std::string> names, NamesOf(*module, *optimizer));
    for (size_t i = 0; i < names.size(); ++i) {
      state.emplace_back();
      for (size_t slot = 0; slot < static_cast<size_t>(optimizer->slots()); ++slot) {
        const std::string name = SlotName(names[i], slot);
        CHORUS_ASSIGN_OR_RETURN(Tensor value,
                                ReadLike(path, file, name, LikeOf(values.at(names[i]).second)));
        state.back().slots.push_back(std::move(value));
        expected.insert(name);
      }
      const std::string skips = absl::StrCat(kSkipped, names[i]);
      const auto of_steps = CountOf(file.metadata(), absl::StrCat(kSteps, names[i]));
      const auto of_skips =
          file.metadata().count(skips) == 0 ? int64_t{0} : CountOf(file.metadata(), skips);
      if (!of_steps.ok() || !of_skips.ok() || *of_skips > *of_steps) {
        return BadType(
            absl::StrCat(path, ": the steps of \"", names[i], "\" are missing, or cannot be"));
      }
      state.back().steps = *of_steps;
      state.back().skipped = *of_skips;
    }
  }
  const auto rate_word = file.metadata().find(kRate);
  double rate = optimizer == nullptr ? 0 : optimizer->learning_rate();
  if (optimizer != nullptr && rate_word != file.metadata().end() &&
      !(absl::SimpleAtod(rate_word->second, &rate) && std::isfinite(rate))) {
    return BadType(
        absl::StrCat(path, ": \"", kRate, "\": expected a number, got '", rate_word->second, "'"));
  }
  for (const TensorFile::Entry& entry : file.entries()) {
    // A caller that wants the model alone needs no optimizer.
    const bool is_state = optimizer == nullptr && absl::StartsWith(entry.name, kOptimizer);
    if (!is_state && expected.count(entry.name) == 0) {
      return BadType(absl::StrCat(path, ": \"", entry.name, "\" is none of this model's"));
    }
  }
  // What the daemon has no memory for is known when it gets there.
  for (const auto& named : values) CHORUS_RETURN_IF_ERROR(named.second.second.Wait());
  for (const Optimizer::ParameterState& of_parameter : state) {
    for (const Tensor& slot : of_parameter.slots) CHORUS_RETURN_IF_ERROR(slot.Wait());
  }
  for (const auto& named : values) named.second.first.Set(named.second.second);
  for (size_t i = 0; i < state.size(); ++i) {
    optimizer->SetState(i, std::move(state[i]));
  }
  if (optimizer != nullptr) optimizer->SetLearningRate(rate);
  Progress progress;
  for (const auto& word : file.metadata()) {
    if (IsOfOptimizer(word.first)) continue;
    if (word.first == kFormat && word.second == kPyTorch) continue;
    progress.insert(word);
  }
  return progress;
}

absl::Status SaveScaler(const DeviceRef& device, LossScaler* scaler, Progress* progress) {
  const LossScaler::State& state = scaler->StateOn(device);
  CHORUS_ASSIGN_OR_RETURN(const float scale, state.scale.Item<float>());
  CHORUS_ASSIGN_OR_RETURN(const int64_t streak, state.streak.Item<int64_t>());
  CHORUS_ASSIGN_OR_RETURN(const int64_t skipped, state.skipped.Item<int64_t>());
  // All digits that an f32 has.
  (*progress)[kScale] = absl::StrFormat("%.9g", scale);
  (*progress)[kStreak] = absl::StrCat(streak);
  (*progress)[kScalerSkipped] = absl::StrCat(skipped);
  return absl::OkStatus();
}

absl::Status LoadScaler(const Progress& progress, const DeviceRef& device, LossScaler* scaler) {
  const auto at = progress.find(kScale);
  float scale = 0;
  if (at == progress.end() || !absl::SimpleAtof(at->second, &scale) || !(scale > 0) ||
      !std::isfinite(scale)) {
    return BadScaler(progress, kScale, "a scale above 0");
  }
  CHORUS_ASSIGN_OR_RETURN(const int64_t streak, CountOf(progress, kStreak));
  CHORUS_ASSIGN_OR_RETURN(const int64_t skipped, CountOf(progress, kScalerSkipped));
  scaler->SetState(
      {Scalar(device, scale), Scalar<int64_t>(device, streak), Scalar<int64_t>(device, skipped)});
  return absl::OkStatus();
}

}  // namespace nn
}  // namespace chorus
