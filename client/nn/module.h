// Modules: named parameters and buffers in a tree, and a function of them.
//
//   class Block : public chorus::nn::Module {
//    public:
//     explicit Block(int64_t width)
//         : Module("Block"),
//           norm_(Add<chorus::nn::LayerNorm>("norm", width)),
//           linear_(Add<chorus::nn::Linear>("linear", width, width)) {}
//     Tensor Forward(const Tensor& x) override { return x + Relu(linear_(norm_(x))); }
//
//    private:
//     chorus::nn::LayerNorm& norm_;
//     chorus::nn::Linear& linear_;
//   };
//   Block block(64);
//   CHORUS_RETURN_IF_ERROR(block.Init(world, /*seed=*/1));
//   Tensor y = block(x);
//
// A module is built without a device: it says what its parameters are. Init makes them, from a seed
// and each one's path in the tree, so that they are bitwise the same on every rank and device.
//
// Tensors do not change; a Variable's tensor is replaced (by an optimizer, or Set). What the
// variables of a module stand for can be exchanged for the time of a call (StateScope): so the code
// of one module serves its clones, its replicas on other devices and a compiled step, none of which
// copies it. Forward must therefore ask its variables each time, and keep nothing else that
// changes.
//
// Threads: any may call a module, each under a StateScope of its own; what changes it (Add, Init,
//   Set, Train, ...) must be ordered by the caller.
// Ownership: a module owns its submodules and variables, which may be shared with others. A clone
//   refers to its original, which must outlive it unless a std::shared_ptr has it.
// Errors: calls give tensors that carry them, with the path of the module and the line of the call;
//   what gives no tensor returns them. INVALID_ARGUMENT kBadType: sizes, dtypes or devices that do
//   not fit. FAILED_PRECONDITION kWrongState: a module that has no parameters yet.
#ifndef CHORUS_CLIENT_NN_MODULE_H_
#define CHORUS_CLIENT_NN_MODULE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "chorus/call_site.h"
#include "chorus/parallel/nest.h"
#include "chorus/session.h"
#include "chorus/tensor.h"

namespace chorus {
namespace nn {

class Module;

// Makes the first tensor of a variable. `seed` is the variable's own.
using Initializer =
    std::function<Tensor(const DeviceRef& device, DType dtype, const Shape& shape, uint64_t seed)>;

// A parameter or buffer of a module. A handle: copies are the same variable, and a variable that
// two modules have is tied: one tensor, one gradient, one update.
class Variable {
 public:
  Variable() = default;
  bool defined() const { return slot_ != nullptr; }

  // The tensor that it stands for: in the innermost StateScope that has another for it, else its
  // own. Undefined before Init.
  Tensor operator()() const;
  // Replaces it, without its history; of a parameter that is not frozen a leaf. Not checked: nn
  // itself replaces tensors by others of their type.
  void Set(const Tensor& tensor) const;

  const Shape& shape() const;
  bool is_parameter() const;  // false: a buffer, which has no gradient
  // False: a buffer, or frozen.
  bool requires_grad() const;
  // Frozen or not, from now on; in a StateScope what it has for the variable, too. Who freezes and
  // thaws it has the leaf that there was, with its gradient so far, unless Set has come between.
  void RequireGrad(bool required) const;
  // Of the tensor; of one that is frozen undefined.
  Tensor grad() const { return (*this)().grad(); }
  // Also of one that is frozen, for when it is thawed.
  void ClearGrad() const;

  friend bool operator==(const Variable& a, const Variable& b) { return a.slot_ == b.slot_; }
  friend bool operator!=(const Variable& a, const Variable& b) { return a.slot_ != b.slot_; }

 private:
  friend class Module;
  friend class StateScope;
  struct Slot {
    Shape shape;
    bool is_parameter = true;
    bool frozen = false;
    DType dtype = DType::kUnspecified;  // of a buffer whose dtype is not the module's
    Initializer init;
    Tensor tensor;
    Tensor before_frozen;  // the tensor, where it was frozen since

    void Freeze();
    void Thaw();
  };
  explicit Variable(std::shared_ptr<Slot> slot) : slot_(std::move(slot)) {}

  std::shared_ptr<Slot> slot_;
};

// What a walk over a module gives: "encoder.2.attention.query.weight".
struct NamedVariable {
  std::string name;
  Variable variable;
};

// While one lives, variables of `module` stand for `tensors` on this thread: those that
// module.variables() gives, in that order. What is Set meanwhile is set here, and not in the
// module.
class StateScope {
 public:
  StateScope(const Module& module, const std::vector<Tensor>& tensors);
  ~StateScope();
  StateScope(const StateScope&) = delete;
  StateScope& operator=(const StateScope&) = delete;

