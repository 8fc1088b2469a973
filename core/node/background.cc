#include "core/node/background.h"

#include <algorithm>
#include <utility>

namespace chorus::node {

Background::Background(std::function<void(std::function<void()>)> post) : post_(std::move(post)) {
  thread_ = std::thread([this] { Loop(); });
}

void Background::Stop() {
  {
    MutexLock lock(&mutex_);
    stop_ = true;
    changed_.SignalAll();
  }
  if (thread_.joinable()) thread_.join();
  std::deque<Queue> dropped;
  {
    MutexLock lock(&mutex_);
    dropped.swap(turns_);
  }
  then_.clear();
}

void Background::Do(const std::string& tenant, std::function<void()> work,
                    std::function<void()> then) {
  MutexLock lock(&mutex_);
  if (stop_) return;
  const uint64_t id = ++last_id_;
  then_.emplace(id, std::move(then));
  auto queue = std::find_if(turns_.begin(), turns_.end(),
                            [&](const Queue& other) { return other.tenant == tenant; });
  if (queue == turns_.end()) {
    turns_.push_back({tenant, {}});
    queue = turns_.end() - 1;
  }
  queue->jobs.push_back({id, std::move(work)});
  changed_.SignalAll();
}

bool Background::Ask(absl::FunctionRef<void()> question) {
  {
    MutexLock lock(&mutex_);
    question_ = &question;
  }
  post_([this] { Answer(); });
  MutexLock lock(&mutex_);
  while (question_ != nullptr && !stop_) changed_.Wait(&mutex_);
  return std::exchange(question_, nullptr) == nullptr;
}

// On the node thread, as Stop() is: the question stands until it has been answered.
void Background::Answer() {
  const absl::FunctionRef<void()>* question = nullptr;
  {
    MutexLock lock(&mutex_);
    question = question_;
  }
  if (question == nullptr) return;
  (*question)();
  MutexLock lock(&mutex_);
  question_ = nullptr;
  changed_.SignalAll();
}

void Background::Loop() {
  while (true) {
    Job job;
    {
      MutexLock lock(&mutex_);
      while (turns_.empty() && !stop_) changed_.Wait(&mutex_);
      if (stop_) return;
      Queue queue = std::move(turns_.front());
      turns_.pop_front();
      job = std::move(queue.jobs.front());
      queue.jobs.pop_front();
      if (!queue.jobs.empty()) turns_.push_back(std::move(queue));
    }
    job.work();
    job.work = nullptr;  // what it holds goes before its end is known
    post_([this, id = job.id] {
      const auto it = then_.find(id);
      const std::function<void()> then = std::move(it->second);
      then_.erase(it);
      then();
    });
  }
}

}  // namespace chorus::node
