// The scalars that the evaluator (evaluate.h) computes with: the nodes of one graph, each with its
// value in f64, how far from it a result in its dtype may be, and edges to the nodes that it comes
// from. Here is what ops do to single elements, and how gradients follow the edges back.
//
// Threads: thread-compatible. Ownership: the graph owns its nodes; others have their numbers, which
// hold until Truncate(). Errors: INVALID_ARGUMENT, of what would be refused or has no value.
#ifndef CHORUS_TESTS_RANDOM_EVALUATE_SCALARS_H_
#define CHORUS_TESTS_RANDOM_EVALUATE_SCALARS_H_

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "tests/random/program.h"

namespace chorus {
namespace random_programs {

// The error of what is not known.
inline constexpr double kUnknown = std::numeric_limits<double>::infinity();
// An edge's factor, where it is not known what share of the gradient goes there.
inline constexpr double kNoShare = std::numeric_limits<double>::quiet_NaN();

enum class Kind : uint8_t { kConstant, kLinear, kMul, kDiv, kPow, kFunction };
enum class Function : uint8_t {
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
  kErf
};

struct Node {
  double value = 0;
  double error = 0;
  uint32_t first = 0;  // of its edges
  uint32_t count = 0;
  Kind kind = Kind::kConstant;
  Function function = Function::kSin;
  DType dtype = DType::kF32;
};
// An integer's value in two's complement, for arithmetic that wraps.
uint64_t Bits(const Node& n);

struct Edge {
  int node = -1;
  double factor = 1;
};
using Edges = std::vector<Edge>;

// INVALID_ARGUMENT: `why` there is no value.
absl::Status No(const std::string& why);

class ScalarGraph {
 public:
  // Valid until a node is added.
  const Node& at(int n) const { return nodes_[static_cast<size_t>(n)]; }
  size_t nodes() const { return nodes_.size(); }
  size_t edges() const { return edges_.size(); }
  // Takes back all nodes and edges but the first so many.
  void Truncate(size_t nodes, size_t edges);

  int Constant(DType dtype, double value, double error = 0);
  // What is left of `bits` (Bits(), or arithmetic on them) in an integer of `dtype`.
  int Integer(DType dtype, double error, uint64_t bits);
  // The same number, through which no gradient goes.
  int Detached(int n);
  // The same number, another node.
  int Copy(int n);
  // The sum of factor times node. `fused`: added up in the accumulator's precision.
  int Linear(DType dtype, const Edges& edges, bool fused = true);
  // One of the inputs, or of what is not looked at, that passes its gradient on in shares.
  int Chosen(DType dtype, double value, double error, const Edges& shares);
  int Mul(DType dtype, int a, int b);

  // An op of two elements or of one, which are of `dtype`.
  absl::StatusOr<int> Binary(Op op, DType dtype, int a, int b);
  absl::StatusOr<int> Unary(const Statement& s, DType dtype, int a);
  int Converted(int a, DType to);
  // A reduction of elements of several ranks or indices. `factors`: of PREMUL_SUM.
  absl::StatusOr<int> Reduced(Reduction reduction, DType dtype, const std::vector<int>& of,
                              const std::vector<double>& factors);
  std::vector<int> Softmax(DType dtype, const std::vector<int>& x, bool logarithm);

  // The gradient of the sum of root times seed, for each of `wanted`.
  std::vector<int> Reverse(const std::vector<std::pair<int, int>>& roots,
                           const std::vector<int>& wanted);

 private:
  int Push(Node node, const Edges& edges);
  int Div(DType dtype, int a, int b);
  int Apply1(Function f, DType dtype, int a);
  int Power(DType dtype, int a, int b);
  // Of y = f(x), at x.
  int Derivative(Function f, DType dtype, int x, int y);
  // The greatest (sign 1) or least (-1) of some, whose holders share the gradient evenly.
  int Extreme(DType dtype, const std::vector<int>& of, double sign);
  // 1 yes, 0 no, unknown where it cannot be told.
  int Bool(double value, bool known);
  int Compared(int a, int b, bool equal);

  std::vector<Node> nodes_;
  Edges edges_;
};

}  // namespace random_programs
}  // namespace chorus

#endif  // CHORUS_TESTS_RANDOM_EVALUATE_SCALARS_H_