  // What they stand for by now, in the same order.
  std::vector<Tensor> tensors() const;

 private:
  friend class Module;
  friend class Variable;
  StateScope();
  static Variable::Slot* Find(Variable::Slot* slot);
  static const bool* FindMode(const bool* mode);

  std::unordered_map<const Variable::Slot*, Variable::Slot*> slots_;
  std::unordered_map<const bool*, const bool*> modes_;
  std::vector<std::unique_ptr<Variable::Slot>> own_slots_;  // by order of variables()
  StateScope* const outer_;
};

class Module : public std::enable_shared_from_this<Module> {
 public:
  virtual ~Module();
  Module(const Module&) = delete;
  Module& operator=(const Module&) = delete;

  // --- Calls ----------------------------------------------------------------------------------
  // The function, for most layers: of one tensor. Called by operator(), also where the call is
  // refused: then with a tensor that carries the error, for other ranks may wait for collectives in
  // it, which are told so; what it Sets is not kept. (Not where RefuseAll refuses every call.)
  virtual Tensor Forward(const Tensor& x);
  // Forward, between the hooks.
  Tensor operator()(const Tensor& x, CallSite site = CallSite::Here());
  // The same of anything: what DataParallel calls. Unless it is overridden: of one tensor, by
  // operator().
  virtual absl::StatusOr<parallel::Nest> Call(const parallel::Nest::Items& inputs,
                                              const parallel::Nest::Fields& keywords);
  // Call, with `site` as its site().
  absl::StatusOr<parallel::Nest> CallAt(CallSite site, const parallel::Nest::Items& inputs,
                                        const parallel::Nest::Fields& keywords);

  // Whose Forward runs in its calls: a clone's original, else itself. To be asked for what a layer
  // is (dynamic_cast): what is changed there, other than variables and modes, all clones share.
  virtual Module* code() { return this; }

  // Called behind every call of this module, in the order in which they were added; what a hook
  // returns, where it is defined, takes the result's place. (Of calls of several tensors: with the
  // first of them, and the first of the results.)
  using Hook = std::function<Tensor(Module& module, const Tensor& x, const Tensor& result)>;
  void AddHook(Hook hook) {
    hooks_.push_back(std::move(hook));
    NoteChange();
  }

  // --- State ----------------------------------------------------------------------------------
  // Makes every variable of the tree anew on `device`; each parameter has its own numbers, by
  // `seed` and its path. `dtype`: a floating one.
  absl::Status Init(const DeviceRef& device, uint64_t seed, DType dtype = DType::kF32);
  // Copies every variable that is elsewhere to `device`, with no history; a gradient that has been
  // added up is gone. Those that are there stay as they are, with theirs.
  absl::Status To(const DeviceRef& device);
  // A module of the same code with variables and modes of its own: copies on `device`, tied as
  // these are.
  absl::StatusOr<std::shared_ptr<Module>> Clone(const DeviceRef& device);
  // The same with these `tensors`, in the order of variables(), as they are, with their history.
  // Where one is undefined the variable is this module's own: what is Set there is set here.
  std::shared_ptr<Module> WithTensors(const std::vector<Tensor>& tensors);

  // Of the tree, parents first, in the order in which they were added; a variable that is tied
  // once, by its first name.
  std::vector<NamedVariable> named_variables() const;
  std::vector<Variable> variables() const;  // parameters and buffers
  std::vector<Variable> parameters() const;
  std::vector<Variable> buffers() const;
  void ClearGrads() const;
  // Whether parameters of the tree have gradients; see Variable::RequireGrad.
  void RequireGrad(bool required) const;
  // The device of its variables. FAILED_PRECONDITION: it has none, or they are not there yet;
  // INVALID_ARGUMENT: on several, naming two of them.
  absl::StatusOr<DeviceRef> device() const;

  // --- The tree -------------------------------------------------------------------------------
  const std::string& kind() const { return kind_; }  // "Linear"
  // Its path in the tree: "encoder.2.attention"; "" of the root.
  std::string path() const;
  // "encoder.2.attention (Linear)", for texts.
  std::string label() const;
  struct Child {
    std::string name;
    std::shared_ptr<Module> module;
  };
  const std::vector<Child>& children() const { return children_; }
  // Of the tree. Modules are made in training mode.
  void Train(bool training = true);
  void Eval() { Train(false); }
  bool training() const;
  // A few words of what it is, between brackets: "in=784, out=128".
  virtual std::string description() const { return ""; }
  // The tree, a line each, with shapes and the number of parameters.
  std::string ToString() const;

