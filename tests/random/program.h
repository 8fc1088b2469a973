// A program for several ranks as plain data: what each computes by itself, the collectives in which
// they meet, and the gradients that they take. Nothing here runs anything.
//
// A *rank* is a member of the world, on a device of its own. A *trainer* is a thread (or a process)
// with one session that holds the devices of one rank or of several, and makes their calls. Values
// are numbered over the whole program; each is a tensor of one rank.
//
// A program is right: run by the client in any way it has no error, its bits are the same in every
// way, and its values are those of the evaluator (evaluate.h). `Check` says why it is not, so that
// what makes or shrinks programs can try without care.
#ifndef CHORUS_TESTS_RANDOM_PROGRAM_H_
#define CHORUS_TESTS_RANDOM_PROGRAM_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/graph/graph.h"
#include "core/tensor/type.h"

namespace chorus {
namespace random_programs {

using Dims = std::vector<int64_t>;

// Numbers of a list, so that programs that were written down stay what they are: append only.
enum class Op {
  kLeaf,
  // Element by element.
  kNeg,
  kAbs,
  kRelu,
  kSin,
  kCos,
  kExp,
  kLog,
  kLog1p,
  kExpm1,
  kSqrt,
  kRsqrt,
  kSigmoid,
  kTanh,
  kErf,
  kSign,
  kFloor,
  kCeil,
  kAdd,
  kSub,
  kMul,
  kDiv,
  kMaximum,
  kMinimum,
  kPow,
  kAddNumber,
  kMulNumber,
  kLess,
  kEqual,
  kLogicalAnd,
  kLogicalNot,
  kWhere,
  kCast,  // ints: dtype
  // Reductions. ints: axes; flag: keep_dims, number 1: all axes.
  kSum,
  kMean,
  kMax,
  kMin,
  kProduct,
  // Views and shapes.
  kExpand,     // ints: shape
  kReshape,    // ints: shape
  kTranspose,  // ints: permutation
  kSlice,      // ints: axis, begin, end
  kConcat,     // ints: axis
  kDetach,
  kCopyTo,  // the result is another rank's, of the same trainer
  // Of models. ints: axis, or depth, or size and axis.
  kMatMul,
  kSoftmax,
  kLogSoftmax,
  kCrossEntropy,
  kOneHot,
  kTake,
  kScatterAdd,
  kTakeAlong,
  kScatterAddAlong,
  kArgMax,
  // In order. ints: axis, and of a sort how many; flag: descending, or from the end.
  kSort,
  kArgSort,
  kCumSum,
  // Of images. ints: stride, padding and dilation, a pair each, and groups; of the transposed one
  // also what is added to its size; of pools the kernel, stride and padding, and of the largest the
  // dilation; of the adaptive one its size. flag: padding counts.
  kConv2d,
  kConvTranspose2d,
  kMaxPool2d,
  kAvgPool2d,
  kAdaptiveAvgPool2d,
  // Layers of client/nn: of x, weight and bias.
  kLinear,
  kLayerNorm,  // over the last axis
  kGroupNorm,  // ints: the groups
  kBatchNorm,
  // Collectives: a call for each member, by rank in the group. Pieces along `dim` have `rows` where
  // not empty.
  kAllReduce,
  kBroadcast,
  kReduce,
  kAllGather,
  kAllGatherIntoTensor,
  kGather,
  kGatherIntoTensor,
  kScatter,
  kScatterTensor,
  kReduceScatter,
  kReduceScatterTensor,
  kAllToAll,        // rows: W x W, from each member to each
  kAllToAllSingle,  // the same
  kTransfer,        // ints: from, to, tag; the calls of these two
  kBarrier,
  // Ragged: the last input is the counts, the last output what came; a result has as many rows as
  // there is room for (number, where there is none).
  kAllToAllRagged,
  kAllGatherRagged,
  kGatherRagged,
  kScatterRagged,
  kReduceScatterRagged,
  // Of chorus/parallel.h: one call for all devices of a group of devices, `root` the one that has
  // or gets. ints: rows of pieces.
  kDevicesBroadcast,
  kDevicesReduceAdd,
  kDevicesScatter,
  kDevicesGather,
  // A Linear by nn::DataParallel: all that it is given, and gives, is the first device's.
  kDevicesLinear,
  // A call for each trainer that takes part. in: roots, then a seed for each (-1: ones), then what
  // is asked for (`wanted` of them); out: a gradient for each.
  kGradient,
  kCount,
};
const char* OpName(Op op);
bool IsCollective(Op op);  // of chorus.h: members of a group meet
bool IsOfDevices(Op op);
bool IsLocal(Op op);
bool CanCoalesce(Op op);

struct Call {
  int rank = -1;  // of kGradient: the trainer
  std::vector<int> in;
  std::vector<int> out;
  bool no_grad = false;
  double factor = 0;  // of PREMUL_SUM
  int wanted = 0;
};

struct Statement {
  Op op = Op::kLeaf;
  int group = -1;
  Reduction reduction = Reduction::kSum;
  int root = -1;  // a rank in the group
  int64_t dim = 0;
  std::vector<int64_t> ints;
  std::vector<int64_t> rows;
  double number = 0;
  bool flag = false;
  // In the ways that coalesce, one call with the statement before.
  bool joined = false;
  // Of a gradient.
  bool create = false;
  bool retain = false;
  bool backward = false;  // by Backward: what is asked for are leaves
  // Of a leaf.
  std::vector<double> data;
  bool requires_grad = false;
  bool captured = false;  // of a compiled function: captured, not an input
  std::vector<Call> calls;
};

struct Value {
  int rank = -1;
  DType dtype = DType::kF32;
  Dims shape;
  bool absent = false;
  bool observed = false;  // read at the end, and compared
};

struct GroupOf {
  std::vector<int> ranks;  // by rank in the group; of the world, in any order
  bool devices = false;    // a DeviceGroup: all of one trainer
};

struct Program {
  uint64_t seed = 0;
  std::vector<int> trainer_of;  // by rank
  std::vector<GroupOf> groups;  // the first: everybody, in order
  std::vector<Value> values;
  std::vector<Statement> statements;
  // Of each trainer; 0: its statements come in the program's order, else in one that this picks of
  // those that its data, its groups and its gradients allow.
  std::vector<uint64_t> shuffles;
  std::vector<int> donated;  // leaves (values) that compiled functions may take over

