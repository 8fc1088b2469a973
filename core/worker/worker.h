// A worker: serves the devices of a backend to a daemon in another process.
//
// Threads: the calling one does all work that is not the backend's. Ownership: said at Serve().
// Errors: said at Serve(); what the daemon asks for and cannot have is told to it.
#ifndef CHORUS_CORE_WORKER_WORKER_H_
#define CHORUS_CORE_WORKER_WORKER_H_

#include "absl/status/status.h"
#include "core/backend/backend.h"
#include "core/worker/channel.h"
#include "core/worker/window.h"

namespace chorus::worker {

// Serves until the daemon says that it is to stop (OK), has gone, sends what makes no sense, or the
// backend has lost its devices (kDeviceLost), of which the daemon is told. `backend` outlives the
// call and may not be host-addressable: its memory is nobody else's.
absl::Status Serve(Channel* channel, Window* window, Backend* backend);
// There is no backend: says why, once.
void Refuse(Channel* channel, const absl::Status& why);

}  // namespace chorus::worker

#endif  // CHORUS_CORE_WORKER_WORKER_H_
