#include "chorus/nn/module.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "chorus/functional/math.h"
#include "chorus/math.h"
#include "client/internal/local.h"
#include "client/nn/refused.h"
#include "core/base/error.h"
#include "core/base/mix_bits.h"

namespace chorus {
namespace nn {
namespace {

thread_local StateScope* innermost_scope = nullptr;
thread_local CallSite innermost_site;

uint64_t SeedOf(uint64_t seed, absl::string_view path) {
  return MixBits(HashOf(path) + seed * kMixStep);
}

// What a call at `site` gives that cannot be made.
Tensor Failed(const Tensor& x, const absl::Status& status, CallSite site) {
  return x.defined() && !x.status().ok() ? x : internal::Fail(x, status, site);
}

std::string ShapeText(const Shape& shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}

int64_t Elements(const Shape& shape) {
  int64_t elements = 1;
  for (const int64_t size : shape) elements *= size;
  return elements;
}

// Whether another part may be called so.
absl::Status CheckName(const std::string& name, const std::vector<Module::Child>& children,
                       const std::vector<NamedVariable>& variables) {
  const auto has_name = [&name](const auto& part) { return part.name == name; };
  if (std::any_of(children.begin(), children.end(), has_name) ||
      std::any_of(variables.begin(), variables.end(), has_name)) {
    return BadType(absl::StrCat("\"", name, "\" is the name of two of its parts"));
  }
  if (!name.empty() && name.find('.') == std::string::npos) return absl::OkStatus();
  return BadType(absl::StrCat("\"", name, "\": expected a name without dots"));
}

// The lines of layers are those of the calls of them.
class SiteScope {
 public:
  explicit SiteScope(CallSite site) : outer_(std::exchange(innermost_site, site)) {}
  ~SiteScope() { innermost_site = outer_; }
  SiteScope(const SiteScope&) = delete;
  SiteScope& operator=(const SiteScope&) = delete;

 private:
  const CallSite outer_;
};

}  // namespace

// --- Variable -----------------------------------------------------------------------------------

Tensor Variable::operator()() const {
  return slot_ == nullptr ? Tensor() : StateScope::Find(slot_.get())->tensor;
}

void Variable::Set(const Tensor& tensor) const {
  if (slot_ == nullptr) return;
  Variable::Slot* const slot = StateScope::Find(slot_.get());
  slot->tensor = tensor.Detach();
  slot->before_frozen = Tensor();
  if (requires_grad()) slot->tensor.RequireGrad();
}

const Shape& Variable::shape() const {
  static const Shape* const none = new Shape();
  return slot_ == nullptr ? *none : slot_->shape;
}

bool Variable::is_parameter() const { return slot_ != nullptr && slot_->is_parameter; }
bool Variable::requires_grad() const { return is_parameter() && !slot_->frozen; }

void Variable::Slot::Freeze() {
  if (!tensor.defined()) return;
  before_frozen = tensor;
  tensor = tensor.Detach();
}

void Variable::Slot::Thaw() {
  if (!tensor.defined()) return;
  if (!before_frozen.defined()) before_frozen = tensor.Detach().RequireGrad();
  tensor = std::exchange(before_frozen, Tensor());
}

void Variable::RequireGrad(bool required) const {
  if (!is_parameter() || slot_->frozen == !required) return;
  slot_->frozen = !required;
  const auto change = required ? &Slot::Thaw : &Slot::Freeze;
  (slot_.get()->*change)();
  Slot* const in_scope = StateScope::Find(slot_.get());
  if (in_scope != slot_.get()) (in_scope->*change)();
}

void Variable::ClearGrad() const {
  if (slot_ == nullptr) return;
  const Slot* const slot = StateScope::Find(slot_.get());
  slot->tensor.ClearGrad();
  slot->before_frozen.ClearGrad();
}

// --- StateScope ---------------------------------------------------------------------------------

StateScope::StateScope() : outer_(std::exchange(innermost_scope, this)) {}

StateScope::StateScope(const Module& module, const std::vector<Tensor>& tensors) : StateScope() {
  const std::vector<Variable> variables = module.variables();
  for (size_t i = 0; i < variables.size(); ++i) {
    own_slots_.push_back(std::make_unique<Variable::Slot>());
    if (i < tensors.size()) own_slots_.back()->tensor = tensors[i];
    slots_[variables[i].slot_.get()] = own_slots_.back().get();
  }
}

StateScope::~StateScope() { innermost_scope = outer_; }

std::vector<Tensor> StateScope::tensors() const {
  std::vector<Tensor> tensors;
  for (const auto& slot : own_slots_) tensors.push_back(slot->tensor);
  return tensors;
}

// What an inner scope has for a variable may itself be a variable for which an outer one has
// another: a replica's inside a compiled step.
Variable::Slot* StateScope::Find(Variable::Slot* slot) {
  for (const StateScope* scope = innermost_scope; scope != nullptr; scope = scope->outer_) {
    const auto it = scope->slots_.find(slot);
    if (it != scope->slots_.end()) slot = it->second;
  }
  return slot;
}

const bool* StateScope::FindMode(const bool* mode) {
  for (const StateScope* scope = innermost_scope; scope != nullptr; scope = scope->outer_) {
    const auto it = scope->modes_.find(mode);
    if (it != scope->modes_.end()) mode = it->second;
  }
  return mode;
}

// --- Clones -------------------------------------------------------------------------------------

// A module that calls another one's code with its own variables and modes.
class Module::Mirror final : public Module {
 public:
  // What stands for what, in the whole tree.
  struct Maps {
    std::unordered_map<const Variable::Slot*, Variable> variables;
    std::unordered_map<const Module*, std::weak_ptr<Module>> modules;  // the tree has them
  };

