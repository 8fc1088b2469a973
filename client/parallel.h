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
//   * A call that is refused is refused before anything is sent: the group stays usable.
// Errors are in the tensors, as everywhere; where a list comes back, in each of them.
//
// Threads: as chorus.h; the calls on one DeviceGroup must be ordered by the caller.
#ifndef CHORUS_CLIENT_PARALLEL_H_
#define CHORUS_CLIENT_PARALLEL_H_

#include "chorus/parallel/device_group.h"  // IWYU pragma: export
#include "chorus/parallel/host_tensor.h"   // IWYU pragma: export
#include "chorus/parallel/nest.h"          // IWYU pragma: export

#endif  // CHORUS_CLIENT_PARALLEL_H_
