// Functions of tensors as one graph, one small message a call.
//
// Threads: any number may run one Compiled. Ownership: a Compiled is a handle; its graphs go with
//   the last one. Errors: Run's, and those that its results carry.
#ifndef CHORUS_CLIENT_COMPILE_H_
#define CHORUS_CLIENT_COMPILE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "chorus/call_site.h"
#include "chorus/tensor.h"

namespace chorus {

namespace internal {
class CompiledImpl;
}  // namespace internal

using Function = std::function<std::vector<Tensor>(const std::vector<Tensor>& inputs)>;

struct CompileOptions {
  // Inputs whose memory outputs of their types may take over (parameters that the step replaces),
  // by index. Honoured where nobody else has the tensor (detached from it, for a gradient, or in
  // another run that is not over), the session has one device, the function does not return the
  // input itself, and no collective needs the output, nor an op that fails for what it reads (an
  // index out of range); else the step gets memory of its own, and the input stays. Where it is
  // honoured the tensor, and every copy of its handle, is gone: its use is FAILED_PRECONDITION
  // `DONATED`. The result of a call that is under way may be given to the next. Steps are whole:
  // one that fails (a mismatch, a late rank, no memory, a kernel or a device of any rank) leaves
  // what went into it, and its handle, as they were, and the calls behind it that use its results
  // fail with its error: keep the handles of the last steps, and go on from the last one that can
  // be waited for. Only a device that fails while it writes the outputs themselves loses what was
  // donated; what was not donated never is.
  std::vector<int> donate;
  // A dimension of an input that may change from call to call, like the rows of a last short batch.
  struct Varying {
    Varying(int i, int d = 0) : input(i), dim(d) {}  // an input, its first dimension
    int input = 0;
    int dim = 0;
  };
  // They all have one size, of 1 to `max_size`; another size is neither another trace nor another
  // graph. The function is traced with a few sizes, also a small one, and must be the same op by op
  // but for shapes, whose sizes may be linear in it: what it makes of the size otherwise (a number
  // 1 / size: use Mean) is an error that names the line. From a `max_size` of 4 on it is not traced
  // at size 1: what it does otherwise there alone is not seen. With several ranks each may have its
  // own size, unless a collective's shape depends on it.
  std::vector<Varying> varying;
  int64_t max_size = 0;
  // How many calls of a rank may be under way: one more waits for the first of them. Each has
  // memory for its results and for what it computes on the way. Of a function without collectives
  // they are of the rank whose collectives its inputs come from, where they come from any.
  int max_under_way = 16;
};

// A function of tensors as one registered graph: local ops, collectives, Backward and Grad inside,
// one small message a call.
class Compiled {
 public:
  Compiled() = default;
  // Runs it; the first call with inputs of these types, devices and `requires_grad` traces the
  // function, which sees tensors without bytes (Read and Wait fail in it). Tensors that it captures
  // become further inputs: those that it used when it was traced, also at calls for which a
  // captured variable holds another tensor by then; what changes is an input of the function, and
  // so is what layers that drop draw by (a RandomScope in the function: chorus/nn/layers.h). To a
  // gradient that is taken inside, a captured tensor is a constant, unless it is a leaf; one that
  // is an input as well is refused there, and inputs that are one tensor are one leaf. Values of
  // the function itself that it keeps somewhere are of no use outside, nor when it is traced again
  // (FAILED_PRECONDITION). Its groups, too, are those that it used when it was traced, whatever a
  // captured variable holds by then; at each call they have the epoch of that moment, and their
  // next positions. Results carry no history: differentiate inside, with regard to the inputs that
  // come from collectives too, and go on from their gradients outside (Grad with seeds), or Detach
  // them: a gradient that would be cut off there is refused, since other ranks count on it; so is
  // any Backward that leads there. Under NoGrad the function is another graph, which records
  // nothing and differentiates nothing, as if it were called eagerly. Returns at once, like any op,
  // unless as many calls as CompileOptions says are under way. A few bytes from the host (Scalar,
  // or FromHost of 64 bytes at most) travel with the call: a learning rate, a step number or a seed
  // that changes costs nothing beside it, and no other graph. What the function makes itself of
  // more than these is sent when it is traced. Where the daemon had no memory for it, or its
  // session has been told since that a device was lost (DEVICE_LOST), the next call traces the
  // function anew, and sends it again.
  //
  // Called inside another function while that is traced, it is the same function, as a part of that
  // one's graph: its inputs are leaves of its own there, which no grad() outside sees, and what it
  // gives back is a constant to the other's gradients (in the loss of an nn::TrainStep, too). What
  // it captures of the other it has with its history, and its options say nothing. A call that is
  // refused there for its inputs is a refusal of the whole.
  //
  // A run that is refused (an input that has failed or is undefined, a function that cannot be
  // traced, a collective that is refused in it, also where its result is not used, or an exception,
  // which goes on to the caller) counts what all traces so far have counted, and ends the epoch for
  // everybody. Where they have counted differently, or there is none, it is not known what this
  // rank would have called: it is out of line until its next World::Step (chorus.h). Inputs that
  // are all undefined, or none, are of no session: where the process has several, so are the ranks
  // of all of them. These, and what failed before it was on any device, do not tell ranks of one
  // session apart: where nothing else does, so are all that it has of the world. While a function
  // is traced nothing is sent but the bytes that it makes tensors of itself.
  absl::StatusOr<std::vector<Tensor>> Run(const std::vector<Tensor>& inputs,
                                          CallSite site = CallSite::Here()) const;
  // How many graphs the function has been made into: one for each list of types of its inputs (and
  // one under NoGrad), and another one where a list comes again whose graph is gone. (Those of the
  // last 256 lists are kept; a Reform ends those that use its groups, and a loss those that have
  // made what was lost.) A trace that fails, or that another thread's of the same list was faster
  // than, makes none.
  int traces() const;

 private:
  friend class internal::Access;
  explicit Compiled(std::shared_ptr<internal::CompiledImpl> impl) : impl_(std::move(impl)) {}

  std::shared_ptr<internal::CompiledImpl> impl_;
};
Compiled Compile(Function function, const CompileOptions& options = {});

}  // namespace chorus

#endif  // CHORUS_CLIENT_COMPILE_H_
