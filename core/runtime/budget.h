// What a node may hold, and which client holds how much of it. Charging is the admission test: what
// a client can make the node hold is charged before it is made.
//
// Budgets form a tree: the node's, within it one for each tenant, within that one for each session.
// What is charged to one is charged to those that it lies within, or to none. A tenant has a share
// of everything that is smaller than the whole, so that another always gets in.
//
// What has been given up may take a while to be gone: pages are unmapped beside the node thread.
// Until then its charge leaves (Charge::Leave): it counts as held no more, but other arenas, which
// would take its place at once, do not fit yet. They are refused for now (IsForNow): a caller that
// can wait asks again later. All else may take the place, for it is made more slowly than pages are
// unmapped.
//
// Threads: the node thread. Ownership: counted; a charge keeps its budget, a budget its parent.
// Errors: RESOURCE_EXHAUSTED where a charge does not fit; nothing is charged then.
#ifndef CHORUS_CORE_RUNTIME_BUDGET_H_
#define CHORUS_CORE_RUNTIME_BUDGET_H_

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/base/work.h"

namespace chorus {

// A memory that bytes stand in. One now, whatever devices there are: each physical GPU's memory
// will be one.
enum class Domain : uint8_t { kHost = 0 };
inline constexpr size_t kDomains = 1;

// What is held. Bytes share one limit a domain; of the others each has one.
enum class Resource : uint8_t {
  // Bytes.
  kStagingBytes = 0,  // arenas that clients write
  kResultBytes,       // arenas and device memory that runs write
  kSessionBytes,      // rings and tables of sessions
  kNameBytes,         // what tensors' ids stand for
  kGraphBytes,        // graphs and their plans
  kCommandBytes,      // frames that wait for their turn
  kRunBytes,          // runs under way
  kAgreementBytes,    // what ranks may still ask of calls
  kTransferBytes,     // parts of tensors on their way to clients
  // Numbers.
  kSessions,
  kWorlds,
  kDescriptors,  // of arenas and sessions
  kWaits,        // calls that wait for something
  kDownloads,    // tensors that are being read
  kGraphs,       // that sessions have names for
};
inline constexpr size_t kResources = 15;
inline constexpr bool IsBytes(Resource resource) { return resource <= Resource::kTransferBytes; }

// Of a bound on what all have together, what one may have, so that another always gets in: seven
// eighths, rounded down, and at least one. INT64_MAX is no bound, and has no share.
constexpr int64_t ShareOf(int64_t bound) {
  return bound < 2 || bound == INT64_MAX ? bound : bound - bound / 8 - (bound % 8 != 0 ? 1 : 0);
}

// So much work of a slice there is for owners to give back what they keep, one portion apart.
inline constexpr int64_t kReclaimWork = kTurnWork / 2;

class Budget;
using BudgetRef = std::shared_ptr<Budget>;

// Something charged, given back with this object.
class Charge {
 public:
  Charge() = default;
  Charge(Charge&& other) noexcept
      : budget_(std::move(other.budget_)),
        domain_(other.domain_),
        resource_(other.resource_),
        leaves_(other.leaves_),
        amount_(std::exchange(other.amount_, 0)) {}
  Charge& operator=(Charge&& other) noexcept {
    Charge(std::move(other)).Swap(this);
    return *this;
  }
  ~Charge();

  int64_t amount() const { return amount_; }
  // That it is charged to. Not of a default-made one.
  const Budget& budget() const { return *budget_; }
  bool LiesWithin(const Budget& budget) const;
  // Charges more of the same, as Budget::Charge does, or gives some back. Not of a default-made
  // one.
  absl::Status Resize(int64_t amount);
  // What it is for is given up, and gone when this object is: nothing else is done with it. Not of
  // one that leaves already.
  void Leave();
  // So much of it, which it has, as a charge of its own.
  Charge Split(int64_t amount) {
    amount_ -= amount;
    return Charge(budget_, domain_, resource_, amount);
  }

 private:
  friend class Budget;
  Charge(BudgetRef budget, Domain domain, Resource resource, int64_t amount)
      : budget_(std::move(budget)), domain_(domain), resource_(resource), amount_(amount) {}
  void Swap(Charge* other) {
    std::swap(budget_, other->budget_);
    std::swap(domain_, other->domain_);
    std::swap(resource_, other->resource_);
    std::swap(leaves_, other->leaves_);
    std::swap(amount_, other->amount_);
  }

  BudgetRef budget_;
  Domain domain_ = Domain::kHost;
  Resource resource_ = Resource::kStagingBytes;
  bool leaves_ = false;
  int64_t amount_ = 0;
};

// Whether a charge was refused that will fit when what leaves has gone, or when a slice has the
// time to give back more of what is kept.
bool IsForNow(const absl::Status& refusal);
// The same refusal as one that is for now.
absl::Status ForNow(absl::Status refusal);

class Budget : public std::enable_shared_from_this<Budget> {
 public:
  // Of all bytes together; of each number. What is not named has no limit.
  struct Limits {
    std::array<int64_t, kDomains> bytes{INT64_MAX};
    int64_t sessions = INT64_MAX;
    int64_t worlds = INT64_MAX;
    int64_t descriptors = INT64_MAX;
    int64_t waits = INT64_MAX;
    int64_t downloads = INT64_MAX;
    int64_t graphs = INT64_MAX;
    // ShareOf each: one tenant's share of a node.
    Limits Share() const;
  };

