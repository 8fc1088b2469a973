// Collectives between the ranks of a group, and their reductions.
//
// Threads: any; chorus.h says in which order ranks call.
// Ownership: results are handles. An operand's handle may go as soon as the call has returned.
// Errors: in the results, with the line of the call. Which there are is said below and in chorus.h.
#ifndef CHORUS_CLIENT_COLLECTIVES_H_
#define CHORUS_CLIENT_COLLECTIVES_H_

#include <cstdint>
#include <utility>
#include <vector>

#include "chorus/call_site.h"
#include "chorus/session.h"
#include "chorus/tensor.h"
#include "core/graph/reduction_kind.h"

namespace chorus {

// Each goes out at once and returns at once, but that a rank with 512 runs under way waits for its
// oldest before it adds one. `group` may be a World: everybody. Every member calls
// the same, in the same order, and each says what must be equal on all of them; dtypes always must.
// A mismatch is INVALID_ARGUMENT kMismatch on every rank, with each rank's version and line;
// nothing was executed. A call that is refused on one rank (a wrong number of tensors or of rows, a
// root outside the group, a failed operand, ...) carries that error there, and ends the epoch for
// the others, which are told.
//
// Ranks (`root`, `to`, `from`) are ranks in the group: Group::GroupRankOf translates those of the
// world. A *piece* is what goes from one member to another; its *rows* are its dimension 0. Pieces
// of one collective are alike but for their rows: where these differ, and only there, `rows` says
// how many each member's piece has, by rank in the group; empty means that all are equal. Forms
// "IntoTensor", "Tensor" and "Single" have all pieces in one tensor, one after the other along
// `dim` (negative: from the end), and then rows are sizes of that dimension; list forms have a
// tensor a piece. Both forms of one collective may meet. Tensors of no dimensions are pieces of one
// type, and count as one row where pieces come into one tensor.
//
// Reductions between ranks are taken in one order: with operand r of the group's rank r,
//   T(lo, n) = operand lo where n = 1, else T(lo, p) op T(lo + p, n - p),
// p the largest power of two below n, over all ranks of the group, the same for every form, piece,
// destination and coalescing. A member that takes no part in a gradient is left out: a side of a
// node in which nobody is there is nothing, and the node is its other side; a single operand is the
// result, bit for bit (AVG, PREMUL_SUM and bool apart). Factors of PREMUL_SUM are applied to the
// operands; AVG divides T by the number of all members, absent ones too; half types are f32 up to
// T, which is rounded once; a NaN T is the one NaN; MIN and MAX keep the left one of +0 and -0.
// Integers wrap; of bool, SUM and MAX are "or", PRODUCT and MIN "and". So bits are equal from run
// to run, and on all ranks that get the same, wherever the ranks are.

// How tensors are reduced: AllReduce(x, world, Reduction::kMax),
// AllReduce(x, world, ReduceOp::PremulSum(0.25)).
//   SUM                     gradient: that of the result, where the rule below says nothing else
//   AVG                     the sum by the number of members; floating point. The same by it
//   PREMUL_SUM              the sum of each member's tensor times its own factor; floating point.
//                           The same times this rank's factor, which itself is a number
//   PRODUCT                 the product of the other members' elements, never a quotient: zeros and
//                           overflow are no special case
//   MIN, MAX                NaN anywhere gives NaN. The members that hold the result (equal to it,
//                           +0 = -0; or NaN like it) share the gradient evenly, others get exactly
//                           0
//   BAND, BOR, BXOR         integers and bool; no gradient
// Where gradients are on, PRODUCT, MIN and MAX keep in forward what theirs needs of other ranks.
class ReduceOp {
 public:
  ReduceOp(Reduction reduction = Reduction::kSum)  // implicit
      : reduction_(reduction) {}
  static ReduceOp PremulSum(double factor) {
    ReduceOp op(Reduction::kPremulSum);
    op.factor_ = factor;
    op.has_factor_ = true;
    return op;
  }
  Reduction reduction() const { return reduction_; }
  double factor() const { return factor_; }
  bool has_factor() const { return has_factor_; }  // kPremulSum is nothing without

