// A session's log as the SDK writes it: sequences, the names that commands use, runs under way.
//
// Threads: the session's lock guards it; IsFull and has_no_room alone may be called without.
// Ownership: the link is the session's, and outlives it.
// Errors: Submit's are the link's (link.h). After one that is no passing one every Submit gives it.
#ifndef CHORUS_CLIENT_INTERNAL_LOG_H_
#define CHORUS_CLIENT_INTERNAL_LOG_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <limits>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/optional.h"
#include "client/internal/link.h"
#include "core/base/ids.h"
#include "core/transport/command.h"

namespace chorus {
namespace internal {

class MemberCore;

// Names of tensors, or of graphs: slots, of which there are so many, with a generation for each
// use.
template <typename Id>
class NamePool {
 public:
  explicit NamePool(int32_t most) : most_(most) {}

  bool empty() const { return free_.empty() && next_ >= most_; }
  // Null: all are in use.
  absl::optional<Id> Take() {
    if (free_.empty()) {
      if (next_ >= most_) return absl::nullopt;
      return Id{next_++, 1};
    }
    const Id id = free_.back();
    free_.pop_back();
    return id;
  }
  // It was not used: the daemon has not heard of it.
  void GiveBack(Id id) { free_.push_back(id); }
  // The daemon has been told that it is released. A slot is used up with its last generation: a
  // daemon takes none that is not above those before.
  void Release(Id id) {
    if (id.generation == std::numeric_limits<uint32_t>::max()) {
      ++used_up_;
    } else {
      free_.push_back(Id{id.slot, id.generation + 1});
    }
  }

  size_t used() const { return static_cast<size_t>(next_ - used_up_) - free_.size(); }
  int32_t most() const { return most_; }

 private:
  const int32_t most_;
  int32_t next_ = 0;
  int32_t used_up_ = 0;   // slots
  std::vector<Id> free_;  // with the generation to use next
};

// How a command has ended: true: well. Null: it is not over. Any thread; where its outcome is
// forgotten here (link.h) the daemon is asked.
absl::optional<bool> WentWell(Link* link, Sequence command);

class Log {
 public:
  explicit Log(Link* link)
      : link_(link), tensors_(link->max_tensors()), graphs_(link->max_graphs()) {}

  // The next command: gives it its sequence. What is kept goes first. INVALID_ARGUMENT kMalformed:
  // it cannot be sent, and the sequence is the next one's.
  absl::StatusOr<Sequence> Submit(Command* command);
  absl::StatusOr<Sequence> Submit(CommandBody body);
  // Of what others are to hear in any case. Null: it was not sent, and is kept if that is for want
  // of room.
  absl::optional<Sequence> SubmitOrKeep(CommandBody body);
  // Sends what is kept. DEADLINE_EXCEEDED kTransportTimeout: there is no room for all of it.
  absl::Status SendKept();
  bool keeps() const { return !kept_.empty(); }
  // The last command of this section of the lock has waited for room in vain: what can be sent
  // later is not to wait as long again. Any thread, no lock.
  bool has_no_room() const { return has_no_room_.load(std::memory_order_relaxed); }
  void BeginSection() { has_no_room_.store(false, std::memory_order_relaxed); }
  const absl::Status& broken() const { return broken_; }  // it takes nothing any more
  Sequence next() const { return Sequence(next_sequence_); }

  NamePool<TensorId>& tensors() { return tensors_; }
  NamePool<GraphId>& graphs() { return graphs_; }

  // Runs whose end has not been seen, each of the member whose calls it has or waits for; null: it
  // waits for none.
  void CountRun(Sequence run, const MemberCore* member);
  bool IsOver(Sequence run);
  // Every run before it is over.
  Sequence OldestUnderWay();
  // As many runs may be under way as a daemon lets a session have. Any thread, no lock.
  bool IsFull() const { return under_way_count_.load(std::memory_order_relaxed) >= kMaxUnderWay; }
  // Looks which are over. Where there is no room, and as many as the member's share are its own,
  // the one that has to end before it adds one. It is its own: another member's may wait for this
  // one to make its call.
  absl::optional<Sequence> AwaitsRoom(const MemberCore* member);

 private:
  // Half of what a daemon allows unless told otherwise: flushes come on top.
  static constexpr size_t kMaxUnderWay = 512;

  absl::StatusOr<Sequence> Send(Command* command);
  void Counted() { under_way_count_.store(under_way_.size(), std::memory_order_relaxed); }

  Link* const link_;
  absl::Status broken_;
  int64_t next_sequence_ = 1;
  std::deque<Command> kept_;  // to be sent before any other, in this order
  std::atomic<bool> has_no_room_{false};
  NamePool<TensorId> tensors_;
  NamePool<GraphId> graphs_;
  struct UnderWay {
    Sequence run;
    const MemberCore* member;  // to be compared only: it may be gone
  };
  std::deque<UnderWay> under_way_;
  std::atomic<size_t> under_way_count_{0};
};

}  // namespace internal
}  // namespace chorus

#endif  // CHORUS_CLIENT_INTERNAL_LOG_H_
