#include "core/node/completions.h"

#include <algorithm>

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

void Completions::Tell() {
  if (has_news_) return;
  has_news_ = true;
  news_->sessions_.push_back(this);
}

}  // namespace chorus::node
