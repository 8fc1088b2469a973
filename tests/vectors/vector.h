// Golden vectors, as their files hold them: what all ranks give to one collective, and what each
// must get, with gradients of first and second order. docs/conformance.md has the format.
//
// Nothing here trusts a file: every wrong type, missing key and impossible number is an error that
// says where it is. Plain data, any thread.
#ifndef CHORUS_TESTS_VECTORS_VECTOR_H_
#define CHORUS_TESTS_VECTORS_VECTOR_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/optional.h"
#include "core/graph/graph.h"
#include "core/tensor/type.h"
#include "tests/vectors/array.h"

namespace chorus {
namespace vectors {

enum class Op {
  kBroadcast,
  kReduce,
  kAllReduce,
  kReduceScatter,
  kReduceScatterTensor,
  kAllGather,
  kAllGatherIntoTensor,
  kGather,
  kScatter,
  kAllToAll,
  kAllToAllSingle,
  // One process with several devices: a rank is a device.
  kBroadcastCoalesced,
  kReduceAddCoalesced,
  kParallelScatter,
  kParallelGather,
};

enum class Layout { kContiguous, kTransposed, kExpanded };

// One rank's tensors; a tensor is null where there is none (integers have no gradient).
using Row = std::vector<absl::optional<Array>>;
// By rank; a row is null where the rank takes no part.
using Rows = std::vector<absl::optional<Row>>;

struct Attributes {
  Reduction reduction = Reduction::kNone;
  std::vector<double> premul;  // by rank
  int root = -1;               // `src` or `dst`
  bool host = false;           // the root is the CPU
  int64_t dim = 0;
  // reduce_scatter_tensor: one row, by rank. all_to_all_single: [r][j], from r to j.
  std::vector<std::vector<int64_t>> splits;
  absl::optional<std::vector<int64_t>> sizes;  // of chunks; null: the chunk rule
  int64_t buffer_size = 0;
};

struct FirstOrder {
  Rows g;
  Rows xbar;
};

struct SecondOrder {
  Rows w;
  Rows v;
  Rows G;
  double S = 0;
  Rows dS;
};

struct Scale {
  double y = 0;
  double xbar = 0;
  double G = 0;
  double S = 0;
  double dS = 0;
};

struct Tolerance {
  std::map<DType, double> factor;
  std::map<DType, double> eps;
  double second_factor = 0;
};

struct Vector {
  std::string id;
  Op op = Op::kAllReduce;
  int world = 0;
  std::vector<int> group;  // world ranks by group rank; of the one process: the devices
  DType dtype = DType::kUnspecified;
  Attributes attributes;
  // By group rank, as many as `group` has.
  std::vector<std::vector<Array>> inputs;
  std::vector<std::vector<Array>> outputs;
  std::vector<Layout> x_layout;
  std::vector<Layout> g_layout;
  std::vector<bool> requires_grad;
  absl::optional<FirstOrder> first;
  absl::optional<SecondOrder> second;
  bool exact_y = false;
  bool exact_xbar = false;
  absl::optional<Scale> scale;  // there when something is not exact

  int size() const { return static_cast<int>(group.size()); }  // ranks
  bool everybody() const;                                      // the group is the world, in order
  bool one_process() const { return op >= Op::kBroadcastCoalesced; }
};

struct VectorFile {
  struct Entry {
    std::string id;  // "FILE#3" where it has none
    absl::StatusOr<Vector> vector;
  };
  Tolerance tolerance;
  std::vector<Entry> entries;
};

// `name` is for messages. INVALID_ARGUMENT: the text is no JSON, or holds no list of vectors. What
// is wrong with a whole file otherwise is wrong with each of its entries.
absl::StatusOr<VectorFile> ParseVectorFile(absl::string_view name, absl::string_view text);

absl::string_view OpName(Op op);

}  // namespace vectors
}  // namespace chorus

#endif  // CHORUS_TESTS_VECTORS_VECTOR_H_
