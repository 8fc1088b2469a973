#include "chorus/nn/checkpoint.h"

#include <set>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "chorus/nn/safetensors.h"
#include "client/internal/local.h"
#include "core/base/error.h"

namespace chorus {
namespace nn {
namespace {

constexpr char kOptimizer[] = "optimizer.";
constexpr char kSteps[] = "optimizer.steps.";  // in the metadata

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

// A tensor like `like`, from the file.
absl::StatusOr<Tensor> ReadLike(const std::string& path, const TensorFile& file,
                                const std::string& name, const Tensor& like) {
  const TensorFile::Entry* const entry = file.Find(name);
  if (entry == nullptr) {
    return BadType(absl::StrCat(path, ": \"", name, "\" is missing"));
  }
  if (entry->dtype != like.dtype() || entry->shape != like.shape()) {
    return BadType(absl::StrCat(
        path, ": \"", name, "\": expected ", internal::TypeText(like), ", got ",
        TensorType(entry->dtype, {entry->shape.begin(), entry->shape.end()}).ToString()));
  }
  return file.Read(name, like.device());
}

}  // namespace

absl::Status SaveCheckpoint(const std::string& path, const Module& module, Optimizer* optimizer,
                            const Progress& progress) {
  std::vector<NamedTensor> tensors;
  Progress metadata = progress;
  for (const NamedVariable& named : module.named_variables()) {
    tensors.push_back({named.name, named.variable().Detach()});
  }
  if (optimizer != nullptr) {
    CHORUS_ASSIGN_OR_RETURN(const std::vector<std::string> names, NamesOf(module, *optimizer));
    CHORUS_ASSIGN_OR_RETURN(const std::vector<std::vector<Tensor>> state, optimizer->State());
    for (size_t i = 0; i < names.size(); ++i) {
      for (size_t slot = 0; slot < state[i].size(); ++slot) {
        tensors.push_back({SlotName(names[i], slot), state[i][slot]});
      }
      metadata[absl::StrCat(kSteps, names[i])] = absl::StrCat(optimizer->steps(i));
    }
  }
  return SaveTensors(path, tensors, metadata);
}

absl::StatusOr<Progress> LoadCheckpoint(const std::string& path, Module* module,
                                        Optimizer* optimizer) {
  CHORUS_ASSIGN_OR_RETURN(const TensorFile file, TensorFile::Open(path));
  std::set<std::string> expected;
  std::vector<std::pair<Variable, Tensor>> values;
  for (const NamedVariable& named : module->named_variables()) {
    if (!named.variable().defined()) {
      return MakeError(Reason::kWrongState,
                       absl::StrCat(named.name, " is not there yet: call Init first"));
    }
    CHORUS_ASSIGN_OR_RETURN(Tensor value, ReadLike(path, file, named.name, named.variable()));
    values.emplace_back(named.variable, std::move(value));
    expected.insert(named.name);
  }
  std::vector<std::vector<Tensor>> state;
  std::vector<int64_t> steps;
  if (optimizer != nullptr) {
    CHORUS_ASSIGN_OR_RETURN(const std::vector<std::string> names, NamesOf(*module, *optimizer));
    for (size_t i = 0; i < names.size(); ++i) {
      state.emplace_back();
      for (size_t slot = 0; slot < static_cast<size_t>(optimizer->slots()); ++slot) {
        const std::string name = SlotName(names[i], slot);
        CHORUS_ASSIGN_OR_RETURN(Tensor value,
                                ReadLike(path, file, name, optimizer->parameters()[i]()));
        state.back().push_back(std::move(value));
        expected.insert(name);
      }
      const auto it = file.metadata().find(absl::StrCat(kSteps, names[i]));
      steps.emplace_back();
      if (it == file.metadata().end() || !absl::SimpleAtoi(it->second, &steps.back()) ||
          steps.back() < 0) {
        return BadType(absl::StrCat(path, ": the steps of \"", names[i], "\" are missing"));
      }
    }
  }
  for (const TensorFile::Entry& entry : file.entries()) {
    // Who wants the model alone needs no optimizer.
    const bool is_state = optimizer == nullptr && absl::StartsWith(entry.name, kOptimizer);
    if (!is_state && expected.count(entry.name) == 0) {
      return BadType(absl::StrCat(path, ": \"", entry.name, "\" is none of this model's"));
    }
  }
  for (const auto& value : values) value.first.Set(value.second);
  for (size_t i = 0; i < state.size(); ++i) {
    optimizer->SetState(i, std::move(state[i]), steps[i]);
  }
  Progress progress;
  for (const auto& word : file.metadata()) {
    if (!absl::StartsWith(word.first, kSteps)) progress.insert(word);
  }
  return progress;
}

}  // namespace nn
}  // namespace chorus
