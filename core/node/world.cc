#include "core/node/world.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace chorus::node {

absl::Status NotFormed(const World& world) {
  return MakeError(Reason::kWrongState,
                   absl::StrCat("world \"", world.name, "\" is not complete yet"));
}

namespace {

// Of a group's member, with its counter's line, and what it has asked for; or of a world's, which
// is a member of the first group from when all have joined.
constexpr int64_t kPerMember = 320;
// Of a rank, with what its agreement knows of it: how it died, and why it is out of line.
constexpr int64_t kPerRank = 1536;
// The error of an epoch that has ended, while its runs wait for their turn to fail.
constexpr int64_t kEndBytes = int64_t{13} << 10;

}  // namespace

absl::Status World::MakeMembers(int size) {
  static_assert(sizeof(Member) <= kPerMember);
  CHORUS_RETURN_IF_ERROR(rows.Cover(FixedBytes(size)));
  members.resize(static_cast<size_t>(size));
  first_size = size;
  return absl::OkStatus();
}

int64_t World::FixedBytes(int size) {
  return Agreement::kMostCauseBytes + kGivenUpBytes + kEndBytes +
         int64_t{size} * (kPerMember + kPerRank);
}

int64_t World::BytesWith(size_t calls, int64_t path_bytes, size_t groups,
                         size_t group_members) const {
  constexpr int64_t kPerGroup = 512;
  return FixedBytes(size()) + warning_bytes + agreement->HeldBytes() +
         static_cast<int64_t>(calls) * agreement->BytesPerCall() + path_bytes +
         (agreement->num_groups() + static_cast<int64_t>(groups)) * kPerGroup +
         (agreement->num_group_members() + static_cast<int64_t>(group_members)) * kPerMember;
}

void World::AddWarning(std::shared_ptr<const Error> warning) {
  const int64_t bytes = BytesOf(*warning);
  warning_bytes += bytes;
  if (Reserve(0, 0, 0, 0).ok()) return warnings.push_back(std::move(warning));
  warning_bytes -= bytes;
  ++warnings_left_out;
}

std::shared_ptr<const Error> World::TakeWarning() {
  if (!warnings.empty()) {
    std::shared_ptr<const Error> warning = std::move(warnings.front());
    warnings.pop_front();
    warning_bytes -= BytesOf(*warning);
    return warning;
  }
  // Behind the last one.
  const int64_t left_out = std::exchange(warnings_left_out, 0);
  return std::make_shared<const Error>(
      Reason::kMismatch,
      absl::StrCat("in world \"", name, "\" ", left_out,
                   " more calls are made in different lines, and were taken for one call each; "
                   "there was no memory to write them down"));
}

void SayOpenEpoch(const World& world, Epoch open_epoch, Error* error) {
  if (error->alone) return;
  auto ended = std::find_if(error->ended.begin(), error->ended.end(),
                            [&world](const Error::EndedEpoch& e) { return e.world == world.id; });
  if (ended == error->ended.end()) {
    if (error->ended.size() == Error::kMaxRanks) return;
    ended = error->ended.insert(ended, {world.id, Epoch()});
  }
  if (ended->open == open_epoch) return;
  ended->open = open_epoch;
  error->id = ErrorId();  // what was recorded does not say so
}

}  // namespace chorus::node
