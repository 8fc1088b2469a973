// What a program's values are, computed by itself: every element is a node of one graph of scalars
// over all ranks at once, in f64. Collectives are wires in it; gradients, of any order, are taken
// by following its edges back, with the derivatives of a dozen scalar functions. It shares no code
// with the client, the ops' rules or the backends, and no formula for the gradient of anything
// larger than a scalar.
//
// Each node knows how far from it a result may be that is computed in its dtype: what comes in with
// its inputs, and what it rounds itself. Where that decides (which of two nearly equal numbers is
// the larger), what follows is not known: an infinite error.
#ifndef CHORUS_TESTS_RANDOM_EVALUATE_H_
#define CHORUS_TESTS_RANDOM_EVALUATE_H_

#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "tests/random/program.h"

namespace chorus {
namespace random_programs {

struct Numbers {
  std::vector<double> values;
  std::vector<double> errors;  // infinite: not known
};

// Ops may take other ways to a number than the evaluator: one is right that is off by this many
// times its error.
inline constexpr double kSlack = 8;

// Threads: thread-compatible.
class Evaluator {
 public:
  Evaluator();
  ~Evaluator();

  // The next statement of `program`. INVALID_ARGUMENT: it would be refused, or has no value (an
  // index out of range, a division by 0, a shape that is not what the program says); the evaluator
  // is then as before. A result of no elements or an absent one is one without numbers.
  absl::Status Add(const Program& program, int statement);

  Numbers Of(int value) const;
  // Takes back what was added since.
  struct Mark {
    size_t nodes = 0;
    size_t edges = 0;
  };
  Mark Now() const;
  void Undo(const Mark& mark);
  size_t size() const;  // nodes

 private:
  class Graph;
  std::unique_ptr<Graph> graph_;
};

// By value. Programs that are too large (by their graph's nodes) are refused, too.
absl::StatusOr<std::vector<Numbers>> Evaluate(const Program& program);

// `x` as a tensor of that dtype would hold it.
double RoundTo(DType dtype, double x);

}  // namespace random_programs
}  // namespace chorus

#endif  // CHORUS_TESTS_RANDOM_EVALUATE_H_
