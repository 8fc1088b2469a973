// A tensor of a session, without its history: where its value is, or on what way it is there.
//
// Threads: any may read. What is written after its making is written under the session's lock,
//   before `state`, which is atomic: a thread that has seen a state sees what belongs to it.
// Ownership: handles, tape entries and pending ops share it. Its destructor may run anywhere, under
//   the lock too: it only queues the name for release (releases.h).
// Errors: none; `failure` has a tensor's.
#ifndef CHORUS_CLIENT_INTERNAL_TENSOR_DATA_H_
#define CHORUS_CLIENT_INTERNAL_TENSOR_DATA_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "client/internal/interner.h"
#include "client/internal/origins.h"
#include "client/internal/releases.h"
#include "client/internal/session_lock.h"
#include "core/base/ids.h"
#include "core/transport/command.h"

namespace chorus {
namespace internal {

class SessionCore;

// One tracing of a function. No two of a process have one: a tensor that was kept from a trace is
// not taken for one of a later trace, which may stand where that one stood. 0: outside of any.
using TraceId = StrongId<struct TraceIdTag, int64_t>;

// Why a tensor has no value, known without the daemon.
struct Failure {
  absl::Status status;
  bool told = false;  // it is a call that was refused here, and the other ranks know
};

struct TensorData {
  enum class State : uint8_t {
    kLazy,      // a value of one of the session's pending fragments
    kSent,      // named to the daemon
    kInline,    // a number that travels with the runs that use it
    kHost,      // a few bytes of the trainer's that the daemon has not got yet: they travel with
                // the compiled runs that use them, and get a name at their first other use
    kExternal,  // a staging arena of the trainer's
    kTraced,    // a value of a function that is being compiled
    kAbsent,    // this rank gets no result
    kFailed,
  };

  // (A template: the session is of a class that knows tensors.)
  template <typename Session>
  explicit TensorData(std::shared_ptr<Session> s)
      : releases(s == nullptr ? nullptr : &s->releases()), session(std::move(s)) {}
  ~TensorData();
  TensorData(const TensorData&) = delete;
  TensorData& operator=(const TensorData&) = delete;

  // What a run that uses it binds: it has been sent, or travels.
  Binding binding() const;

  Releases* const releases;  // the session's
  const std::shared_ptr<SessionCore> session;
  TensorInfoPtr info;  // null: absent or failed
  int32_t device_slot = 0;
  // kLazy -> kSent or kFailed, kHost -> kSent: under the lock, last.
  std::atomic<State> state{State::kLazy};
  TensorId id;        // kSent
  Sequence producer;  // kSent, kAbsent (0: nothing to wait for)
  // kSent: the last run that it was given to, which may stand there now; 0: none.
  Sequence given_to ABSL_GUARDED_BY(session_lock);
  int32_t value = -1;  // kLazy, kTraced: its index there
  // kLazy: the id of the fragment that makes it.
  int64_t fragment ABSL_GUARDED_BY(session_lock) = 0;
  Origins after;                           // what it may have to wait for
  TraceId trace;                           // kTraced, kAbsent
  InlineData inline_data;                  // kInline, kHost
  ExternalRange external;                  // kExternal
  char* staging = nullptr;                 // kExternal: where it is here
  std::shared_ptr<const Failure> failure;  // kFailed
};

using TensorDataPtr = std::shared_ptr<TensorData>;
using TensorDatas = absl::InlinedVector<TensorDataPtr, 1>;

}  // namespace internal
}  // namespace chorus

#endif  // CHORUS_CLIENT_INTERNAL_TENSOR_DATA_H_
