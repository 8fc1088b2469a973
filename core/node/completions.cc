#include "core/node/completions.h"

#include <algorithm>

namespace chorus::node {

void News::Signal() {
  for (Completions* session : told_) {
    session->has_news_ = false;
    if (session->writer_ != nullptr) session->writer_->Signal();
  }
  told_.clear();
}

Completions::~Completions() {
  if (!has_news_) return;
  auto& told = news_->told_;
  told.erase(std::find(told.begin(), told.end(), this));
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
  news_->told_.push_back(this);
}

}  // namespace chorus::node
