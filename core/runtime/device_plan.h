// What one device slot of a plan runs: the content of Plan::device_plans.
//
// Written by CompilePlan, read by executors, which may be in another process.
//
// Threads: plain data and pure functions. Ownership: copies. Errors: said at DecodeDevicePlan().
#ifndef CHORUS_CORE_RUNTIME_DEVICE_PLAN_H_
#define CHORUS_CORE_RUNTIME_DEVICE_PLAN_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/optional.h"
#include "core/base/index.h"
#include "core/graph/graph.h"
#include "core/tensor/type.h"

namespace chorus {

// An entry of a launch's buffer table. Negative: none.
using BufferIndex = Index<struct BufferIndexTag>;

struct DevicePlan {
  static constexpr int kStreams = 2;
  enum class StreamId : uint8_t { kCompute = 0, kCommunication = 1 };

  // An entry of the launch's buffer table, and where in it.
  struct Location {
    BufferIndex buffer;  // none: no memory, address 0
    int64_t offset = 0;
    // Collective outputs that stand in the memory of member `producer`: written (with zeros) only
    // when that member does not take part. -1: always written.
    int32_t producer = -1;
    friend bool operator==(const Location& a, const Location& b) {
      return a.buffer == b.buffer && a.offset == b.offset && a.producer == b.producer;
    }
  };

  // One item for a stream, in the order in which they are enqueued.
  struct Step {
    StreamId stream = StreamId::kCompute;
    int32_t node = -1;        // a kernel: index into `nodes`
    int32_t collective = -1;  // else: index into `collectives`
    int32_t wait = -1;        // an event of the other stream, recorded by an earlier step
    int32_t record = -1;      // an event that a later step of the other stream waits for
    // A kernel that writes where a donated input may stand, behind all collectives of the launch:
    // in a launch that holds back it is left out when something before it failed.
    bool held_back = false;
    // A kernel of this group of equal work (Plan::equal_groups), which a launch may leave out; else
    // -1.
    int32_t equal_group = -1;
    absl::InlinedVector<Location, 2> inputs;
    absl::InlinedVector<Location, 1> outputs;
    // Scratch of a kernel, and how many bytes: its own until it has run, then perhaps another
    // step's. None: 0 bytes.
    Location workspace;
    int64_t workspace_bytes = 0;
  };

  // See CollectiveCall::RuntimeCounts; which of its operands the step has.
  struct RuntimeCounts {
    int64_t row_elements = 0;
    int64_t input_rows = 0;
    int64_t output_rows = 0;
    bool sends = false;
    bool receives = false;
    bool received = false;
    std::string source;
  };

  struct CollectiveStep {
    CollectiveKind kind = CollectiveKind::kUnspecified;
    Reduction reduction = Reduction::kNone;
    DType dtype = DType::kUnspecified;
    int64_t count = 0;  // of every piece, or of those whose list below is empty
    std::vector<int64_t> input_counts;
    std::vector<int64_t> output_counts;
    int32_t root = -1;     // member of the communicator: root, or the peer of send and recv
    int32_t binding = -1;  // index into LaunchMessage::collectives
    absl::optional<RuntimeCounts> runtime;
    // How many of the step's inputs and outputs are pieces. Behind the inputs stand the counts
    // that are sent and received, and the factor of a PREMUL_SUM; behind the outputs the counts
    // that came, and what a reduction keeps for backward (CollectiveCall).
    int32_t num_inputs = 0;
    int32_t num_outputs = 0;
  };

  struct Kernel {
    Node node;  // inputs left out
    std::vector<TensorType> input_types;
  };

  int32_t num_buffers = 0;   // length of the launch's buffer table
  int32_t num_bindings = 0;  // length of the launch's `collectives`
  int32_t num_events = 0;
  int32_t num_equal_groups = 0;
  std::vector<Kernel> nodes;
  std::vector<CollectiveStep> collectives;
  std::vector<Step> steps;
};

std::string EncodeDevicePlan(const DevicePlan& plan);
// INVALID_ARGUMENT kMalformed: bytes that are no plan. What it returns is sound: every index is in
// bounds, and an event is waited for only after it was recorded.
absl::StatusOr<DevicePlan> DecodeDevicePlan(absl::string_view bytes);

}  // namespace chorus

#endif  // CHORUS_CORE_RUNTIME_DEVICE_PLAN_H_
