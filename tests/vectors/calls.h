// A vector's tensors and its op, as calls of the SDK.
#ifndef CHORUS_TESTS_VECTORS_CALLS_H_
#define CHORUS_TESTS_VECTORS_CALLS_H_

#include <vector>

#include "absl/status/statusor.h"
#include "client/chorus.h"
#include "tests/vectors/array.h"
#include "tests/vectors/vector.h"

namespace chorus {
namespace vectors {

// A tensor of `array`. Another layout than contiguous: the result of an op that turns or stretches
// what was uploaded. `requires_grad` is of the uploaded leaf, so the result has a gradient too.
Tensor Upload(const DeviceRef& device, const Array& array, Layout layout, bool requires_grad);

// Waits.
absl::StatusOr<Array> Download(const Tensor& tensor);

// The op of `v` as its rank `rank` calls it. Results that this rank does not get are absent.
absl::StatusOr<std::vector<Tensor>> Call(const Vector& v, int rank, const Group& group,
                                         const std::vector<Tensor>& x);

}  // namespace vectors
}  // namespace chorus

#endif  // CHORUS_TESTS_VECTORS_CALLS_H_
