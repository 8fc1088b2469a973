// Taking connections from a listening socket.
//
// Threads: any. Ownership: the listener is the caller's; a connection is `take`'s. Errors: logged,
// as below.
#ifndef CHORUS_SERVER_ACCEPT_H_
#define CHORUS_SERVER_ACCEPT_H_

#include <functional>

#include "absl/strings/string_view.h"
#include "server/client_socket.h"

namespace chorus::server {

// Gives `take` the connections that wait at `listener`, without blocking, at most 64: those that
// are in already are served between two turns, and a stop is seen. A connection does not block, and
// one by a Unix socket takes kSocketBytes of what it is sent before its client reads. (By TCP the
// system's own bound stays: with less than a segment or two it waits for acknowledgements.)
//
// Where the process has no descriptors or memory for one it stays in the queue: that is logged as
// `logger`'s, and the turn ends a tenth of a second later, or when `stop` is readable, so that the
// caller does not spin. What ends the shortage are other threads. So it is, for a millisecond and
// without a word, while there are more than kMaxUnclosed.
void Accept(absl::string_view logger, int listener, int stop,
            const std::function<void(ClientSocket connection)>& take);

}  // namespace chorus::server

#endif  // CHORUS_SERVER_ACCEPT_H_
