// Outcomes in the shared memory of attached sessions. A client that waits there is woken once for
// all that one turn of the node has published.
//
// Threads: the node thread. Ownership: a session owns its Completions, which refers to the
// session's memory. Errors: none.
#ifndef CHORUS_CORE_NODE_COMPLETIONS_H_
#define CHORUS_CORE_NODE_COMPLETIONS_H_

#include <memory>
#include <vector>

#include "core/base/ids.h"
#include "core/transport/completion.h"
#include "core/transport/session_memory.h"

namespace chorus::node {

class Completions;

// The sessions that have been told something since the last Signal().
class News {
 public:
  // Wakes the clients that wait for it.
  void Signal();

 private:
  friend class Completions;
  std::vector<Completions*> sessions_;
};

// One session's. For a session without shared memory nothing is published: it asks.
class Completions {
 public:
  // `news` outlives it.
  explicit Completions(News* news) : news_(news) {}
  ~Completions();
  Completions(const Completions&) = delete;
  Completions& operator=(const Completions&) = delete;

  // `memory` outlives it, or the next Detach().
  void Attach(SessionMemory* memory);
  void Detach() { writer_.reset(); }

  void PublishTensor(TensorId id, const TensorRecord& record);
  void PublishRun(Sequence sequence, const RunOutcome& outcome);
  // As CompletionWriter's. Nobody is woken by it.
  void PublishUnfinished(Sequence oldest);

 private:
  friend class News;
  void Tell();

  News* const news_;
  std::unique_ptr<CompletionWriter> writer_;
  bool has_news_ = false;  // is in news_->sessions_
  Sequence unfinished_;    // as published last
};

}  // namespace chorus::node

#endif  // CHORUS_CORE_NODE_COMPLETIONS_H_
