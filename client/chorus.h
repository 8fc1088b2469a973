// Chorus for trainers: sessions, worlds, tensors, collectives and their gradients.
//
// Start here. A trainer opens a session with the daemon of its node, joins a world as one of its
// ranks, and calls collectives on tensors that the daemon owns:
//
//   CHORUS_ASSIGN_OR_RETURN(chorus::Session session, chorus::Session::Open());
//   CHORUS_ASSIGN_OR_RETURN(chorus::World world, session.Join());   // RANK, WORLD_SIZE, ...
//   chorus::Tensor x = chorus::FromHost<float>(world, {1, 2, 3}, {3}).RequireGrad();
//   chorus::Tensor y = chorus::AllReduce(x, world);                 // returns at once
//   CHORUS_RETURN_IF_ERROR(chorus::Backward(chorus::Sum(y * y)));
//   CHORUS_ASSIGN_OR_RETURN(std::vector<float> g, x.grad().Read<float>());
//
// Nothing here waits for other ranks but what says so: Open, Close, Join, Leave, NewGroup, Abort,
// Reform, and a tensor's Wait, Read, Item, View and ToString. A call that fails returns a tensor
// that carries the error and the line of the call; so does every op on that tensor; the next
// synchronising call hands it out. But a call that is refused on this rank waits for the daemon's
// word that the other ranks have been told; a rank with 512 runs under way waits for its oldest
// before it adds one; and FromHost and Map wait for the daemon to make memory.
//
// Ranks stay in line by counting. The name of a collective call is its position in its rank's
// program: (step, how many calls of the group the rank has made before in the step). Calls meet
// that have one name, and never others. Every call counts, also one that is refused here or fails
// later; what is coalesced is one call. Sends and receives count for each peer, direction and tag
// by themselves, requests for gradients for each collective that they are gradients of, and
// NewGroup for each list of ranks. World::Step(n) begins step n, where all of them count from 0
// again:
//   * Begin each turn of a training loop with a step. A rank that leaves a turn early, by an error
//     or an exception, is then in line again at the next one; calls of the turn that it has left
//     are passed. Without Step a rank that leaves out calls is out of line for good, and nothing
//     tells but that calls which do not fit (another type, shape or reduction) mismatch.
//   * What is sent in a step is received in it. A step that is done again has a new number.
// What can become of a call:
//   * A rank that is ahead waits, at most agree_timeout.
//   * A call that one rank cannot make (an operand that does not fit, a function that cannot be
//     compiled, ...) ends the world's *epoch*: that rank has its own error, every call of
//     the world that is under way on other ranks fails with kPeerRefused naming the rank, the line
//     and the error, and calls of the next epoch work at once. So do a mismatch, a late rank, a
//     death and Abort. A rank is in the next epoch as soon as it has been handed the cause. Where
//     all ranks make one mistake at one call, one epoch ends.
//   * What uses a result that has failed carries its error on. A call of which that is all ends no
//     epoch again, for the others have been told: a rank that needs it fails, alone.
//   * A call that needs a rank which has passed its position (it has made a later call of the
//     group, or begun a later step, without that one) fails with kMismatch naming both calls and
//     lines: alone, with what waits for it and what uses its result. No epoch ends.
//   * A rank of which nobody knows what it would have called (a compiled function could not be
//     traced, see Compiled; a Backward that makes calls by itself was refused, see there) is *out
//     of line*: it takes part in nothing more until its next step (Reform, where there are no
//     steps). Its calls fail at once, for the ranks that need them too. A call that all ranks of a
//     world make together, as those of a DeviceGroup are, brings them in line again.
//
// **The loss that is differentiated is the sum over ranks of each rank's loss.** So the gradient of
// AllReduce is an AllReduce, and a loss that each rank computes alike counts once for every rank. A
// gradient is a collective like any other: every rank that took part in the forward collective
// takes part in its gradient, by Backward or Grad, or has given up its tape (NoGrad, Detach, or the
// result's last handle dropped) and then counts as zeros; where its operand had come from another
// collective zeros would make others' gradients wrong, so that a rank that asks for them gets
// kGradientLost naming it. While gradients are on, every collective of a floating type is recorded,
// also where this rank's input wants no gradient: another rank's may, and then needs this rank's
// part of the loss. Put metrics under NoGrad.
//
// Threads: every function and class here may be used from any thread; a Tensor, World or Group
//   object itself is a handle like a std::shared_ptr: copy it, do not change one object from two
//   threads. Members of several ranks may live in one session.
// Ownership: tensors are memory of the daemon's, and do not change. One lives as long as a handle
//   or a view of it, a call under way that reads it or a gradient that may need it, and no longer
//   than its session; a donated one is gone (Compile). Values of the trainer's are copied, into a
//   tensor (FromHost) and out of one (Read); what shares memory instead says so (MappedTensor,
//   TensorView).
// Errors: as said above: in the tensors, and as the status of what waits or gives no tensor. Each
//   has a reason, whose cause and remedy docs/errors.md says; none is an exception.
// Order: the calls of one thread take effect in its order. Members of one group must call its
//   collectives in one order; several threads that use one member must order themselves. Calls of
//   different groups, sends, receives and requests for gradients may stand in any order that the
//   rank's data allows, on each rank in another: nothing waits for what it does not depend on. (A
//   compiled function, or a coalesced call, is one: its results come together.)
// Fork: in a forked child every object made before the fork is inert: calls return kForked, and
//   destructors touch nothing.
#ifndef CHORUS_CLIENT_CHORUS_H_
#define CHORUS_CLIENT_CHORUS_H_

#include "chorus/autograd.h"     // IWYU pragma: export
#include "chorus/call_site.h"    // IWYU pragma: export
#include "chorus/collectives.h"  // IWYU pragma: export
#include "chorus/compile.h"      // IWYU pragma: export
#include "chorus/math.h"         // IWYU pragma: export
#include "chorus/session.h"      // IWYU pragma: export
#include "chorus/tensor.h"       // IWYU pragma: export

#endif  // CHORUS_CLIENT_CHORUS_H_
