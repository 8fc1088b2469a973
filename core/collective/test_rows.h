// What the members of a group ask for in one call whose rows may differ, by chance: for tests of
// what contradicts.
//
// Threads: thread-compatible. Ownership: plain values. Errors: none.
#ifndef CHORUS_CORE_COLLECTIVE_TEST_ROWS_H_
#define CHORUS_CORE_COLLECTIVE_TEST_ROWS_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "core/base/ids.h"
#include "core/collective/instance.h"
#include "core/graph/graph.h"

namespace chorus {

class RandomRows {
 public:
  // Of a call that so many members make. About one in `mistakes_of` lists has a wrong number.
  RandomRows(uint64_t seed, int32_t members, int32_t mistakes_of)
      : random_(seed), members_(members), mistakes_of_(mistakes_of) {
    constexpr std::array kKinds = {CollectiveKind::kAllGather, CollectiveKind::kReduceScatter,
                                   CollectiveKind::kGather,    CollectiveKind::kScatter,
                                   CollectiveKind::kAllToAll,  CollectiveKind::kAllReduce};
    kind_ = kKinds[static_cast<size_t>(Below(kKinds.size()))];
    root_ = HasRoot(kind_) ? GroupRank(Below(members)) : GroupRank(-1);
    values_ = Below(3) == 0 ? 1 : 3;
    rows_.resize(static_cast<size_t>(members) * static_cast<size_t>(members));
    for (int64_t& rows : rows_) rows = Below(values_);
  }

  int32_t Below(size_t bound) { return static_cast<int32_t>(random_() % bound); }

  // What a member asks for: its lists, or one number for all, or nothing where it says nothing.
  Descriptor Of(int32_t member) {
    Descriptor what;
    what.kind = kind_;
    what.reduction = IsReducing(kind_) ? Reduction::kSum : Reduction::kNone;
    what.root = root_;
    what.dtype = DType::kF32;
    what.dims = {Descriptor::kRowsDiffer, 3};
    std::vector<int64_t> sends;
    std::vector<int64_t> receives;
    for (int32_t peer = 0; peer < members_; ++peer) {
      sends.push_back(RowsFrom(member, peer));
      receives.push_back(RowsFrom(peer, member));
    }
    what.sends = Said(std::move(sends));
    what.receives = Said(std::move(receives));
    if (what.sends.size() == 1 && what.sends == what.receives && Below(2) == 0) {
      what.dims[0] = what.sends[0];
      what.sends.clear();
      what.receives.clear();
    }
    return what;
  }

 private:
  // What a member gives to all at once does not depend on who gets it, and the other way round.
  int64_t RowsFrom(int32_t from, int32_t to) const {
    const CollectiveFacts& facts = FactsOf(kind_);
    const int32_t row = OfEach(facts.out) ? from : 0;
    const int32_t column = OfEach(facts.in) ? to : 0;
    return rows_[static_cast<size_t>(row) * static_cast<size_t>(members_) +
                 static_cast<size_t>(column)];
  }
  std::vector<int64_t> Said(std::vector<int64_t> rows) {
    if (Below(static_cast<size_t>(mistakes_of_)) == 0)
      ++rows[static_cast<size_t>(Below(rows.size()))];
    const auto is_silent = Below(4) == 0;
    if (is_silent) return {};
    bool alike = true;
    for (const int64_t number : rows) alike &= number == rows[0];
    if (alike && Below(2) == 0) rows.resize(1);
    return rows;
  }

  std::mt19937_64 random_;
  const int32_t members_;
  const int32_t mistakes_of_;
  CollectiveKind kind_;
  GroupRank root_{-1};
  size_t values_;
  std::vector<int64_t> rows_;  // of each piece, by who gives it and who gets it
};

}  // namespace chorus

#endif  // CHORUS_CORE_COLLECTIVE_TEST_ROWS_H_