 protected:
  explicit Module(std::string kind);

  // A name is not empty, has no dot and is used once in a module: else Init and all calls say so.
  template <typename T, typename... Args>
  T& Add(const std::string& name, Args&&... args) {
    auto module = std::make_shared<T>(std::forward<Args>(args)...);
    T& result = *module;
    AddModule(name, std::move(module));
    return result;
  }
  void AddModule(const std::string& name, std::shared_ptr<Module> module);
  Variable AddParameter(const std::string& name, const Shape& shape, Initializer init);
  // Of the module's dtype; of `dtype` where that is given.
  Variable AddBuffer(const std::string& name, const Shape& shape, Initializer init,
                     DType dtype = DType::kUnspecified);
  // A variable of another module: tied.
  void Tie(const std::string& name, const Variable& variable);

  // Call with x alone, where it gives one tensor: the Forward of modules around another one.
  Tensor ForwardByCall(const Tensor& x);

  // A call of this module becomes another one: a graph that was traced before is not it.
  void NoteChange() { ++revision_; }
  // What is left of a result behind the hooks. For calls of several tensors; operator() asks.
  Tensor ThroughHooks(const Tensor& x, Tensor result);

  // The line of the call that is under way, for layers of which it says more than their own:
  //   const CallSiteScope lines(site());
  CallSite site() const;
  // A tensor beside `x` that carries kBadType: the label, and `why`. The error of x, where it has
  // one.
  Tensor Refuse(const Tensor& x, const std::string& why) const;
  // The same where a constructor's sizes make no sense: every call gives it. The first one counts.
  void RefuseAll(const std::string& why);
  // Whether a call can be made with x: the module is in order, has its tensors, on x's device. For
  // calls of several tensors; operator() asks.
  absl::Status Check(const Tensor& x) const;

 private:
  class Mirror;
  friend class StateScope;
  friend class TrainStep;  // revision_

  void Walk(
      const std::string& prefix,
      const std::function<void(const std::string& name, const Variable& variable)>& visit) const;
  // Of the tree, this one first.
  void ForEach(const std::function<void(Module* module)>& visit);
  void AddVariable(const std::string& name, Variable variable);

  const std::string kind_;
  std::string name_;          // in its parent
  Module* parent_ = nullptr;  // the first that it was added to
  std::vector<Child> children_;
  std::vector<NamedVariable> variables_;  // its own
  std::vector<Hook> hooks_;
  absl::Status refused_;
  bool training_ = true;
  int64_t revision_ = 0;
};

std::ostream& operator<<(std::ostream& out, const Module& module);

// For mixed precision: each parameter of the tree in `dtype`, with its history, so that its
// gradient comes to the module's own, the master weight; undefined for buffers. By variables():
//   Tensor y = (*model.WithTensors(CastParameters(model, DType::kBF16)))(Cast(x, DType::kBF16));
std::vector<Tensor> CastParameters(const Module& module, DType dtype);

// A module of any callable, for Sequential: "Relu".
class Lambda : public Module {
 public:
  Lambda(std::string kind, std::function<Tensor(const Tensor&)> function)
      : Module(std::move(kind)), function_(std::move(function)) {}
  Tensor Forward(const Tensor& x) override;

 private:
  const std::function<Tensor(const Tensor&)> function_;
};

using Modules = std::vector<std::shared_ptr<Module>>;
template <typename T, typename... Args>
std::shared_ptr<Module> Make(Args&&... args) {
  return std::make_shared<T>(std::forward<Args>(args)...);
}

// Modules by number, called one behind the other; also a list of modules that others call.
class Sequential : public Module {
 public:
  Sequential() : Module("Sequential") {}
  explicit Sequential(const Modules& modules);
  // "0", "1", ...
  template <typename T, typename... Args>
  T& Append(Args&&... args) {
    return Add<T>(std::to_string(children().size()), std::forward<Args>(args)...);
  }
  int64_t size() const { return static_cast<int64_t>(children().size()); }
  Module& operator[](int64_t i) const { return *children()[static_cast<size_t>(i)].module; }
  using Module::operator();
  Tensor Forward(const Tensor& x) override;
};

// Modules by name, which others call.
class ModuleMap : public Module {
 public:
  ModuleMap() : Module("ModuleMap") {}
  template <typename T, typename... Args>
  T& Insert(const std::string& name, Args&&... args) {
    return Add<T>(name, std::forward<Args>(args)...);
  }
  // Null: there is none.
  Module* Find(absl::string_view name) const;
};

}  // namespace nn
}  // namespace chorus

#endif  // CHORUS_CLIENT_NN_MODULE_H_
