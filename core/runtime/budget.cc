#include "core/runtime/budget.h"

#include <algorithm>
#include <iterator>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/base/work.h"

namespace chorus {
namespace {

constexpr const char* kNames[] = {
    "staging bytes", "result bytes", "session bytes",   "name bytes",     "graph bytes",
    "command bytes", "run bytes",    "agreement bytes", "transfer bytes", "sessions",
    "worlds",        "descriptors",  "waits",           "downloads",      "graphs"};
static_assert(std::size(kNames) == kResources);

// Of a status that says IsForNow.
constexpr char kForNow[] = "chorus.for_now";

// What is as large as that as soon as it is made.
bool IsOfArenas(Resource resource) {
  return resource == Resource::kStagingBytes || resource == Resource::kResultBytes ||
         resource == Resource::kDescriptors;
}

}  // namespace

// --- Charge -------------------------------------------------------------------------------------

Charge::~Charge() {
  if (budget_ == nullptr) return;
  leaves_ ? budget_->Gone(domain_, resource_, amount_)
          : budget_->Remove(domain_, resource_, amount_);
}

void Charge::Leave() {
  if (budget_ != nullptr) budget_->Leave(domain_, resource_, amount_);
  leaves_ = true;
}

bool Charge::LiesWithin(const Budget& budget) const {
  return budget_ != nullptr && budget_->LiesWithin(budget);
}

absl::Status Charge::Resize(int64_t amount) {
  if (amount > amount_) {
    CHORUS_RETURN_IF_ERROR(budget_->Add(domain_, resource_, amount - amount_));
  } else {
    budget_->Remove(domain_, resource_, amount_ - amount);
  }
  amount_ = amount;
  return absl::OkStatus();
}

bool IsForNow(const absl::Status& refusal) { return refusal.GetPayload(kForNow).has_value(); }

absl::Status ForNow(absl::Status refusal) {
  refusal.SetPayload(kForNow, absl::Cord());
  return refusal;
}

// --- Budget -------------------------------------------------------------------------------------

Budget::Limits Budget::Limits::Share() const {
  Limits share = {bytes,          ShareOf(sessions),  ShareOf(worlds), ShareOf(descriptors),
                  ShareOf(waits), ShareOf(downloads), ShareOf(graphs)};
  for (int64_t& limit : share.bytes) limit = ShareOf(limit);
  return share;
}

Budget::Budget(BudgetRef parent, std::string holder, const Limits& limits)
    : parent_(std::move(parent)), holder_(std::move(holder)), limits_(limits) {}

BudgetRef Budget::OfNode(const Limits& limits) {
  return BudgetRef(new Budget(nullptr, "the daemon", limits));
}

BudgetRef Budget::OfNode(int64_t limit_bytes) {
  Limits limits;
  limits.bytes[static_cast<size_t>(Domain::kHost)] = limit_bytes;
  return OfNode(limits);
}

BudgetRef Budget::Within(BudgetRef parent, std::string holder, const Limits& limits) {
  return BudgetRef(new Budget(std::move(parent), std::move(holder), limits));
}

absl::StatusOr<Charge> Budget::Charge(Domain domain, Resource resource, int64_t amount) {
  CHORUS_RETURN_IF_ERROR(Add(domain, resource, amount));
  return chorus::Charge(shared_from_this(), domain, resource, amount);
}

int64_t Budget::Free(Domain domain, Resource resource) const {
  if (IsBytes(resource)) return limit(domain) - used(domain);
  const int64_t held = held_[static_cast<size_t>(resource)];
  switch (resource) {
    case Resource::kSessions:
      return limits_.sessions - held;
    case Resource::kWorlds:
      return limits_.worlds - held;
    case Resource::kDescriptors:
      return limits_.descriptors - held;
    case Resource::kDownloads:
      return limits_.downloads - held;
    case Resource::kGraphs:
      return limits_.graphs - held;
    default:
      return limits_.waits - held;
  }
}

int64_t Budget::Awaited(Domain domain, Resource resource) const {
  if (!IsOfArenas(resource)) return 0;
  return IsBytes(resource) ? leaving_bytes_[static_cast<size_t>(domain)] : leaving_descriptors_;
}

absl::Status Budget::Add(Domain domain, Resource resource, int64_t amount) {
  for (const Budget* at = this; at != nullptr; at = at->parent_.get()) {
    const auto fits = [&] {
      return amount == 0 || amount <= at->Free(domain, resource) - at->Awaited(domain, resource);
    };
    if (fits()) continue;
    const auto will_fit = [&] { return amount <= at->Free(domain, resource); };
    // One command may have hundreds of charges that fail; and much work behind it, when it comes to
    // one that must not.
    const auto has_time = [] { return SliceWork() <= kReclaimWork; };
    bool ran_out_of_time = false;
    // What is kept has bytes and descriptors.
    if (IsBytes(resource) || resource == Resource::kDescriptors) {
      for (const auto& reclaim : node()->reclaims_) {
        bool gave_back = reclaim.second(*at);
        while (gave_back && !will_fit() && has_time()) gave_back = reclaim.second(*at);
        if (will_fit()) break;
        ran_out_of_time |= gave_back;
      }
    }
    if (fits()) continue;
    absl::Status refusal = at->Refuse(domain, resource, amount);
    return will_fit() || ran_out_of_time ? ForNow(std::move(refusal)) : refusal;
  }
  for (Budget* at = this; at != nullptr; at = at->parent_.get()) {
    if (IsBytes(resource)) at->bytes_[static_cast<size_t>(domain)] += amount;
    at->held_[static_cast<size_t>(resource)] += amount;
  }
  return absl::OkStatus();
}

void Budget::Remove(Domain domain, Resource resource, int64_t amount) {
  for (Budget* at = this; at != nullptr; at = at->parent_.get()) {
    if (IsBytes(resource)) at->bytes_[static_cast<size_t>(domain)] -= amount;
    at->held_[static_cast<size_t>(resource)] -= amount;
  }
}

void Budget::Leave(Domain domain, Resource resource, int64_t amount) {
  Remove(domain, resource, amount);
  for (Budget* at = this; at != nullptr; at = at->parent_.get()) {
    if (IsBytes(resource)) at->leaving_bytes_[static_cast<size_t>(domain)] += amount;
    if (resource == Resource::kDescriptors) at->leaving_descriptors_ += amount;
  }
}

void Budget::Gone(Domain domain, Resource resource, int64_t amount) {
  for (Budget* at = this; at != nullptr; at = at->parent_.get()) {
    if (IsBytes(resource)) at->leaving_bytes_[static_cast<size_t>(domain)] -= amount;
    if (resource == Resource::kDescriptors) at->leaving_descriptors_ -= amount;
  }
}

absl::Status Budget::Refuse(Domain domain, Resource resource, int64_t amount) const {
  const int64_t free = Free(domain, resource);
  const int64_t awaited = Awaited(domain, resource);
  if (IsBytes(resource)) {
    std::string text =
        parent_ == nullptr
            ? absl::StrCat("out of memory: ", amount, " bytes are needed, ", free,
                           " of the daemon's ", limit(domain), " are free")
            : absl::StrCat("out of memory: ", amount, " bytes are needed, ", free, " of the ",
                           limit(domain), " that ", holder_, " may hold are free");
    if (awaited > 0) {
      absl::StrAppend(&text, ", of which ", awaited, " are still on their way back to the kernel");
    }
    return MakeError(Reason::kOutOfMemory, text);
  }
  const int64_t held = held_[static_cast<size_t>(resource)];
  return MakeError(Reason::kQuota,
                   absl::StrCat(holder_, parent_ == nullptr ? " has " : " holds ", held, " ",
                                kNames[static_cast<size_t>(resource)], " of ", held + free,
                                " that it may have, and ", amount, " more are asked for"));
}

Budget* Budget::node() {
  Budget* at = this;
  while (at->parent_ != nullptr) at = at->parent_.get();
  return at;
}

const Budget& Budget::share() const {
  const Budget* at = this;
  while (at->parent_ != nullptr && at->parent_->parent_ != nullptr) at = at->parent_.get();
  return *at;
}

bool Budget::LiesWithin(const Budget& outer) const {
  for (const Budget* at = this; at != nullptr; at = at->parent_.get()) {
    if (at == &outer) return true;
  }
  return false;
}

void Budget::Reclaim(const void* owner, GiveBack reclaim) {
  node()->reclaims_.emplace_back(owner, std::move(reclaim));
}

void Budget::Forget(const void* owner) {
  auto& reclaims = node()->reclaims_;
  reclaims.erase(std::remove_if(reclaims.begin(), reclaims.end(),
                                [owner](const auto& entry) { return entry.first == owner; }),
                 reclaims.end());
}

int64_t Budget::charged_in_all() const {
  const Budget* at = this;
  while (at->parent_ != nullptr) at = at->parent_.get();
  return at->used() + at->leaving();
}

// --- SteppedCharge ------------------------------------------------------------------------------

Charge SteppedCharge::TakeBeyond(int64_t amount) {
  const int64_t beyond = charge_.amount() - Rounded(amount);
  return beyond > 0 ? charge_.Split(beyond) : Charge();
}

absl::Status SteppedCharge::Resize(int64_t amount) {
  const int64_t rounded = Rounded(amount);
  if (charge_.amount() > 0) return charge_.Resize(rounded);
  CHORUS_ASSIGN_OR_RETURN(charge_, budget_->Charge(Domain::kHost, resource_, rounded));
  return absl::OkStatus();
}

}  // namespace chorus
