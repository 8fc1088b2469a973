// Ops that a rank computes by itself, chosen at random: of one element or two, reductions, views,
// those of models, of indices and of an order.
//
// Threads: thread-compatible. Ownership: all that it is given is the caller's and outlives it; the
// draft is that of the program. Errors: none; false says that nothing was added.
#ifndef CHORUS_TESTS_RANDOM_LOCAL_OPS_H_
#define CHORUS_TESTS_RANDOM_LOCAL_OPS_H_

#include "tests/random/draft.h"
#include "tests/random/program.h"
#include "tests/random/random.h"

namespace chorus {
namespace random_programs {

class LocalOps {
 public:
  LocalOps(const Settings* settings, Random* random, const Program* program, Draft* draft)
      : settings_(settings), random_(random), program_(program), draft_(draft) {}

  // Adds one, of any rank, and the leaves that it needs.
  bool Add();
  // Many small ops of one rank and type, one behind the other: what is sent together, and waits for
  // this collective or that.
  void Burst();

 private:
  bool Unary(int rank);
  bool Binary(int rank);
  bool Number(int rank);
  bool Reduction1(int rank);
  bool View(int rank);
  bool Model(int rank);
  bool Indexed(int rank);
  bool Ordered(int rank);
  bool Convolution(int rank);
  bool Pool(int rank);
  bool Layer(int rank);
  // A GroupNorm or a BatchNorm.
  bool NormOfChannels(int rank);
  bool Select(int rank);
  // Images [n, channels, height, width], of a dtype that is floating: there already, or a leaf's.
  int Images(int rank, int64_t channels);

  const Settings* const settings_;
  Random* const random_;
  const Program* const program_;
  Draft* const draft_;
};

}  // namespace random_programs
}  // namespace chorus

#endif  // CHORUS_TESTS_RANDOM_LOCAL_OPS_H_