  static std::shared_ptr<Module> Of(Module* original, const std::shared_ptr<Maps>& maps) {
    if (std::shared_ptr<Module> mirror = maps->modules[original].lock()) return mirror;
    auto mirror = std::make_shared<Mirror>(original, maps);
    maps->modules[original] = mirror;
    return mirror;
  }

  Mirror(Module* original, const std::shared_ptr<Maps>& maps)
      : Module(original->kind_), original_(original), keep_(original->weak_from_this().lock()) {
    training_ = original->training();
    refused_ = original->refused_;
    for (const NamedVariable& named : original->variables_) {
      Variable& variable = maps->variables[named.variable.slot_.get()];
      if (!variable.defined()) {
        variable = Variable(std::make_shared<Variable::Slot>(*named.variable.slot_));
        variable.slot_->tensor = named.variable();
        variable.slot_->before_frozen = Tensor();
      }
      variables_.push_back({named.name, variable});
    }
    for (const Child& child : original->children_) {
      AddModule(child.name, Of(child.module.get(), maps));
    }
    for (const Variable& variable : original->variables()) {
      slots_.emplace_back(variable.slot_.get(), maps->variables[variable.slot_.get()].slot_.get());
    }
    original->ForEach([&](Module* module) {
      const std::shared_ptr<Module> mirror = maps->modules[module].lock();
      if (mirror != nullptr) modes_.emplace_back(&module->training_, &mirror->training_);
    });
    modes_.emplace_back(&original->training_, &training_);
  }

  Tensor Forward(const Tensor& x) override {
    StateScope scope;
    Enter(&scope);
    return (*original_)(x, site());
  }

  absl::StatusOr<parallel::Nest> Call(const parallel::Nest::Items& inputs,
                                      const parallel::Nest::Fields& keywords) override {
    StateScope scope;
    Enter(&scope);
    return original_->Call(inputs, keywords);
  }

  Module* code() override { return original_->code(); }
  std::string description() const override { return original_->description(); }

 private:
  void Enter(StateScope* scope) const {
    scope->slots_.insert(slots_.begin(), slots_.end());
    scope->modes_.insert(modes_.begin(), modes_.end());
  }

