// Messages of proto/chorus/v1 to the core's types, and back.
//
// A message comes from anyone. FromProto checks its form: every enum and number is one that the
// core's type can hold, nothing that must be there is missing. What the numbers mean (a value that
// a node may use, a tensor that exists) is checked by whom it concerns, on every transport alike.
// INVALID_ARGUMENT (MALFORMED) names the field: "nodes[3].collective.kind: 99 is none of ...".
// ToProto takes any value that FromProto can give, and FromProto gives it back.
//
// Threads: any; no state. Ownership: copies. Errors: as said above; of a graph also DecodeGraph's.
#ifndef CHORUS_PROTO_CONVERT_CONVERT_H_
#define CHORUS_PROTO_CONVERT_CONVERT_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "chorus/v1/commands.pb.h"
#include "chorus/v1/errors.pb.h"
#include "chorus/v1/types.pb.h"
#include "core/base/error.h"
#include "core/collective/instance.h"
#include "core/graph/encoding.h"
#include "core/graph/graph.h"
#include "core/tensor/type.h"
#include "core/transport/command.h"

namespace chorus {

// A trainer's text as one of a message, which could not be read with other bytes in it: those are
// '?'.
std::string Utf8(absl::string_view text);

absl::StatusOr<DType> FromProto(v1::DType dtype);
v1::DType ToProto(DType dtype);
v1::CollectiveKind ToProto(CollectiveKind kind);
v1::Reduction ToProto(Reduction reduction);

absl::StatusOr<TensorType> FromProto(const v1::TensorType& message);
void ToProto(const TensorType& type, v1::TensorType* message);

absl::StatusOr<TensorId> FromProto(const v1::TensorId& message);
void ToProto(TensorId id, v1::TensorId* message);
absl::StatusOr<GraphId> FromProto(const v1::GraphId& message);
void ToProto(GraphId id, v1::GraphId* message);

absl::StatusOr<InstanceKey> FromProto(const v1::InstanceKey& message);
void ToProto(const InstanceKey& key, v1::InstanceKey* message);

// Form only: ValidateGraph says whether it is a graph that can run. What it gives, EncodeGraph's
// bytes decode to within `limits`: the same errors where they would not, before much is made.
absl::StatusOr<Graph> FromProto(const v1::Graph& message, const DecodeLimits& limits = {});
void ToProto(const Graph& graph, v1::Graph* message);

// Commands. A graph goes in its canonical encoding from here on.
absl::StatusOr<CommandBody> FromProto(const v1::RegisterGraph& message);
absl::StatusOr<CommandBody> FromProto(const v1::Run& message);
absl::StatusOr<CommandBody> FromProto(const v1::CreateTensor& message);
absl::StatusOr<CommandBody> FromProto(const v1::MakeReadable& message);
absl::StatusOr<CommandBody> FromProto(const v1::Release& message);
absl::StatusOr<Command> FromProto(const v1::Command& message);
// INTERNAL when a RegisterGraph's bytes are no graph.
absl::Status ToProto(const Command& command, v1::Command* message);

// A code or a reason that this build does not know is kUnknown, kUnspecified.
Error FromProto(const v1::Error& message);
void ToProto(const Error& error, v1::Error* message);

// A proto's int64 as a non-negative number; the text names `field`.
absl::StatusOr<int64_t> NonNegative(int64_t value, absl::string_view field);
// The same of a step, or of how many calls or requests there have been.
absl::StatusOr<int64_t> CallNumber(int64_t value, absl::string_view field);

void ToProto(const CallPosition& position, v1::CallPosition* message);

}  // namespace chorus

#endif  // CHORUS_PROTO_CONVERT_CONVERT_H_
