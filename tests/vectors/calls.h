// A vector's tensors and its op, as calls of the SDK.
#ifndef CHORUS_TESTS_VECTORS_CALLS_H_
#define CHORUS_TESTS_VECTORS_CALLS_H_

#include <memory>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "chorus/chorus.h"
#include "chorus/parallel.h"
#include "tests/vectors/array.h"
#include "tests/vectors/vector.h"

namespace chorus {
namespace vectors {

// Waits.
absl::StatusOr<Array> Download(const Tensor& tensor);

// Tensors of some of a vector's ranks.
using Tensors = std::vector<std::vector<Tensor>>;

// The op of one vector as one session calls it: for one rank, or for all devices of one process.
class Caller {
 public:
  Caller(const Vector& v, std::vector<int> ranks) : v_(v), ranks_(std::move(ranks)) {}
  virtual ~Caller() = default;

  // Those that it stands for. An index below counts among these.
  const std::vector<int>& ranks() const { return ranks_; }
  virtual DeviceRef device(size_t index) const = 0;
  // A tensor without gradient, on the device.
  Tensor Upload(size_t index, const Array& array, Layout layout) const;

  // Undefined where the op takes an input in another form and wants no gradient of it.
  virtual Tensors Inputs(const std::vector<bool>& requires_grad);
  // Results that a rank does not get are absent, or are not there.
  virtual Tensors Call(const Tensors& x) = 0;
  // What `y` of the last Call has; waits.
  virtual absl::StatusOr<std::vector<Array>> Outputs(size_t index, const std::vector<Tensor>& y);

 protected:
  const Vector& v_;
  const std::vector<int> ranks_;
};

// `v` and `group` outlive it.
std::unique_ptr<Caller> MakeRankCaller(const Vector& v, int rank, const Group& group,
                                       const DeviceRef& device);
std::unique_ptr<Caller> MakeDevicesCaller(const Vector& v, const parallel::DeviceGroup& devices);

}  // namespace vectors
}  // namespace chorus

#endif  // CHORUS_TESTS_VECTORS_CALLS_H_
