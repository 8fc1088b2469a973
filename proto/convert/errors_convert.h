// Status of the core <-> status of gRPC. The only file that knows both.
//
// Threads: any; no state. Ownership: copies. Errors: none of its own.
#ifndef CHORUS_PROTO_CONVERT_ERRORS_CONVERT_H_
#define CHORUS_PROTO_CONVERT_ERRORS_CONVERT_H_

#include <cstddef>

#include "absl/status/status.h"
#include "chorus/v1/errors.pb.h"
#include "core/base/error.h"
#include "grpcpp/support/status.h"

namespace chorus {

// gRPC drops details that are larger than its 8 KiB of metadata; proxies are content with half.
inline constexpr size_t kMaxErrorBytes = Error::kMaxBytes;
// The message travels a second time beside the details, with escapes; both are in those 8 KiB.
inline constexpr size_t kMaxTrailerBytes = 3072;

// All of the status's Error as an RpcStatus of at most kMaxErrorBytes: texts are shortened (the
// longest first), then ranks left out, where it is larger. OK gives an empty message.
v1::RpcStatus ToRpcStatus(const absl::Status& status);
absl::Status FromRpcStatus(const v1::RpcStatus& message);

// With ToRpcStatus as the details, which have all of the message; it is cut where it takes more
// than kMaxTrailerBytes.
grpc::Status ToGrpc(const absl::Status& status);

// What a client makes of a failed call. A status that did not come from a daemon's handler gets a
// reason by its code: UNAVAILABLE is kDaemonLost, DEADLINE_EXCEEDED kTransportTimeout. What gRPC's
// server has cancelled is UNAVAILABLE kDraining: a daemon that ends cancels what still waits there.
absl::Status FromGrpc(const grpc::Status& status);

}  // namespace chorus

#endif  // CHORUS_PROTO_CONVERT_ERRORS_CONVERT_H_
