// Whether what the ranks got is what a vector says.
//
// Pure: plain data in, texts out.
#ifndef CHORUS_TESTS_VECTORS_CHECK_H_
#define CHORUS_TESTS_VECTORS_CHECK_H_

#include <string>
#include <vector>

#include "absl/types/optional.h"
#include "tests/vectors/array.h"
#include "tests/vectors/vector.h"

namespace chorus {
namespace vectors {

// A vector with ranks that skip backward is run twice: as it stands, and with these ranks joining
// with zeros, because what they would get is in it too.
enum class Pass { kAsItStands, kAllJoin };

bool NeedsAllJoin(const Vector& v);
// Whether a rank asks for its gradients of first (second) order. In one process all devices do, if
// any has an upstream gradient: it is one call.
bool AsksFirst(const Vector& v, size_t rank, Pass pass);
bool AsksSecond(const Vector& v, size_t rank, Pass pass);

struct RankResults {
  std::vector<Array> y;        // without absent ones
  std::vector<Array> y_again;  // of another run of the same; only where `second` asks for it
  absl::optional<Row> xbar;
  absl::optional<Row> G;
  absl::optional<Row> dS;
  double S = 0;  // this rank's part
};

// What is wrong, each in one line, in the order y, xbar, G, S, dS and by rank; empty: nothing.
// "y rank 1 tensor 0 element 3: got 2, want 1, tolerance 1e-15".
std::vector<std::string> Check(const Vector& v, const Tolerance& tolerance, Pass pass,
                               const std::vector<RankResults>& got);

}  // namespace vectors
}  // namespace chorus

#endif  // CHORUS_TESTS_VECTORS_CHECK_H_
