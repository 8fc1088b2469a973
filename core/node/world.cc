#include "core/node/world.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace chorus::node {

absl::Status NotFormed(const World& world) {
  return MakeError(Reason::kWrongState,
                   absl::StrCat("world \"", world.name, "\" is not complete yet"));
}

absl::Status World::Reserve(size_t count, size_t groups, size_t group_members) {
  const int64_t bytes_per_row = 256 + 128 * int64_t{size()};  // a row has a seat for each rank
  constexpr int64_t kPerGroup = 512;
  constexpr int64_t kPerMember = 320;  // with its counter's line, and what it has asked for
  return rows.Cover(static_cast<int64_t>(agreement->HeldRows() + count) * bytes_per_row +
                    (agreement->num_groups() + static_cast<int64_t>(groups)) * kPerGroup +
                    (agreement->num_group_members() + static_cast<int64_t>(group_members)) *
                        kPerMember);
}

void SayOpenEpoch(const World& world, Epoch open, Error* error) {
  if (error->alone) return;
  auto ended = std::find_if(error->ended.begin(), error->ended.end(),
                            [&world](const Error::EndedEpoch& e) { return e.world == world.id; });
  if (ended == error->ended.end()) {
    if (error->ended.size() == Error::kMaxRanks) return;
    ended = error->ended.insert(ended, {world.id, Epoch()});
  }
  if (ended->open == open) return;
  ended->open = open;
  error->id = ErrorId();  // what was recorded does not say so
}

}  // namespace chorus::node
