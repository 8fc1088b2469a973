#include "core/worker/under_way.h"

#include <algorithm>

namespace chorus::worker {
namespace {

template <typename Id, typename Ids>
std::vector<Id> Ascending(const Ids& ids) {
  std::vector<Id> ascending(ids.begin(), ids.end());
  std::sort(ascending.begin(), ascending.end());
  return ascending;
}

}  // namespace

UnderWay::Transfer* UnderWay::Find(TransferId id) {
  const auto it = transfers_.find(id);
  return it == transfers_.end() ? nullptr : &it->second;
}

bool UnderWay::End(const EventMessage& event) {
  struct Ended {
    bool operator()(const CompletionMessage& of) { return all->launches_.erase(of.launch) > 0; }
    bool operator()(const LoadedMessage& of) { return all->loads_.erase(of.plan) > 0; }
    bool operator()(const OpenedMessage& of) { return all->opens_.erase(of.communicator) > 0; }
    bool operator()(const TransferredMessage& of) {
      const Transfer* const transfer = all->Find(of.transfer);
      if (transfer == nullptr) return false;
      const bool is_whole = transfer->bytes_done == transfer->bytes;
      // An upload's memory is read until then, whatever becomes of it.
      if (!is_whole && (transfer->is_upload() || of.status.ok())) return false;
      all->End(of.transfer);
      return true;
    }
    bool operator()(const LostMessage&) { return false; }
    UnderWay* all;
  };
  return absl::visit(Ended{this}, event);
}

std::vector<EventMessage> UnderWay::EndAll(const absl::Status& why, TransferId excluded) {
  std::vector<EventMessage> events;
  for (const LaunchId id : Ascending<LaunchId>(launches_)) {
    events.push_back(CompletionMessage{id, why});
  }
  for (const PlanId id : Ascending<PlanId>(loads_)) events.push_back(LoadedMessage{id, why});
  for (const CommunicatorId id : Ascending<CommunicatorId>(opens_)) {
    events.push_back(OpenedMessage{id, why});
  }
  for (auto transfer = transfers_.begin(); transfer != transfers_.end();) {
    if (transfer->first == excluded) {
      ++transfer;
      continue;
    }
    events.push_back(TransferredMessage{transfer->first, why});
    transfer = transfers_.erase(transfer);
  }
  launches_.clear();
  loads_.clear();
  opens_.clear();
  return events;
}

}  // namespace chorus::worker
