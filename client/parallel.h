// One process with several devices: broadcast, reduce-add, scatter and gather between the devices
// of one session, as torch.nn.parallel has them.
//
// They are the collectives of chorus.h, called by all members of a world that lives in one session
// (a DeviceGroup): one run a call, the same gradients to any order, the same bits. What differs
// comes of there being one caller, which knows everything:
//   * A call is recorded only where an input requires a gradient; otherwise its results require
//     none on any device.
//   * Backward takes part for every device as soon as one result is reached: a result that no loss
//     uses counts as zeros, and nobody waits for it.
//   * A call that is refused is refused before anything is sent: the group stays usable. (Backward
//     and Grad: what was recorded before has no gradient any more, as autograd.h says. A compiled
//     function that could not be traced: calls of single members fail until the next call of all of
//     them, or their next World::Step.)
//
// Threads: as chorus.h says; the calls on one DeviceGroup must be ordered by the caller.
// Ownership: handles, as in chorus.h; a HostTensor may refer to memory of the trainer's, which must
//   then outlive it (HostTensor::View).
// Errors: in the tensors, as everywhere; where a call that is refused gives a list, in each of
//   them. INVALID_ARGUMENT kBadType: a group of no devices, or tensors that do not fit or are on
//   none of its devices. What gives no tensor returns its own.
#ifndef CHORUS_CLIENT_PARALLEL_H_
#define CHORUS_CLIENT_PARALLEL_H_

#include "chorus/parallel/device_group.h"  // IWYU pragma: export
#include "chorus/parallel/host_tensor.h"   // IWYU pragma: export
#include "chorus/parallel/nest.h"          // IWYU pragma: export

#endif  // CHORUS_CLIENT_PARALLEL_H_
