// send and recv between two members of a group: each is the other's gradient.
//
// send(x): to collective.peer, with collective.tag; no output. recv(): from the peer; one output,
// of the type that attributes dims and dtype say (it must be the sender's). VJP, the loss being the
// sum over ranks: the sender's input gradient is the receiver's g, so the receiver sends it back
// and the sender receives it. On the sender backward starts at the node itself
// (BackwardRoot::AbsentResult), since it has no value. Second order: each other's.
//
// Threads: any; definitions are never changed. Ownership: they are static. Errors: INVALID_ARGUMENT
// kBadType for a node that does not fit (ShapeError).
#ifndef CHORUS_CORE_OPS_SEND_SEND_H_
#define CHORUS_CORE_OPS_SEND_SEND_H_

#include "absl/types/span.h"
#include "core/ops/op.h"

namespace chorus {

absl::Span<const OpDef* const> SendOps();

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_SEND_SEND_H_
