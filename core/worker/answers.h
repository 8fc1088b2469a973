// What a worker has answered, by the question: few distinct questions are asked again and again.
//
// Questions are clients' (a node with all its inputs may be half a megabyte) and nobody is charged
// for them here, so what is kept has a bound in bytes. They are kept whole, not by a hash: an
// answer to another question would let a kernel write beyond its scratch.
//
// Threads: thread-compatible. Ownership: copies. Errors: none.
#ifndef CHORUS_CORE_WORKER_ANSWERS_H_
#define CHORUS_CORE_WORKER_ANSWERS_H_

#include <cstdint>
#include <string>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/string_view.h"
#include "absl/types/optional.h"

namespace chorus::worker {

class Answers {
 public:
  static constexpr int64_t kMaxBytes = int64_t{4} << 20;
  // A longer question is asked each time.
  static constexpr int64_t kLongest = kMaxBytes / 64;

  absl::optional<int64_t> Find(absl::string_view question) const {
    const auto it = answers_.find(question);
    if (it == answers_.end()) return absl::nullopt;
    return it->second;
  }
  // Where there is no room all others are forgotten first: most of what is asked still is soon
  // known again.
  void Keep(absl::string_view question, int64_t answer) {
    const auto size = static_cast<int64_t>(question.size());
    if (size > kLongest) return;
    if (bytes_ + size + kRowBytes > kMaxBytes) {
      answers_.clear();
      bytes_ = 0;
    }
    if (answers_.try_emplace(question, answer).second) bytes_ += size + kRowBytes;
  }
  // That it takes, roughly.
  int64_t bytes() const { return bytes_; }

 private:
  static constexpr int64_t kRowBytes = 128;  // a row of the table, and a string's own

  absl::flat_hash_map<std::string, int64_t> answers_;
  int64_t bytes_ = 0;
};

}  // namespace chorus::worker

#endif  // CHORUS_CORE_WORKER_ANSWERS_H_
