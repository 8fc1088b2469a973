// What the executor of one device beyond a channel was asked for and has not answered.
//
// Threads: thread-compatible. Ownership: plain values; the memory of transfers is the caller's.
// Errors: none.
#ifndef CHORUS_CORE_WORKER_UNDER_WAY_H_
#define CHORUS_CORE_WORKER_UNDER_WAY_H_

#include <cstdint>
#include <map>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "core/backend/backend.h"
#include "core/runtime/messages.h"

namespace chorus::worker {

class UnderWay {
 public:
  struct Transfer {
    int32_t lane = 0;
    DeviceAddress address = 0;
    int64_t bytes = 0;
    const char* from = nullptr;  // an upload's
    char* to = nullptr;          // a download's
    int64_t bytes_done = 0;      // taken, or come, so far
    bool has_last = false;       // a download's last piece has come; it may be empty

    bool is_upload() const { return from != nullptr; }
  };

  void Add(LaunchId id) { launches_.insert(id); }
  void Add(PlanId id) { loads_.insert(id); }
  void Add(CommunicatorId id) { opens_.insert(id); }
  void Add(TransferId id, const Transfer& transfer) { transfers_.emplace(id, transfer); }

  // Null: it has ended.
  Transfer* Find(TransferId id);
  // It has ended. False: it was not asked for, or is a download of which bytes are missing and that
  // is said to have gone well, or an upload of which bytes are still to be taken; nothing has
  // changed then.
  bool End(const EventMessage& event);
  void End(TransferId id) { transfers_.erase(id); }
  // Everything has ended but `excluded`; returns with which events, in which each kind is in its
  // order. They share `why`: one thread tells all of them.
  std::vector<EventMessage> EndAll(const absl::Status& why, TransferId excluded);
  bool empty() const {
    return launches_.empty() && loads_.empty() && opens_.empty() && transfers_.empty();
  }

 private:
  absl::flat_hash_set<LaunchId> launches_;
  absl::flat_hash_set<PlanId> loads_;
  absl::flat_hash_set<CommunicatorId> opens_;
  std::map<TransferId, Transfer> transfers_;  // of those that have ended nothing stays
};

}  // namespace chorus::worker

#endif  // CHORUS_CORE_WORKER_UNDER_WAY_H_
