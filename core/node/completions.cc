#include "core/node/completions.h"

#include <algorithm>
#include <memory>

namespace chorus::node {

void News::Signal() {
  for (Completions* session : sessions_) {
    session->has_news_ = false;
    if (session->writer_ != nullptr) session->writer_->Signal();
  }
  sessions_.clear();
}

Completions::~Completions() {
  if (!has_news_) return;
  auto& sessions = news_->sessions_;
  sessions.erase(std::find(sessions.begin(), sessions.end(), this));
}

void Completions::Attach(SessionMemory* memory) {
  writer_ = std::make_unique<CompletionWriter>(memory);
  writer_->PublishUnfinished(unfinished_);
}

void Completions::PublishTensor(TensorId id, const TensorRecord& record) {
  if (writer_ == nullptr) return;
  writer_->PublishTensor(id, record);
  Tell();
}

void Completions::PublishRun(Sequence sequence, const RunOutcome& outcome) {
  if (writer_ == nullptr) return;
  writer_->PublishRun(sequence, outcome);
  Tell();
}

void Completions::PublishUnfinished(Sequence oldest) {
  unfinished_ = oldest;
  if (writer_ != nullptr) writer_->PublishUnfinished(oldest);
}

void Completions::Tell() {
  if (has_news_) return;
  has_news_ = true;
  news_->sessions_.push_back(this);
}

}  // namespace chorus::node
