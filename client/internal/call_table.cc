#include "client/internal/call_table.h"

namespace chorus {
namespace internal {

CallTable::BatchKey CallTable::KeyOf(absl::Span<const CallPart> parts) {
  BatchKey key;
  key.reserve(parts.size());
  for (const CallPart& part : parts) key.emplace_back(part.group, part.key);
  return key;
}

CallEntry* CallTable::Search(absl::Span<const CallPart> parts) {
  if (parts.size() > 1) {
    const auto row = batches_.find(KeyOf(parts));
    return row == batches_.end() ? nullptr : row->second.get();
  }
  const CallKey& key = parts[0].key;
  const auto row = calls_.find(key);
  if (row == calls_.end()) return nullptr;
  last_key_ = key;
  last_entry_ = row->second.get();
  return last_entry_;
}

CallEntry* CallTable::Add(absl::Span<const CallPart> parts, std::unique_ptr<CallEntry> entry) {
  if (parts.size() > 1) {
    return batches_.emplace(KeyOf(parts), std::move(entry)).first->second.get();
  }
  return calls_.emplace(parts[0].key, std::move(entry)).first->second.get();
}

std::vector<GraphId> CallTable::graphs() const {
  std::vector<GraphId> graphs;
  for (const auto& call : calls_) graphs.push_back(call.second->draft.run().graph);
  for (const auto& batch : batches_) graphs.push_back(batch.second->draft.run().graph);
  return graphs;
}

void CallTable::Clear() {
  calls_.clear();
  batches_.clear();
  last_entry_ = nullptr;
}

}  // namespace internal
}  // namespace chorus
