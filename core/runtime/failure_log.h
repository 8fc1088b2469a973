// Which launches, or uploads, of a device have failed.
//
// Threads: any. Ownership: copies. Errors: none.
#ifndef CHORUS_CORE_RUNTIME_FAILURE_LOG_H_
#define CHORUS_CORE_RUNTIME_FAILURE_LOG_H_

#include <algorithm>
#include <cstdint>

#include "absl/container/flat_hash_map.h"
#include "absl/container/inlined_vector.h"
#include "core/base/mutex.h"

namespace chorus {

// A failure is kept as long as somebody may ask, and no longer.
template <typename Id>
class FailureLog {
 public:
  using Ids = absl::InlinedVector<Id, 4>;
  void Note(Id failed) ABSL_LOCKS_EXCLUDED(mutex_) {
    MutexLock lock(&mutex_);
    rows_[failed].failed = true;
  }
  // A question about each of these is to come. Returns them, each once.
  template <typename List>
  Ids Await(const List& list) ABSL_LOCKS_EXCLUDED(mutex_) {
    Ids ids(list.begin(), list.end());
    std::sort(ids.begin(), ids.end());
    ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
    if (ids.empty()) return ids;
    MutexLock lock(&mutex_);
    for (const Id id : ids) ++rows_[id].questions;
    return ids;
  }
  bool Ask(Id id) ABSL_LOCKS_EXCLUDED(mutex_) {
    MutexLock lock(&mutex_);
    const auto row = rows_.find(id);
    const bool failed = row->second.failed;
    --row->second.questions;
    DropIfUnwanted(row);
    return failed;
  }
  // Of one that has ended: nobody will await it any more.
  void Settle(Id id) ABSL_LOCKS_EXCLUDED(mutex_) {
    MutexLock lock(&mutex_);
    const auto row = rows_.find(id);
    if (row == rows_.end()) return;
    row->second.settled = true;
    DropIfUnwanted(row);
  }

 private:
  struct Row {
    int32_t questions = 0;
    bool failed = false;
    bool settled = false;
  };
  using Rows = absl::flat_hash_map<Id, Row>;
  void DropIfUnwanted(typename Rows::iterator row) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const Row& of = row->second;
    if (of.questions == 0 && (of.settled || !of.failed)) rows_.erase(row);
  }

  Mutex mutex_;
  Rows rows_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace chorus

#endif  // CHORUS_CORE_RUNTIME_FAILURE_LOG_H_