 private:
  Reduction reduction_;
  bool has_factor_ = false;
  double factor_ = 1;
};

// The reduction of all members' tensors (of one shape), to all. Equal on all: shape, reduction.
// Gradient: AllReduce of the gradients; of PRODUCT also a ReduceScatter, for those of its factors.
Tensor AllReduce(const Tensor& x, const Group& group, ReduceOp op = {},
                 CallSite site = CallSite::Here());
// The root's tensor, to all. All give a tensor of one shape; only the root's values matter.
// Equal on all: shape, root. Gradient: Reduce to the root; elsewhere zeros, with which what is
// behind x takes part: Detach it where the root's has another history.
Tensor Broadcast(const Tensor& x, int root, const Group& group, CallSite site = CallSite::Here());
// The reduction, to the root; absent elsewhere. Equal on all: shape, reduction, root.
// Gradient: Broadcast from the root; of PRODUCT, Scatter.
Tensor Reduce(const Tensor& x, int root, const Group& group, ReduceOp op = {},
              CallSite site = CallSite::Here());

// Every member's tensor, by rank. Equal on all: rows, and the other dimensions.
// Gradient: ReduceScatter.
std::vector<Tensor> AllGather(const Tensor& x, const Group& group,
                              const std::vector<int64_t>& rows = {},
                              CallSite site = CallSite::Here());
// The same one after the other along `dim`.
Tensor AllGatherIntoTensor(const Tensor& x, const Group& group,
                           const std::vector<int64_t>& rows = {}, int64_t dim = 0,
                           CallSite site = CallSite::Here());
// Every member's tensor, by rank, on the root; elsewhere one absent tensor. Equal on all: root,
// and the dimensions but for the rows. The root gives the rows where they differ; others may.
// Gradient: Scatter.
std::vector<Tensor> Gather(const Tensor& x, int root, const Group& group,
                           const std::vector<int64_t>& rows = {}, CallSite site = CallSite::Here());
// The same one after the other along `dim`; absent off the root.
Tensor GatherIntoTensor(const Tensor& x, int root, const Group& group,
                        const std::vector<int64_t>& rows = {}, int64_t dim = 0,
                        CallSite site = CallSite::Here());

// The piece for this member of the root's `xs`, which has one for each, by rank, and is not looked
// at elsewhere (leave it empty). `dtype` and `shape` are those of this member's piece, on the root
// too. Equal on all: root, and the dimensions but for the rows. Gradient: Gather.
Tensor Scatter(const std::vector<Tensor>& xs, DType dtype, const Shape& shape, int root,
               const Group& group, CallSite site = CallSite::Here());
// The same from one tensor of the root's (elsewhere Tensor()), split along `dim`. The root gives
// the rows where they differ; others may.
Tensor ScatterTensor(const Tensor& x, DType dtype, const Shape& shape, int root, const Group& group,
                     const std::vector<int64_t>& rows = {}, int64_t dim = 0,
                     CallSite site = CallSite::Here());

// `xs`: one for each member, by rank. Gives the reduction of what the members have for this one.
// Equal on all: the shape of each member's piece, reduction. Gradient: AllGather; of PRODUCT,
// AllToAll.
Tensor ReduceScatter(const std::vector<Tensor>& xs, const Group& group, ReduceOp op = {},
                     CallSite site = CallSite::Here());
// The same from one tensor, split along `dim`. Equal on all: also the rows.
Tensor ReduceScatterTensor(const Tensor& x, const Group& group, ReduceOp op = {},
                           const std::vector<int64_t>& rows = {}, int64_t dim = 0,
                           CallSite site = CallSite::Here());

// `xs`: one for each member, by rank; what comes back is what each has for this one. `rows`: of
// what comes from each. What two members say of what goes between them must be the same; all other
// dimensions are equal on all. Gradient: AllToAll back.
std::vector<Tensor> AllToAll(const std::vector<Tensor>& xs, const Group& group,
                             const std::vector<int64_t>& rows = {},
                             CallSite site = CallSite::Here());
// The same from one tensor into one, along dimension 0: `send_rows` go to each member and
// `receive_rows` come from each; both or neither.
Tensor AllToAllSingle(const Tensor& x, const Group& group,
                      const std::vector<int64_t>& send_rows = {},
                      const std::vector<int64_t>& receive_rows = {},
                      CallSite site = CallSite::Here());

// To and from one other member. The n-th Send of a step to a member with a tag meets the n-th Recv
// of that step from this one with that tag: their dtypes and shapes must be equal. Send's result is
// absent. Gradient: the opposite direction.
Tensor Send(const Tensor& x, int to, const Group& group, int64_t tag = 0,
            CallSite site = CallSite::Here());
Tensor Recv(DType dtype, const Shape& shape, int from, const Group& group, int64_t tag = 0,
            CallSite site = CallSite::Here());
// Any number of them, in one call. Each is done as soon as its peer has come, whatever the others
// wait for; results are in the order of the transfers, absent for sends. Where ranks send to each
// other, a list of more than 256 has its receives among its sends, not behind them all: no more
// than 512 runs are under way.
struct Transfer {
  static Transfer Send(Tensor x, int to, int64_t tag = 0) {
    return Transfer{true, std::move(x), DType::kUnspecified, {}, to, tag};
  }
  static Transfer Recv(DType dtype, Shape shape, int from, int64_t tag = 0) {
    return Transfer{false, Tensor(), dtype, std::move(shape), from, tag};
  }
  bool send = false;
  Tensor tensor;  // of a send
  DType dtype = DType::kUnspecified;
  Shape shape;
  int peer = -1;
  int64_t tag = 0;
};
std::vector<Tensor> BatchSendRecv(const std::vector<Transfer>& transfers, const Group& group,
                                  CallSite site = CallSite::Here());
// Absent; Wait for it returns when every member has called.
Tensor Barrier(const Group& group, CallSite site = CallSite::Here());

// Ragged: rows that are known only when the collective runs, like those of the tokens for an
// expert. They come as a tensor of i64, and another split is no other graph. `x` has its pieces one
// after the other from its first row on, and may have more rows than they take. `values` has
// `max_rows` rows: the pieces that came, one after the other, and zeros behind them; `counts` says
// how many rows came in each. Slice what is needed, once the counts have been read, or mask it.
// Equal on all: the dimensions but for the rows, root, reduction. Rows that two members do not
// agree on, that are negative, more than `x` has or than `max_rows` are INVALID_ARGUMENT on every
// rank when it runs. Gradients are those of the forms above, to any order; counts have none.
struct Ragged {
  Tensor values;
  Tensor counts;
};
// `send_counts`: rows for each member. What comes: a count of each.
Ragged AllToAllRagged(const Tensor& x, const Tensor& send_counts, int64_t max_rows,
                      const Group& group, CallSite site = CallSite::Here());
// `count`: rows of this member's piece (a tensor of one element). What comes: a count of each.
Ragged AllGatherRagged(const Tensor& x, const Tensor& count, int64_t max_rows, const Group& group,
                       CallSite site = CallSite::Here());
// The same to the root; absent elsewhere.
Ragged GatherRagged(const Tensor& x, const Tensor& count, int64_t max_rows, int root,
                    const Group& group, CallSite site = CallSite::Here());
// From the root, where `counts` says the rows for each member; elsewhere both are Tensor(). `dtype`
// and `shape` are those of `values`, so its first dimension is the most rows that may come. What
// comes: one count.
Ragged ScatterRagged(const Tensor& x, const Tensor& counts, DType dtype, const Shape& shape,
                     int root, const Group& group, CallSite site = CallSite::Here());
// `counts`: rows of each member's piece, equal on all. What comes: one count.
Ragged ReduceScatterRagged(const Tensor& x, const Tensor& counts, int64_t max_rows,
                           const Group& group, ReduceOp op = {}, CallSite site = CallSite::Here());

// Coalesced: as many collectives in one call, for many small tensors. Results, gradients and bits
// are those of the single calls in that order; what they cost is not. Every member coalesces the
// same ones: it is one call, whatever is in its list, and none where that is empty. Results come
// when all are done; an error in one of them is an error of all, and says in which it is. (A call
// of very many, with more than 4,096 inputs and results, goes in several runs. What is wrong with
// it here is an error of all; where a run fails later, those before it may have their results.)
// Shapes and dtypes may differ from one to the next; nothing in, nothing out.
std::vector<Tensor> AllReduceCoalesced(const std::vector<Tensor>& xs, const Group& group,
                                       ReduceOp op = {}, CallSite site = CallSite::Here());
std::vector<Tensor> BroadcastCoalesced(const std::vector<Tensor>& xs, int root, const Group& group,
                                       CallSite site = CallSite::Here());
std::vector<Tensor> ReduceCoalesced(const std::vector<Tensor>& xs, int root, const Group& group,
                                    ReduceOp op = {}, CallSite site = CallSite::Here());
std::vector<std::vector<Tensor>> AllGatherCoalesced(const std::vector<Tensor>& xs,
                                                    const Group& group,
                                                    CallSite site = CallSite::Here());
std::vector<Tensor> AllGatherIntoTensorCoalesced(const std::vector<Tensor>& xs, const Group& group,
                                                 CallSite site = CallSite::Here());
std::vector<Tensor> ReduceScatterCoalesced(const std::vector<std::vector<Tensor>>& xs,
                                           const Group& group, ReduceOp op = {},
                                           CallSite site = CallSite::Here());
std::vector<Tensor> ReduceScatterTensorCoalesced(const std::vector<Tensor>& xs, const Group& group,
                                                 ReduceOp op = {},
                                                 CallSite site = CallSite::Here());

}  // namespace chorus

#endif  // CHORUS_CLIENT_COLLECTIVES_H_