  // The node's.
  static BudgetRef OfNode(const Limits& limits);
  static BudgetRef OfNode(int64_t limit_bytes);
  // `holder`, in words: "tenant uid:1000".
  static BudgetRef Within(BudgetRef parent, std::string holder, const Limits& limits);
  Budget(const Budget&) = delete;
  Budget& operator=(const Budget&) = delete;

  // RESOURCE_EXHAUSTED: kOutOfMemory for bytes, with need and free; kQuota for numbers. Where too
  // few bytes or descriptors are free owners that keep some of them give them back first.
  absl::StatusOr<chorus::Charge> Charge(Domain domain, Resource resource, int64_t amount);

  // Bytes of a domain, of all kinds.
  int64_t limit(Domain domain = Domain::kHost) const {
    return limits_.bytes[static_cast<size_t>(domain)];
  }
  int64_t used(Domain domain = Domain::kHost) const { return bytes_[static_cast<size_t>(domain)]; }
  int64_t held(Resource resource) const { return held_[static_cast<size_t>(resource)]; }
  int64_t leaving() const { return leaving_bytes_[static_cast<size_t>(Domain::kHost)]; }
  const Limits& limits() const { return limits_; }

  // The one around it, or itself, that lies directly within the node's; the node's has none, but is
  // its own.
  const Budget& share() const;
  // It is `outer`, or lies within it.
  bool LiesWithin(const Budget& outer) const;

  // `reclaim` gives back some of what its owner keeps for reuse and has charged to budgets within
  // `full`: what others keep is theirs. Whether it did: then it is called again if that was not
  // enough, unless the slice has done kReclaimWork. Owners are asked in the order of these calls
  // until what is given back and what leaves are enough, the first in any case: it may know that
  // what leaves has gone. It is called until Forget() of its `owner`, for any budget of the same
  // tree; it charges nothing.
  using GiveBack = std::function<bool(const Budget& full)>;
  void Reclaim(const void* owner, GiveBack reclaim);
  void Forget(const void* owner);
  // Bytes that the whole tree has, with those that leave.
  int64_t charged_in_all() const;

 private:
  friend class chorus::Charge;
  Budget(BudgetRef parent, std::string holder, const Limits& limits);
  absl::Status Add(Domain domain, Resource resource, int64_t amount);
  void Remove(Domain domain, Resource resource, int64_t amount);
  // What is held leaves, and what leaves is gone.
  void Leave(Domain domain, Resource resource, int64_t amount);
  void Gone(Domain domain, Resource resource, int64_t amount);
  // How much of it still fits into this budget alone when all that leaves has gone; and how much of
  // that it has to wait for.
  int64_t Free(Domain domain, Resource resource) const;
  int64_t Awaited(Domain domain, Resource resource) const;
  absl::Status Refuse(Domain domain, Resource resource, int64_t amount) const;
  Budget* node();

  const BudgetRef parent_;  // null: the node's
  const std::string holder_;
  const Limits limits_;
  std::array<int64_t, kDomains> bytes_{};
  std::array<int64_t, kResources> held_{};
  std::array<int64_t, kDomains> leaving_bytes_{};
  int64_t leaving_descriptors_ = 0;
  // The node's budget alone has them.
  std::vector<std::pair<const void*, GiveBack>> reclaims_;
};

// A charge for what goes up and down with every call: it is taken and given back in steps.
class SteppedCharge {
 public:
  SteppedCharge(BudgetRef budget, Resource resource, int64_t step)
      : budget_(std::move(budget)), resource_(resource), step_(step) {}

  // Covers `amount`, all that there is of it, from now on. RESOURCE_EXHAUSTED as Budget::Charge,
  // and what was covered before still is.
  absl::Status Cover(int64_t amount) {
    const bool much_too_much = charge_.amount() > 4 * amount + step_;
    if (amount <= charge_.amount() && !much_too_much) return absl::OkStatus();
    return Resize(amount);
  }
  // What is covered is the caller's from now on.
  Charge Take() { return std::move(charge_); }
  // The same of what is covered beyond `amount`: that is given up, and takes a while to be gone.
  Charge TakeBeyond(int64_t amount);

 private:
  int64_t Rounded(int64_t amount) const { return (amount + step_ - 1) / step_ * step_; }
  absl::Status Resize(int64_t amount);

  const BudgetRef budget_;
  const Resource resource_;
  const int64_t step_;
  Charge charge_;
};

}  // namespace chorus

#endif  // CHORUS_CORE_RUNTIME_BUDGET_H_