  int ranks() const { return static_cast<int>(trainer_of.size()); }
  int trainers() const;
  std::vector<int> RanksOf(int trainer) const;
  int AddValue(int rank, DType dtype, Dims shape, bool absent = false);
  const Value& value(int v) const { return values[static_cast<size_t>(v)]; }
};

int64_t Elements(const Dims& shape);

// OK: the program is right, as far as can be told without its numbers.
absl::Status Check(const Program& program);

// Whether the client has a tape for a value, by value: whether it can be a gradient's root.
enum class History { kNo, kMaybe, kYes };
std::vector<History> Histories(const Program& program);

// Whether `wanted`, of which the gradient statement `s` takes the gradient, may be one tensor with
// something else that its roots depend on: another gradient of the call that gave it, or a seed
// there; or is what a slope that they depend on may be computed from or not, the result of a tanh,
// sigmoid or softmax. What comes of that is the rules' of single ops: `Check` refuses it.
bool MayBeAnother(const Program& program, int s, int wanted);

// Adds what the roots of the program's gradients lack, so that every rank takes part in every
// gradient that another rank asks for. `directly`: never by way of what a broadcast is given off
// its root, whose gradient is nothing but zeros.
void Complete(Program* program, bool directly);

// The statements of a trainer, in its order. Those that were joined stay together.
std::vector<int> OrderOf(const Program& program, int trainer, bool shuffled);

// The lines that a user would write, each rank's beside each other's; for people.
std::string Lines(const Program& program);
// All of it, to be read again. INVALID_ARGUMENT: that is no program.
std::string ToText(const Program& program);
absl::StatusOr<Program> FromText(const std::string& text);

// Without values that nobody names any more.
void Compact(Program* program);

}  // namespace random_programs
}  // namespace chorus

#endif  // CHORUS_TESTS_RANDOM_PROGRAM_H_
