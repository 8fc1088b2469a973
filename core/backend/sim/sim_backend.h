// Devices that behave as badly as real ones may: what goes well on `host` by luck goes wrong here.
//
// Memory is an address space of its own: a device address is no pointer (touching one faults), each
// domain's memory is only its own (a device's, unless devices_per_domain says otherwise), and in it
// addresses are never used twice. Fresh memory holds NaN, freed memory is overwritten, and work
// that names freed, foreign or too little memory fails with INTERNAL.
//
// Streams are run by one thread that holds work back until the program has gone on enqueuing, and
// then picks by a seeded generator which stream goes next: evenly, always the latest, one stream
// far ahead of the others, or one stream starved until nothing else is left. Only stream order,
// events and the meeting of collective calls keep anything in order, so a missing wait shows as NaN
// or as old values with most seeds. The seed is printed; a program that enqueues everything before
// it waits sees the same order with the same seed, others nearly so.
//
// Threads: everything is thread-safe, which is more than backend.h promises. Ownership: its thread
// and its memory are its own; what is not freed goes with it. Errors: backend.h's, and those said
// above; making one cannot fail.
#ifndef CHORUS_CORE_BACKEND_SIM_SIM_BACKEND_H_
#define CHORUS_CORE_BACKEND_SIM_SIM_BACKEND_H_

#include <cstdint>
#include <memory>

#include "absl/time/time.h"
#include "core/backend/backend.h"
#include "core/backend/backend_options.h"

namespace chorus {

// Needs no pool, and cuts nothing.
struct SimBackendOptions : BackendOptions {
  int64_t memory_bytes = int64_t{4} << 30;  // that all devices may allocate together
  // How long at most work is held back in the hope that more is enqueued.
  absl::Duration patience = absl::Microseconds(300);
};

// Faults are injected by wrapping it: core/backend/fault/fault_backend.h.
std::unique_ptr<Backend> CreateSimBackend(const SimBackendOptions& options);
std::unique_ptr<Backend> OpenSim(const BackendOptions& options);

}  // namespace chorus

#endif  // CHORUS_CORE_BACKEND_SIM_SIM_BACKEND_H_
