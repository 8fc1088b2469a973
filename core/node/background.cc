#include "core/node/background.h"

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
  TurnQueue<Job> dropped;
  {
    MutexLock lock(&mutex_);
    std::swap(dropped, jobs_);
  }
  then_.clear();
}

void Background::Do(const std::string& tenant, std::function<void()> work,
                    std::function<void()> then) {
  MutexLock lock(&mutex_);
  if (stop_) return;
  const uint64_t id = ++last_id_;
  then_.emplace(id, std::move(then));
  jobs_.Push(tenant, {id, std::move(work)});
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
      while (jobs_.empty() && !stop_) changed_.Wait(&mutex_);
      if (stop_) return;
      job = jobs_.Pop();
    }
    Run(std::move(job));
  }
}

void Background::Run(Job job) {
  job.work();
  job.work = nullptr;  // what it holds goes before its end is known
  post_([this, id = job.id] {
    const auto it = then_.find(id);
    const std::function<void()> then = std::move(it->second);
    then_.erase(it);
    then();
  });
}

bool Background::DoOwn() {
  for (bool has_run = false;; has_run = true) {
    Job job;
    {
      MutexLock lock(&mutex_);
      if (stop_ || !jobs_.PopOf(/*owner=*/"", &job)) return has_run;
    }
    Run(std::move(job));
  }
}

}  // namespace chorus::node
