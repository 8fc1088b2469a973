// A program while it is made, for what decides which statement comes next (generate.cc): the values
// that a statement may read, there already or made for it, and whether it stays. What stays is
// right, and its numbers are of moderate size.
//
// Threads: thread-compatible. Ownership: the settings, the source of randomness and the program are
// the caller's and outlive it. Errors: none; a statement that is wrong or gives too large numbers
// is taken out again, and false says so.
#ifndef CHORUS_TESTS_RANDOM_DRAFT_H_
#define CHORUS_TESTS_RANDOM_DRAFT_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tests/random/evaluate.h"
#include "tests/random/program.h"
#include "tests/random/random.h"

namespace chorus {
namespace random_programs {

// What was drawn for the program as a whole.
struct Settings {
  DType dtype = DType::kF32;  // of most values
  int orders = 0;             // of gradients
  bool no_grads = false;      // some calls record nothing
  bool coarse = false;        // only small integers and their quarters
  std::vector<bool> without;  // by rank: few or no leaves that require a gradient
  std::string unwanted;       // no ops whose names contain it; empty: all
};

class Draft {
 public:
  Draft(const Settings* settings, Random* random, Program* program)
      : settings_(settings), random_(random), program_(program) {}

  DType SomeDType();
  Dims SomeShape();
  std::vector<double> SomeData(DType dtype, int64_t n);

  // New leaves, of `data` or, where that is empty, of some.
  int Leaf(int rank, DType dtype, const Dims& shape, bool may_have_gradient,
           std::vector<double> data = {});
  int Indices(int rank, const Dims& shape, int64_t below);
  int CountsOf(int rank, const std::vector<int64_t>& counts);

  // One that is there, the later the likelier; -1: none.
  int Existing(int rank, const std::function<bool(const Value&)>& fits);
  // One that is there, or a leaf.
  int SomeFloat(int rank);
  int SomeNumbers(int rank);
  // A value of that type: one that is there, one made from another, or a leaf.
  int Operand(int rank, DType dtype, const Dims& shape);

  // A statement of one call that gives one value, still to be tried.
  Statement Of(Op op, int rank, std::vector<int> in, DType dtype, const Dims& shape,
               int out_rank = -1);
  // Adds it, if what it gives is sound and of moderate size.
  bool Try(Statement s);
  // The same for all of the program's statements from `first` on: they stay or go together. Unless
  // `good` they go.
  bool Settle(int first, double largest, bool good);
  // A value that nothing gives: nobody may use it.
  void Orphan(size_t v);

 private:
  bool IsWanted(Op op) const;
  bool Moderate(int v, double largest);

  const Settings* const settings_;
  Random* const random_;
  Program* const program_;
  Evaluator evaluator_;  // of the program's statements
};

}  // namespace random_programs
}  // namespace chorus

#endif  // CHORUS_TESTS_RANDOM_DRAFT_H_
