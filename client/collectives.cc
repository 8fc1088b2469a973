#include "chorus/collectives.h"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "chorus/math.h"
#include "client/internal/access.h"
#include "client/internal/errors.h"
#include "client/internal/local.h"
#include "client/internal/member.h"
#include "client/internal/record.h"
#include "client/internal/run_draft.h"
#include "client/internal/tape.h"
#include "client/internal/tensor_data.h"
#include "core/base/error.h"
#include "core/collective/instance.h"
#include "core/ops/registry.h"

namespace chorus {
namespace {

using internal::AllReduceIn;
using internal::ApplyCollective;
using internal::ApplyCollectives;
using internal::Axis;
using internal::CallInRuns;
using internal::CallRequest;
using internal::CoreOf;
using internal::Fail;
using internal::FailedTensor;
using internal::ImplOf;
using internal::IsUsable;
using internal::kMaxRunValues;
using internal::MemberCall;
using internal::MemberOf;
using internal::NumberOf;
using internal::Results;
using internal::SourceOf;
using internal::TensorData;
using internal::TypeText;
using internal::WithSource;

// Looked up once.
struct CollectiveOps {
  const OpDef* all_gather = FindOp("all_gather");
  const OpDef* all_gather_into_tensor = FindOp("all_gather_into_tensor");
  const OpDef* all_reduce = FindOp("all_reduce");
  const OpDef* all_to_all = FindOp("all_to_all");
  const OpDef* all_to_all_single = FindOp("all_to_all_single");
  const OpDef* barrier = FindOp("barrier");
  const OpDef* broadcast = FindOp("broadcast");
  const OpDef* gather = FindOp("gather");
  const OpDef* gather_into_tensor = FindOp("gather_into_tensor");
  const OpDef* recv = FindOp("recv");
  const OpDef* reduce = FindOp("reduce");
  const OpDef* reduce_scatter = FindOp("reduce_scatter");
  const OpDef* reduce_scatter_tensor = FindOp("reduce_scatter_tensor");
  const OpDef* scatter = FindOp("scatter");
  const OpDef* scatter_tensor = FindOp("scatter_tensor");
  const OpDef* send = FindOp("send");
};
const CollectiveOps& Ops() {
  static const CollectiveOps ops;
  return ops;
}

absl::Span<const Tensor> Only(const Tensor& x) { return absl::MakeConstSpan(&x, 1); }
Tensor One(Results results) { return std::move(results[0]); }

// Of a list form; a refused call carries its error in every result.
std::vector<Tensor> List(Results results, int size) {
  if (!results[0].status().ok()) {
    return std::vector<Tensor>(static_cast<size_t>(std::max(1, size)), results[0]);
  }
  return std::vector<Tensor>(std::make_move_iterator(results.begin()),
                             std::make_move_iterator(results.end()));
}

// The call of the member that this process is.
Results CallAsMember(const CallRequest& call, absl::Span<const Tensor> inputs, const Group& group) {
  return ApplyCollective(call, inputs, MemberOf(group), CoreOf(group));
}

// This member is refused: as if its operand had failed.
Results RefuseHere(const CallRequest& call, const Group& group, absl::string_view problem) {
  const std::string text = absl::StrCat(call.spec.op->name, ": ", problem);
  const Tensor bad = FailedTensor(MemberOf(group) == nullptr ? nullptr : MemberOf(group)->session,
                                  WithSource(BadType(text), SourceOf(call.spec.site)));
  return CallAsMember(call, Only(bad), group);
}

// The factor of PREMUL_SUM beside such tensors.
Tensor FactorOf(const ReduceOp& op, absl::Span<const Tensor> xs, CallSite site) {
  // What is wrong with the tensors is said of them.
  if (xs.empty() || !IsUsable(xs[0])) return Tensor();
  const TensorData& data = *ImplOf(xs[0])->data;
  if (!op.has_factor()) {
    return Fail(xs[0], BadType("PREMUL_SUM: expected ReduceOp::PremulSum(factor), got no factor"),
                site);
  }
  return NumberOf(FactorType(data.info->type.dtype), op.factor(), data.session, data.device_slot,
                  site);
}

Results ApplyReduction(CallRequest&& call, absl::Span<const Tensor> xs, const Group& group,
                       const ReduceOp& op) {
  call.spec.collective.reduction = op.reduction();
  if (op.reduction() != Reduction::kPremulSum) return CallAsMember(call, xs, group);
  std::vector<Tensor> operands(xs.begin(), xs.end());
  operands.push_back(FactorOf(op, xs, call.spec.site));
  return CallAsMember(call, operands, group);
}

// `x` with axis `dim` in front, which collectives take apart; and back.
Tensor ToFront(const char* op, const Tensor& x, int64_t dim, CallSite site) {
  if (!IsUsable(x) || dim == 0) return x;
  const absl::StatusOr<int64_t> axis = Axis(op, x, dim);
  if (!axis.ok()) return Fail(x, axis.status(), site);
  if (*axis == 0) return x;
  std::vector<int64_t> permutation = {*axis};
  for (int64_t i = 0; i < static_cast<int64_t>(x.shape().size()); ++i) {
    if (i != *axis) permutation.push_back(i);
  }
  return Transpose(x, permutation, site);
}
Tensor FromFront(const Tensor& y, int64_t dim, CallSite site) {
  if (!IsUsable(y) || dim == 0) return y;
  const int64_t rank = static_cast<int64_t>(y.shape().size());
  const int64_t axis = dim < 0 ? dim + rank : dim;
  if (axis == 0) return y;
  std::vector<int64_t> permutation;
  for (int64_t i = 1; i <= axis; ++i) permutation.push_back(i);
  permutation.push_back(0);
  for (int64_t i = axis + 1; i < rank; ++i) permutation.push_back(i);
  return Transpose(y, permutation, site);
}
// Pieces of no dimensions count as one row where they come into one tensor.
Tensor AsRow(const Tensor& x, CallSite site) {
  return IsUsable(x) && x.shape().empty() ? Reshape(x, {1}, site) : x;
}

TensorType TypeOfPiece(DType dtype, const Shape& shape) {
  TensorType type(dtype, {});
  for (const int64_t size : shape) type.dims.emplace_back(size);
  return type;
}

Results ApplyBroadcast(const Tensor& x, int root, const Group& group, CallSite site) {
  CallRequest call(Ops().broadcast, site);
  call.spec.collective.root = GroupRank(root);
  if (!IsUsable(x) || group.rank() == root) return CallAsMember(call, Only(x), group);
  // Off the root only the type counts, and what is behind it: the root's x has a gradient.
  call.spec.type = &ImplOf(x)->data->info->type;
  call.behind = Only(x);
  return CallAsMember(call, {}, group);
}

}  // namespace

Tensor AllReduce(const Tensor& x, const Group& group, ReduceOp op, CallSite site) {
  return AllReduceIn(nullptr, x, group, op, site);
}

Tensor internal::AllReduceIn(CallInRuns* runs, const Tensor& x, const Group& group,
                             const ReduceOp& op, CallSite site) {
  CallRequest call(Ops().all_reduce, site);
  call.runs = runs;
  return One(ApplyReduction(std::move(call), Only(x), group, op));
}

Tensor Broadcast(const Tensor& x, int root, const Group& group, CallSite site) {
  return One(ApplyBroadcast(x, root, group, site));
}

Tensor Reduce(const Tensor& x, int root, const Group& group, ReduceOp op, CallSite site) {
  CallRequest call(Ops().reduce, site);
  call.spec.collective.root = GroupRank(root);
  return One(ApplyReduction(std::move(call), Only(x), group, op));
}

std::vector<Tensor> AllGather(const Tensor& x, const Group& group, const std::vector<int64_t>& rows,
                              CallSite site) {
  CallRequest call(Ops().all_gather, site);
  call.spec.collective.counts = rows;
  return List(CallAsMember(call, Only(x), group), group.size());
}

Tensor internal::AllGatherIntoTensorIn(CallInRuns* runs, const Tensor& x, const Group& group,
                                       CallSite site) {
  CallRequest call(Ops().all_gather_into_tensor, site);
  call.runs = runs;
  return One(CallAsMember(call, Only(x), group));
}

Tensor AllGatherIntoTensor(const Tensor& x, const Group& group, const std::vector<int64_t>& rows,
                           int64_t dim, CallSite site) {
  CallRequest call(Ops().all_gather_into_tensor, site);
  call.spec.collective.counts = rows;
  const Tensor piece = ToFront("all_gather_into_tensor", AsRow(x, site), dim, site);
  return FromFront(One(CallAsMember(call, Only(piece), group)), dim, site);
}

std::vector<Tensor> Gather(const Tensor& x, int root, const Group& group,
                           const std::vector<int64_t>& rows, CallSite site) {
  CallRequest call(Ops().gather, site);
  call.spec.collective.root = GroupRank(root);
  call.spec.collective.counts = rows;
  return List(CallAsMember(call, Only(x), group), group.rank() == root ? group.size() : 1);
}

Tensor GatherIntoTensor(const Tensor& x, int root, const Group& group,
                        const std::vector<int64_t>& rows, int64_t dim, CallSite site) {
  CallRequest call(Ops().gather_into_tensor, site);
  call.spec.collective.root = GroupRank(root);
  call.spec.collective.counts = rows;
  const Tensor piece = ToFront("gather_into_tensor", AsRow(x, site), dim, site);
  return FromFront(One(CallAsMember(call, Only(piece), group)), dim, site);
}

Tensor Scatter(const std::vector<Tensor>& xs, DType dtype, const Shape& shape, int root,
               const Group& group, CallSite site) {
  CallRequest call(Ops().scatter, site);
  call.spec.collective.root = GroupRank(root);
  const TensorType type = TypeOfPiece(dtype, shape);
  if (group.rank() != root || CoreOf(group) == nullptr) {
    call.spec.type = &type;
    call.behind = xs;
    return One(CallAsMember(call, {}, group));
  }
  const size_t root_index = static_cast<size_t>(root);
  if (xs.size() == static_cast<size_t>(group.size()) && IsUsable(xs[root_index]) &&
      ImplOf(xs[root_index])->data->info->type != type) {
    return One(RefuseHere(call, group,
                          absl::StrCat("expected the root's own piece, tensor ", root, ", as ",
                                       type.ToString(), ", which it says, got ",
                                       ImplOf(xs[root_index])->data->info->type.ToString())));
  }
  return One(CallAsMember(call, xs, group));
}

Tensor ScatterTensor(const Tensor& x, DType dtype, const Shape& shape, int root, const Group& group,
                     const std::vector<int64_t>& rows, int64_t dim, CallSite site) {
  CallRequest call(Ops().scatter_tensor, site);
  call.spec.collective.root = GroupRank(root);
  const int64_t rank = static_cast<int64_t>(shape.size());
  if (dim < -rank || dim >= rank) {
    return One(RefuseHere(call, group,
                          absl::StrCat("expected an axis of the pieces, ",
                                       TypeOfPiece(dtype, shape).ToString(), ", got ", dim)));
  }
  const size_t axis = static_cast<size_t>(dim < 0 ? dim + rank : dim);
  Shape turned = shape;
  std::rotate(turned.begin(), turned.begin() + static_cast<std::ptrdiff_t>(axis),
              turned.begin() + static_cast<std::ptrdiff_t>(axis) + 1);
  if (!rows.empty() && rows.size() == static_cast<size_t>(group.size()) &&
      rows[static_cast<size_t>(group.rank())] != turned[0]) {
    return One(RefuseHere(call, group,
                          absl::StrCat("expected ", rows[static_cast<size_t>(group.rank())],
                                       " rows for this rank, by the list of them, got ",
                                       TypeOfPiece(dtype, shape).ToString())));
  }
  const TensorType type = TypeOfPiece(dtype, turned);
  if (group.rank() != root || CoreOf(group) == nullptr) {
    call.spec.type = &type;
    call.behind = Only(x);
    return FromFront(One(CallAsMember(call, {}, group)), dim, site);
  }
  call.spec.collective.counts = rows;
  const Tensor whole = ToFront("scatter_tensor", x, dim, site);
  if (IsUsable(whole)) {
    // What the root says of its own piece; how the tensor is split is the op's to check.
    TensorType piece = ImplOf(whole)->data->info->type;
    const int64_t size = group.size();
    if (!piece.dims.empty() && (!rows.empty() || piece.dims[0].size % size == 0)) {
      piece.dims[0] = rows.empty() ? piece.dims[0].size / size : turned[0];
      if (piece != type) {
        return One(RefuseHere(
            call, group,
            absl::StrCat("expected pieces like ", type.ToString(), ", which the root says, got ",
                         piece.ToString(), " of ", TypeText(x))));
      }
    }
  }
  return FromFront(One(CallAsMember(call, Only(whole), group)), dim, site);
}

Tensor ReduceScatter(const std::vector<Tensor>& xs, const Group& group, ReduceOp op,
                     CallSite site) {
  return One(ApplyReduction(CallRequest(Ops().reduce_scatter, site), xs, group, op));
}

Tensor ReduceScatterTensor(const Tensor& x, const Group& group, ReduceOp op,
                           const std::vector<int64_t>& rows, int64_t dim, CallSite site) {
  CallRequest call(Ops().reduce_scatter_tensor, site);
  call.spec.collective.counts = rows;
  const Tensor whole = ToFront("reduce_scatter_tensor", x, dim, site);
  return FromFront(One(ApplyReduction(std::move(call), Only(whole), group, op)), dim, site);
}

std::vector<Tensor> AllToAll(const std::vector<Tensor>& xs, const Group& group,
                             const std::vector<int64_t>& rows, CallSite site) {
  CallRequest call(Ops().all_to_all, site);
  call.spec.collective.counts = rows;
  return List(CallAsMember(call, xs, group), group.size());
}

Tensor AllToAllSingle(const Tensor& x, const Group& group, const std::vector<int64_t>& send_rows,
                      const std::vector<int64_t>& receive_rows, CallSite site) {
  CallRequest call(Ops().all_to_all_single, site);
  const size_t size = static_cast<size_t>(group.size());
  const bool even = send_rows.empty() && receive_rows.empty();
  if (!even && (send_rows.size() != size || receive_rows.size() != size)) {
    return One(RefuseHere(call, group,
                          absl::StrCat("expected rows to send to and to receive from each of ",
                                       size, " members, or neither, got ", send_rows.size(),
                                       " and ", receive_rows.size())));
  }
  std::vector<int64_t> counts = send_rows;
  counts.insert(counts.end(), receive_rows.begin(), receive_rows.end());
  call.spec.collective.counts = std::move(counts);
  return One(CallAsMember(call, Only(x), group));
}

Tensor Send(const Tensor& x, int to, const Group& group, int64_t tag, CallSite site) {
  CallRequest call(Ops().send, site);
  call.spec.collective.peer = GroupRank(to);
  call.spec.collective.tag = tag;
  return One(CallAsMember(call, Only(x), group));
}

Tensor Recv(DType dtype, const Shape& shape, int from, const Group& group, int64_t tag,
            CallSite site) {
  CallRequest call(Ops().recv, site);
  call.spec.collective.peer = GroupRank(from);
  call.spec.collective.tag = tag;
  const TensorType type = TypeOfPiece(dtype, shape);
  call.spec.type = &type;
  return One(CallAsMember(call, {}, group));
}

std::vector<Tensor> BatchSendRecv(const std::vector<Transfer>& transfers, const Group& group,
                                  CallSite site) {
  std::vector<Tensor> results;
  results.reserve(transfers.size());
  for (const Transfer& t : transfers) {
    results.push_back(t.send ? Send(t.tensor, t.peer, group, t.tag, site)
                             : Recv(t.dtype, t.shape, t.peer, group, t.tag, site));
  }
  return results;
}

Tensor Barrier(const Group& group, CallSite site) {
  return One(CallAsMember(CallRequest(Ops().barrier, site), {}, group));
}

// --- Ragged -------------------------------------------------------------------------------------

namespace {

// A call on `x` and its counts, whose result has room for so many rows.
CallRequest RaggedCall(const OpDef* op, int64_t max_rows, CallSite site) {
  CallRequest call(op, site);
  call.spec.collective.runtime_counts_input = 1;
  call.spec.collective.runtime_count_maximum = max_rows;
  return call;
}

Ragged Both(const Results& results) { return {results.front(), results.back()}; }

}  // namespace

Ragged AllToAllRagged(const Tensor& x, const Tensor& send_counts, int64_t max_rows,
                      const Group& group, CallSite site) {
  return Both(
      CallAsMember(RaggedCall(Ops().all_to_all_single, max_rows, site), {x, send_counts}, group));
}

Ragged AllGatherRagged(const Tensor& x, const Tensor& count, int64_t max_rows, const Group& group,
                       CallSite site) {
  return Both(CallAsMember(RaggedCall(Ops().all_gather_into_tensor, max_rows, site),
                           {x, AsRow(count, site)}, group));
}

Ragged GatherRagged(const Tensor& x, const Tensor& count, int64_t max_rows, int root,
                    const Group& group, CallSite site) {
  CallRequest call = RaggedCall(Ops().gather_into_tensor, max_rows, site);
  call.spec.collective.root = GroupRank(root);
  return Both(CallAsMember(call, {x, AsRow(count, site)}, group));
}

Ragged ScatterRagged(const Tensor& x, const Tensor& counts, DType dtype, const Shape& shape,
                     int root, const Group& group, CallSite site) {
  CallRequest call = RaggedCall(Ops().scatter_tensor, shape.empty() ? 0 : shape[0], site);
  call.spec.collective.root = GroupRank(root);
  const TensorType type = TypeOfPiece(dtype, shape);
  if (group.rank() != root || CoreOf(group) == nullptr) {
    call.spec.type = &type;
    call.behind = Only(x);
    call.spec.collective.runtime_counts_input = 0;
    return Both(CallAsMember(call, {}, group));
  }
  if (IsUsable(x)) {
    TensorType row_type = ImplOf(x)->data->info->type;
    if (!row_type.dims.empty() && !shape.empty()) row_type.dims[0] = Dim(shape[0]);
    if (row_type != type) {
      return Both(RefuseHere(call, group,
                             absl::StrCat("expected rows like those of ", type.ToString(),
                                          ", which the root says, got ", TypeText(x))));
    }
  }
  return Both(CallAsMember(call, {x, counts}, group));
}

Ragged ReduceScatterRagged(const Tensor& x, const Tensor& counts, int64_t max_rows,
                           const Group& group, ReduceOp op, CallSite site) {
  return Both(ApplyReduction(RaggedCall(Ops().reduce_scatter_tensor, max_rows, site), {x, counts},
                             group, op));
}

// --- Coalesced ----------------------------------------------------------------------------------

namespace {

// One of a group that is empty, whose calls are refused.
size_t MembersOf(const Group& group) { return static_cast<size_t>(std::max(1, group.size())); }

// What one call has on each member, at most.
struct CallSize {
  size_t results = 0;
  size_t peers = 0;  // whose operands are read where they stand
};

// `calls[i]` on `inputs[i]`, as few runs as may be, cut alike on all ranks: one call, however many
// they are.
std::vector<Results> ApplyCoalesced(std::vector<CallRequest> calls,
                                    const std::vector<absl::Span<const Tensor>>& inputs,
                                    const CallSize& size, const Group& group) {
  std::vector<Results> results;
  results.reserve(calls.size());
  CallInRuns runs;
  std::vector<MemberCall> run;
  size_t values = 0;
  // What one call adds to its gang: on each member itself, its results, and those operands, of
  // which four count as one.
  const size_t members = MembersOf(group);
  constexpr auto kMaxGangSize = static_cast<size_t>(kDefaultMaxGangSize);
  const size_t of_gang = members * (1 + size.results) + members * size.peers / 4;
  const auto submit = [&] {
    std::vector<Results> run_results = ApplyCollectives(run);
    std::move(run_results.begin(), run_results.end(), std::back_inserter(results));
    run.clear();
    values = 0;
  };
  const auto refused = [&results] { return !results.empty() && !results.back()[0].status().ok(); };
  for (size_t i = 0; i < calls.size(); ++i) {
    // An operand counts also where the root alone has one: a run of 2,048 collectives is full.
    const size_t call_values = std::max<size_t>(1, inputs[i].size()) + size.results;
    if (!run.empty() &&
        (values + call_values > kMaxRunValues || (run.size() + 1) * of_gang > kMaxGangSize)) {
      submit();
      if (refused()) break;
    }
    calls[i].runs = &runs;
    run.push_back({&calls[i], inputs[i], &MemberOf(group), CoreOf(group)});
    values += call_values;
  }
  runs.last = true;
  if (!run.empty() && !refused()) submit();
  // It is one call: a run that is refused takes with it the rest, and what has been sent.
  if (refused()) results.assign(calls.size(), Results(results.back()));
  return results;
}

std::vector<Tensor> OneEach(std::vector<Results> results) {
  std::vector<Tensor> tensors;
  tensors.reserve(results.size());
  for (Results& result : results) tensors.push_back(std::move(result[0]));
  return tensors;
}

// The same call on each of `xs`.
std::vector<Results> ApplyEach(const CallRequest& call,
                               const std::vector<absl::Span<const Tensor>>& xs,
                               const CallSize& size, const Group& group) {
  return ApplyCoalesced(std::vector<CallRequest>(xs.size(), call), xs, size, group);
}

std::vector<absl::Span<const Tensor>> Singly(const std::vector<Tensor>& xs) {
  std::vector<absl::Span<const Tensor>> spans;
  spans.reserve(xs.size());
  for (const Tensor& x : xs) spans.push_back(Only(x));
  return spans;
}

std::vector<Tensor> ReduceEach(CallRequest call, const std::vector<absl::Span<const Tensor>>& xs,
                               const Group& group, const ReduceOp& op) {
  call.spec.collective.reduction = op.reduction();
  if (op.reduction() != Reduction::kPremulSum) {
    // What a gradient needs of the other members: who holds an extreme, or all factors.
    const bool is_sum = op.reduction() == Reduction::kSum || op.reduction() == Reduction::kAvg;
    const size_t extras = is_sum ? 0 : MembersOf(group);
    return OneEach(ApplyEach(call, xs, {1 + extras, 0}, group));
  }
  std::vector<std::vector<Tensor>> operands;
  std::vector<absl::Span<const Tensor>> spans;
  for (const absl::Span<const Tensor> x : xs) {
    operands.emplace_back(x.begin(), x.end());
    operands.back().push_back(FactorOf(op, x, call.spec.site));
  }
  for (const std::vector<Tensor>& x : operands) spans.push_back(x);
  return OneEach(ApplyEach(call, spans, {1, 0}, group));
}

}  // namespace

std::vector<Tensor> AllReduceCoalesced(const std::vector<Tensor>& xs, const Group& group,
                                       ReduceOp op, CallSite site) {
  return ReduceEach(CallRequest(Ops().all_reduce, site), Singly(xs), group, op);
}

std::vector<Tensor> BroadcastCoalesced(const std::vector<Tensor>& xs, int root, const Group& group,
                                       CallSite site) {
  CallRequest call(Ops().broadcast, site);
  call.spec.collective.root = GroupRank(root);
  std::vector<CallRequest> calls(xs.size(), call);
  std::vector<absl::Span<const Tensor>> inputs = Singly(xs);
  for (size_t i = 0; i < xs.size(); ++i) {
    if (!IsUsable(xs[i]) || group.rank() == root) continue;
    calls[i].spec.type = &ImplOf(xs[i])->data->info->type;
    calls[i].behind = Only(xs[i]);
    inputs[i] = {};
  }
  return OneEach(ApplyCoalesced(calls, inputs, {1, 1}, group));
}

std::vector<Tensor> ReduceCoalesced(const std::vector<Tensor>& xs, int root, const Group& group,
                                    ReduceOp op, CallSite site) {
  CallRequest call(Ops().reduce, site);
  call.spec.collective.root = GroupRank(root);
  return ReduceEach(call, Singly(xs), group, op);
}

std::vector<std::vector<Tensor>> AllGatherCoalesced(const std::vector<Tensor>& xs,
                                                    const Group& group, CallSite site) {
  const size_t members = MembersOf(group);
  std::vector<std::vector<Tensor>> lists;
  for (Results& results :
       ApplyEach(CallRequest(Ops().all_gather, site), Singly(xs), {members, members}, group)) {
    lists.push_back(List(std::move(results), group.size()));
  }
  return lists;
}

std::vector<Tensor> AllGatherIntoTensorCoalesced(const std::vector<Tensor>& xs, const Group& group,
                                                 CallSite site) {
  std::vector<Tensor> pieces;
  for (const Tensor& x : xs) pieces.push_back(AsRow(x, site));
  const size_t members = MembersOf(group);
  return OneEach(ApplyEach(CallRequest(Ops().all_gather_into_tensor, site), Singly(pieces),
                           {1, members}, group));
}

std::vector<Tensor> ReduceScatterCoalesced(const std::vector<std::vector<Tensor>>& xs,
                                           const Group& group, ReduceOp op, CallSite site) {
  std::vector<absl::Span<const Tensor>> spans(xs.begin(), xs.end());
  return ReduceEach(CallRequest(Ops().reduce_scatter, site), spans, group, op);
}

std::vector<Tensor> ReduceScatterTensorCoalesced(const std::vector<Tensor>& xs, const Group& group,
                                                 ReduceOp op, CallSite site) {
  return ReduceEach(CallRequest(Ops().reduce_scatter_tensor, site), Singly(xs), group, op);
}

}  // namespace chorus
