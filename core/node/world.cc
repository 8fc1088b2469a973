#include "core/node/world.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace chorus::node {

absl::Status NotFormed(const World& world) {
  return MakeError(Reason::kWrongState,
                   absl::StrCat("world \"", world.name, "\" is not complete yet"));
}

absl::Status World::ReserveRows(size_t more) {
  constexpr int64_t kStep = 256;                              // rows charged at once
  const int64_t bytes_per_row = 256 + 128 * int64_t{size()};  // a row has a seat for each rank
  const int64_t wanted = static_cast<int64_t>(agreement->HeldRows() + more);
  const int64_t bytes = (wanted + kStep - 1) / kStep * kStep * bytes_per_row;
  // Given back when there is much too much.
  if (bytes <= rows.amount() && bytes > rows.amount() / 4) return absl::OkStatus();
  if (rows.amount() > 0) return rows.Resize(bytes);
  CHORUS_ASSIGN_OR_RETURN(rows, budget->Charge(Domain::kHost, Resource::kAgreementBytes, bytes));
  return absl::OkStatus();
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
