#include "core/node/world.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace chorus::node {

absl::Status NotFormed(const World& world) {
  return MakeError(Reason::kWrongState,
                   absl::StrCat("world \"", world.name, "\" is not complete yet"));
}

absl::Status World::ReserveRows(size_t count) {
  const int64_t bytes_per_row = 256 + 128 * int64_t{size()};  // a row has a seat for each rank
  return rows.Cover(static_cast<int64_t>(agreement->HeldRows() + count) * bytes_per_row);
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
