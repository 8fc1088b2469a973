// Communicators, and whose they are.
//
// What fails in a communicator ends every call that waits in it, so no two owners share one. An
// owner is a world, or a session, for copies between its own devices. It leases a communicator for
// each ordered set of devices that it needs, keeps it, and gives it back at its end. The pool keeps
// some of those open for what comes next, for a backend may take long to open one.
//
// Threads: the node thread. Ownership: leases may outlive their pool. Errors: said at each
// function.
#ifndef CHORUS_CORE_NODE_COMMUNICATORS_H_
#define CHORUS_CORE_NODE_COMMUNICATORS_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "core/base/ids.h"
#include "core/runtime/budget.h"
#include "core/runtime/executor.h"
#include "core/runtime/messages.h"

namespace chorus::node {

class CommunicatorLease;

class CommunicatorPool {
 public:
  // In any order of any devices; beyond that the one that has been idle longest is closed.
  static constexpr size_t kMaxIdle = 64;

  // `executors`, by device, must stand as long as a lease is used.
  explicit CommunicatorPool(const std::vector<std::unique_ptr<Executor>>* executors)
      : executors_(executors) {}

  // An idle one of these devices, or a new one, for `lease`. Launches may use it at once.
  CommunicatorId Take(const std::vector<int>& devices, CommunicatorLease* lease);
  // It is whole, and no call is under way in it.
  void GiveBack(std::vector<int> devices, CommunicatorId id);
  // What has become of one of its ends. One that could not be opened has failed: its lease drops
  // it.
  void OnOpened(CommunicatorId id, const absl::Status& status);
  // Ends the calls that wait in it, with `why`, and closes it.
  void Drop(const std::vector<int>& devices, CommunicatorId id, const absl::Status& why);
  // The device is lost: so are its ends.
  void Lost(int device);

  size_t idle() const { return idle_.size(); }
  size_t open() const { return idle_.size() + leased_.size(); }

 private:
  void Close(const std::vector<int>& devices, CommunicatorId id);
  Executor& executor(int device) const { return *(*executors_)[static_cast<size_t>(device)]; }

  const std::vector<std::unique_ptr<Executor>>* const executors_;
  CommunicatorId last_;
  absl::flat_hash_map<CommunicatorId, CommunicatorLease*> leased_;
  std::deque<std::pair<std::vector<int>, CommunicatorId>> idle_;  // by devices; oldest first
};

class CommunicatorLease {
 public:
  // What is leased is charged to `budget`, but for a few, which every world needs.
  static constexpr int64_t kNotCharged = 16 << 10;
  CommunicatorLease(std::weak_ptr<CommunicatorPool> pool, BudgetRef budget)
      : pool_(std::move(pool)), charge_(std::move(budget), Resource::kRunBytes, 4096) {}
  // Gives all back: no call may be under way in them.
  ~CommunicatorLease();
  CommunicatorLease(const CommunicatorLease&) = delete;
  CommunicatorLease& operator=(const CommunicatorLease&) = delete;

  // The one of these devices in this order, leased at its first use. RESOURCE_EXHAUSTED
  // kOutOfMemory: it cannot be charged.
  absl::StatusOr<CommunicatorId> Of(absl::Span<const DeviceIndex> devices);
  // Where the owner notes that of a group, which spares it the look-up: 0 until it has, and again
  // when one is dropped. Until the next call.
  CommunicatorId& OfGroup(GroupId group);
  // It has failed, or may hang: CommunicatorPool::Drop, and the next use leases another. One that
  // this has not, or not any more, is ignored.
  void Drop(CommunicatorId id, const absl::Status& why);
  bool IsOn(int device, CommunicatorId id) const;

 private:
  // Charges for so much in all.
  absl::Status Cover(int64_t bytes);

  const std::weak_ptr<CommunicatorPool> pool_;
  SteppedCharge charge_;
  int64_t bytes_ = 0;
  absl::flat_hash_map<std::vector<int>, CommunicatorId> by_devices_;
  absl::flat_hash_map<CommunicatorId, std::vector<int>> devices_of_;
  std::vector<CommunicatorId> by_group_;
};

}  // namespace chorus::node

#endif  // CHORUS_CORE_NODE_COMMUNICATORS_H_