  Module* const original_;
  const std::shared_ptr<const Module> keep_;
  // Of the tree below: the original's, and what stands for it.
  std::vector<std::pair<const Variable::Slot*, Variable::Slot*>> slots_;
  std::vector<std::pair<const bool*, const bool*>> modes_;
};

std::shared_ptr<Module> Module::WithTensors(const std::vector<Tensor>& tensors) {
  auto maps = std::make_shared<Mirror::Maps>();
  const std::vector<Variable> originals = variables();
  const size_t count = std::min(originals.size(), tensors.size());
  for (size_t i = 0; i < count; ++i) {
    const Variable::Slot* const slot = originals[i].slot_.get();
    if (!tensors[i].defined()) maps->variables[slot] = originals[i];
  }
  std::shared_ptr<Module> mirror = Mirror::Of(this, maps);
  for (size_t i = 0; i < count; ++i) {
    const Variable& variable = maps->variables[originals[i].slot_.get()];
    if (tensors[i].defined()) variable.slot_->tensor = tensors[i];
  }
  return mirror;
}

absl::StatusOr<std::shared_ptr<Module>> Module::Clone(const DeviceRef& device) {
  std::vector<Tensor> copies;
  for (const Variable& variable : variables()) {
    Tensor copy = CopyTo(variable().Detach(), device);
    CHORUS_RETURN_IF_ERROR(copy.status());
    copy = copy.Detach();
    if (variable.requires_grad()) copy.RequireGrad();
    copies.push_back(copy);
  }
  return WithTensors(copies);
}

// --- Calls --------------------------------------------------------------------------------------

Module::Module(std::string kind) : kind_(std::move(kind)) {}

Module::~Module() {
  for (const Child& child : children_) {
    if (child.module->parent_ == this) child.module->parent_ = nullptr;
  }
}

Tensor Module::Forward(const Tensor& x) { return Refuse(x, "is not a function of one tensor"); }

Tensor Module::operator()(const Tensor& x, CallSite site) {
  const auto forward = [this, site](const Tensor& input) {
    const SiteScope sites(site);
    return ThroughHooks(input, Forward(input));
  };
  const absl::Status status = Check(x);
  if (status.ok()) return forward(x);
  const Tensor failed = Failed(x, status, site);
  // Sizes that make no sense do so on every rank, and Forward would compute with them.
  if (!refused_.ok()) return failed;
  const StateScope scope(*this, StateOfRefused(*this, failed));
  const Tensor result = forward(failed);
  // The result's error says whether others have been told of it.
  return result.defined() && !result.status().ok() ? result : failed;
}

Tensor Module::ThroughHooks(const Tensor& x, Tensor result) {
  for (const Hook& hook : hooks_) {
    const Tensor other = hook(*this, x, result);
    if (other.defined()) result = other;
  }
  return result;
}

absl::StatusOr<parallel::Nest> Module::Call(const parallel::Nest::Items& inputs,
                                            const parallel::Nest::Fields& keywords) {
  if (inputs.size() != 1 || !keywords.empty() ||
      inputs[0].kind() != parallel::Nest::Kind::kTensor) {
    return BadType(absl::StrCat(label(), ": expected one tensor, got ", inputs.size(),
                                " inputs and ", keywords.size(),
                                " keywords: override Call for another kind of function"));
  }
  return parallel::Nest((*this)(inputs[0].tensor(), site()));
}

absl::StatusOr<parallel::Nest> Module::CallAt(CallSite site, const parallel::Nest::Items& inputs,
                                              const parallel::Nest::Fields& keywords) {
  const SiteScope sites(site);
  return Call(inputs, keywords);
}

CallSite Module::site() const {
  return innermost_site.line == 0 ? CallSite::Here() : innermost_site;
}

Tensor Module::ForwardByCall(const Tensor& x) {
  const absl::StatusOr<parallel::Nest> result = Call({parallel::Nest(x)}, {});
  if (!result.ok()) return FromError(x.device(), result.status());
  if (result->kind() == parallel::Nest::Kind::kTensor) return result->tensor();
  return Refuse(x, "its module does not give one tensor: use Call");
}

Tensor Module::Refuse(const Tensor& x, const std::string& why) const {
  return Failed(x, BadType(absl::StrCat(label(), ": ", why)), site());
}

void Module::RefuseAll(const std::string& why) { refused_.Update(BadType(why)); }

absl::Status Module::Check(const Tensor& x) const {
  if (!refused_.ok()) {
    return BadType(absl::StrCat(label(), ": ", ErrorOf(refused_).message));
  }
  for (const NamedVariable& named : variables_) {
    const Tensor tensor = named.variable();
    if (!tensor.defined()) {
      return MakeError(Reason::kWrongState,
                       absl::StrCat(label(), ": ", named.name, " is not there yet: call Init"));
    }
    if (x.defined() && tensor.status().ok() && x.status().ok() &&
        tensor.device().slot() != x.device().slot()) {
      return BadType(absl::StrCat(label(), ": its input is on device ", x.device().slot(), ", its ",
                                  named.name, " on device ", tensor.device().slot()));
    }
  }
  return absl::OkStatus();
}

// --- State --------------------------------------------------------------------------------------

absl::Status Module::Init(const DeviceRef& device, uint64_t seed, DType dtype) {
  absl::Status status;
  ForEach([&](Module* module) {
    if (!module->refused_.ok()) status.Update(module->Check(Tensor()));
  });
  CHORUS_RETURN_IF_ERROR(status);
  for (const NamedVariable& named : named_variables()) {
    const Variable::Slot& slot = *named.variable.slot_;
    const DType type = slot.dtype == DType::kUnspecified ? dtype : slot.dtype;
    const Tensor tensor = slot.init(device, type, slot.shape, SeedOf(seed, named.name));
    if (!tensor.status().ok()) {
      Error error = ErrorOf(tensor.status());
      error.message = absl::StrCat(named.name, ": ", error.message);
      return ToStatus(error);
    }
    named.variable.Set(tensor);
  }
  return absl::OkStatus();
}

absl::Status Module::To(const DeviceRef& device) {
  for (const NamedVariable& named : named_variables()) {
    const Tensor tensor = named.variable();
    if (!tensor.defined()) {
      return MakeError(Reason::kWrongState,
                       absl::StrCat(named.name, " is not there yet: call Init"));
    }
    if (tensor.device() == device) continue;
    const Tensor copy = CopyTo(tensor.Detach(), device);
    CHORUS_RETURN_IF_ERROR(copy.status());
    named.variable.Set(copy);
  }
  return absl::OkStatus();
}

std::vector<NamedVariable> Module::named_variables() const {
  std::vector<NamedVariable> all;
  std::set<const Variable::Slot*> seen;
  Walk("", [&](const std::string& name, const Variable& variable) {
    if (seen.insert(variable.slot_.get()).second) all.push_back({name, variable});
  });
  return all;
}

std::vector<Variable> Module::variables() const {
  std::vector<Variable> all;
  for (NamedVariable& named : named_variables()) all.push_back(std::move(named.variable));
  return all;
}

std::vector<Variable> Module::parameters() const {
  std::vector<Variable> parameters;
  for (const Variable& variable : variables()) {
    if (variable.is_parameter()) parameters.push_back(variable);
  }
  return parameters;
}

std::vector<Variable> Module::buffers() const {
  std::vector<Variable> buffers;
  for (const Variable& variable : variables()) {
    if (!variable.is_parameter()) buffers.push_back(variable);
  }
  return buffers;
}

void Module::ClearGrads() const {
  for (const Variable& variable : parameters()) variable.ClearGrad();
}

void Module::RequireGrad(bool required) const {
  for (const Variable& variable : parameters()) variable.RequireGrad(required);
}

absl::StatusOr<DeviceRef> Module::device() const {
  const NamedVariable* first = nullptr;
  const std::vector<NamedVariable> all = named_variables();
  for (const NamedVariable& named : all) {
    const Tensor tensor = named.variable();
    if (!tensor.defined()) {
      return MakeError(Reason::kWrongState,
                       absl::StrCat(named.name, " is not there yet: call Init"));
    }
    if (first == nullptr) first = &named;
    const DeviceRef at = first->variable().device();
    if (tensor.device() != at) {
      return BadType(
          absl::StrCat("a module on one device was expected, ", first->name, " is on device ",
                       at.slot(), ", ", named.name, " on device ", tensor.device().slot(),
                       tensor.device().slot() == at.slot() ? " of another session" : ""));
    }
  }
  if (first == nullptr) {
    return MakeError(Reason::kWrongState, absl::StrCat(label(), " has no parameters or buffers"));
  }
  return first->variable().device();
}

// --- The tree -----------------------------------------------------------------------------------

std::string Module::path() const {
  if (parent_ == nullptr) return "";
  const std::string above = parent_->path();
  return above.empty() ? name_ : absl::StrCat(above, ".", name_);
}

std::string Module::label() const {
  const std::string own_path = path();
  return own_path.empty() ? kind_ : absl::StrCat(own_path, " (", kind_, ")");
}

void Module::AddModule(const std::string& name, std::shared_ptr<Module> module) {
  refused_.Update(CheckName(name, children_, variables_));
  if (module == nullptr) return RefuseAll(absl::StrCat("\"", name, "\" is no module"));
  bool is_above = false;
  module->ForEach([&](Module* below) { is_above |= below == this; });
  if (is_above) return RefuseAll(absl::StrCat("\"", name, "\" has this module as a part"));
  if (module->parent_ == nullptr) {
    module->parent_ = this;
    module->name_ = name;
  }
  children_.push_back({name, std::move(module)});
}

void Module::AddVariable(const std::string& name, Variable variable) {
  refused_.Update(CheckName(name, children_, variables_));
  for (const int64_t size : variable.shape()) {
    if (size < 0) {
      RefuseAll(
          absl::StrCat("expected sizes from 0, got ", ShapeText(variable.shape()), " for ", name));
    }
  }
  variables_.push_back({name, std::move(variable)});
}

Variable Module::AddParameter(const std::string& name, const Shape& shape, Initializer init) {
  auto slot = std::make_shared<Variable::Slot>();
  slot->shape = shape;
  slot->init = std::move(init);
  Variable variable(std::move(slot));
  AddVariable(name, variable);
  return variable;
}

Variable Module::AddBuffer(const std::string& name, const Shape& shape, Initializer init,
                           DType dtype) {
  Variable variable = AddParameter(name, shape, std::move(init));
  variable.slot_->is_parameter = false;
  variable.slot_->dtype = dtype;
  return variable;
}

void Module::Tie(const std::string& name, const Variable& variable) {
  if (!variable.defined()) return RefuseAll(absl::StrCat("\"", name, "\" is no variable"));
  AddVariable(name, variable);
}

void Module::Walk(
    const std::string& prefix,
    const std::function<void(const std::string& name, const Variable& variable)>& visit) const {
  for (const NamedVariable& named : variables_)
    visit(absl::StrCat(prefix, named.name), named.variable);
  for (const Child& child : children_) {
    child.module->Walk(absl::StrCat(prefix, child.name, "."), visit);
  }
}

void Module::ForEach(const std::function<void(Module* module)>& visit) {
  visit(this);
  for (const Child& child : children_) child.module->ForEach(visit);
}

void Module::Train(bool training) {
  ForEach([training](Module* module) { module->training_ = training; });
}

bool Module::training() const { return *StateScope::FindMode(&training_); }

std::string Module::ToString() const {
  std::string out;
  const std::function<void(const Module&, const std::string&)> append =
      [&out, &append](const Module& module, const std::string& indent) {
        absl::StrAppend(&out, module.kind_);
        const std::string words = module.description();
        if (!words.empty()) absl::StrAppend(&out, "(", words, ")");
        for (const NamedVariable& named : module.variables_) {
          absl::StrAppend(&out, " ", named.name, ShapeText(named.variable.shape()));
        }
        absl::StrAppend(&out, "\n");
        for (const Child& child : module.children_) {
          absl::StrAppend(&out, indent, child.name, ": ");
          append(*child.module, indent + "  ");
        }
      };
  append(*this, "  ");
  int64_t elements = 0;
  int64_t frozen = 0;
  for (const Variable& variable : parameters()) {
    elements += Elements(variable.shape());
    if (!variable.requires_grad()) frozen += Elements(variable.shape());
  }
  absl::StrAppend(&out, elements, " numbers in parameters");
  if (frozen > 0) absl::StrAppend(&out, ", ", frozen, " of them frozen");
  absl::StrAppend(&out, "\n");
  return out;
}

std::vector<Tensor> CastParameters(const Module& module, DType dtype) {
  std::vector<Tensor> tensors;
  for (const Variable& variable : module.variables()) {
    const Tensor tensor = variable.is_parameter() ? variable() : Tensor();
    tensors.push_back(tensor.defined() ? Cast(tensor, dtype) : tensor);
  }
  return tensors;
}

std::ostream& operator<<(std::ostream& out, const Module& module) {
  return out << module.ToString();
}

// --- Containers ---------------------------------------------------------------------------------

Tensor Lambda::Forward(const Tensor& x) {
  const CallSiteScope lines(site());
  return function_(x);
}

Sequential::Sequential(const Modules& modules) : Sequential() {
  for (const std::shared_ptr<Module>& module : modules) {
    AddModule(absl::StrCat(children().size()), module);
  }
}

Tensor Sequential::Forward(const Tensor& x) {
  Tensor y = x;
  for (const Child& child : children()) y = (*child.module)(y, site());
  return y;
}

Module* ModuleMap::Find(absl::string_view name) const {
  for (const Child& child : children()) {
    if (child.name == name) return child.module.get();
  }
  return nullptr;
}

}  // namespace nn
}  // namespace chorus
