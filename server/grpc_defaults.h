// Limits of gRPC's that hold before a client has acknowledged them.
//
// Threads: any. Ownership: the table is gRPC's, and the whole process's. Errors: said at
// SetHttpDefaults().
#ifndef CHORUS_SERVER_GRPC_DEFAULTS_H_
#define CHORUS_SERVER_GRPC_DEFAULTS_H_

#include <cstdint>

#include "absl/status/status.h"

namespace chorus::server {

// Of HTTP/2 (RFC 9113, section 6.5.2).
struct HttpDefaults {
  uint32_t max_header_list_size = 0;    // bytes: names, values and 32 for each field
  uint32_t max_concurrent_streams = 0;  // calls of one connection
};

// A server's SETTINGS bind a client once it has acknowledged them. Until then gRPC 1.51 goes by a
// table of its own, where these two are 16 MiB and without end, and a client that acknowledges
// nothing stays there: some hundred MiB of headers a call. No option changes that table, so this
// does, for the process; clients of the daemon's, in it, start from the same values.
//
// FAILED_PRECONDITION (CANNOT_SERVE): the library has no such table, or other values in it, so
// nobody knows what it takes before an acknowledgement; nothing is changed.
//
// It is for connections that begin afterwards; the last call is the one that holds.
absl::Status SetHttpDefaults(const HttpDefaults& defaults);

}  // namespace chorus::server

#endif  // CHORUS_SERVER_GRPC_DEFAULTS_H_
