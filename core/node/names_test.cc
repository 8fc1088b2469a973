#include "core/node/names.h"

#include <memory>
#include <string>
#include <vector>

#include "core/base/release_queue.h"
#include "core/base/work.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace chorus::node {
namespace {

using ::testing::HasSubstr;

TensorId Tensor(int32_t slot, uint32_t generation) {
  TensorId id;
  id.slot = slot;
  id.generation = generation;
  return id;
}

GraphId GraphAt(int32_t slot, uint32_t generation) {
  GraphId id;
  id.slot = slot;
  id.generation = generation;
  return id;
}

CellRef Ready() {
  auto cell = std::make_shared<Cell>();
  cell->state = Cell::State::kReady;
  cell->type = std::make_shared<TensorType>();
  return cell;
}

Reason ReasonOf(const absl::Status& status) { return ErrorOf(status).reason; }

// Two graphs, 64 tensors in a small table, a little for graphs.
Budget::Limits LimitsOfTest() {
  Budget::Limits limits;
  limits.bytes[static_cast<size_t>(Domain::kHost)] =
      64 * Names::kBytesPerTensor + Names::kTableStep + 4096;
  limits.graphs = 2;
  return limits;
}

class NamesTest : public ::testing::Test {
 protected:
  News news_;
  Completions completions_{&news_};
  BudgetRef budget_ = Budget::OfNode(LimitsOfTest());
  Names names_{{/*tensors=*/256, /*graphs=*/4}, budget_, &completions_};
};

TEST_F(NamesTest, AGenerationNamesOneTensor) {
  const CellRef first = Ready();
  const CellRef second = Ready();
  names_.NameTensor(Tensor(3, 1), first);
  EXPECT_EQ(*names_.FindTensor(Tensor(3, 1)), first);
  names_.ReleaseTensor(Tensor(3, 1));
  EXPECT_EQ(ReasonOf(names_.FindTensor(Tensor(3, 1)).status()), Reason::kUnknownName);
  names_.NameTensor(Tensor(3, 2), second);
  EXPECT_EQ(*names_.FindTensor(Tensor(3, 2)), second);
  EXPECT_EQ(ReasonOf(names_.FindTensor(Tensor(3, 1)).status()), Reason::kUnknownName);
  names_.ReleaseTensor(Tensor(3, 1));  // late: it is its successor's slot now
  EXPECT_EQ(names_.live_tensors(), 1);
}

TEST_F(NamesTest, SlotsAndGenerationsAreChecked) {
  EXPECT_TRUE(names_.CheckFresh(Tensor(0, 1)).ok());
  EXPECT_TRUE(names_.CheckFresh(Tensor(7, 5)).ok());
  EXPECT_EQ(ReasonOf(names_.CheckFresh(Tensor(256, 1))), Reason::kMalformed);
  EXPECT_EQ(ReasonOf(names_.CheckFresh(Tensor(-1, 1))), Reason::kMalformed);
  EXPECT_EQ(ReasonOf(names_.CheckFresh(Tensor(0, 0))), Reason::kMalformed);
  names_.NameTensor(Tensor(0, 4), Ready());
  EXPECT_THAT(ErrorOf(names_.CheckFresh(Tensor(0, 5))).message, HasSubstr("is in use"));
  names_.ReleaseTensor(Tensor(0, 4));
  EXPECT_THAT(ErrorOf(names_.CheckFresh(Tensor(0, 4))).message, HasSubstr("the last was 4"));
  EXPECT_TRUE(names_.CheckFresh(Tensor(0, 5)).ok());
}

// Its client does not use it again (client/internal/log.h).
TEST_F(NamesTest, ASlotsLastGenerationHasNoSuccessor) {
  constexpr uint32_t kLast = 0xffffffff;
  names_.NameTensor(Tensor(0, kLast), Ready());
  names_.ReleaseTensor(Tensor(0, kLast));
  ASSERT_TRUE(names_.NameGraph(GraphAt(0, kLast), std::make_shared<GraphRecord>()).ok());
  names_.ReleaseGraph(GraphAt(0, kLast));
  for (const uint32_t generation : {uint32_t{0}, uint32_t{1}, kLast}) {
    EXPECT_EQ(ReasonOf(names_.CheckFresh(Tensor(0, generation))), Reason::kMalformed);
    EXPECT_EQ(ReasonOf(names_.CheckFresh(GraphAt(0, generation))), Reason::kMalformed);
  }
  EXPECT_TRUE(names_.CheckFresh(Tensor(1, 1)).ok());
}

TEST_F(NamesTest, ANameThatWasReleasedIsNotReplaced) {
  const CellRef cell = Ready();
  names_.NameTensor(Tensor(1, 1), cell);
  EXPECT_TRUE(names_.StandsFor(Tensor(1, 1), *cell));
  const CellRef other = Ready();
  names_.ReplaceTensor(Tensor(1, 1), other);
  EXPECT_EQ(*names_.FindTensor(Tensor(1, 1)), other);
  EXPECT_FALSE(names_.StandsFor(Tensor(1, 1), *cell));
  names_.ReleaseTensor(Tensor(1, 1));
  names_.ReplaceTensor(Tensor(1, 1), cell);
  EXPECT_FALSE(names_.FindTensor(Tensor(1, 1)).ok());
  EXPECT_EQ(names_.live_tensors(), 0);
}

TEST_F(NamesTest, WhatFailedHasAName) {
  Error error(Reason::kMismatch, "they differ");
  names_.NameFailed({Tensor(2, 1)}, std::make_shared<Error>(error));
  const absl::StatusOr<CellRef> cell = names_.FindTensor(Tensor(2, 1));
  ASSERT_TRUE(cell.ok());
  EXPECT_EQ((*cell)->state, Cell::State::kFailed);
  EXPECT_EQ((*cell)->error->message, "they differ");
  // A name that is not free is left as it is.
  names_.NameFailed({Tensor(2, 1)}, std::make_shared<Error>(Reason::kMalformed));
  EXPECT_EQ((*names_.FindTensor(Tensor(2, 1)))->error->message, "they differ");
  names_.NameFailed({Tensor(999, 1)}, std::make_shared<Error>(error));
  EXPECT_EQ(names_.live_tensors(), 1);
}

// To be refused takes much longer than a name, with a text and a look at what others keep.
TEST_F(NamesTest, MemoryForNamesOfWhatFailedIsNotAskedForAgain) {
  int asked = 0;
  budget_->Reclaim(&asked, [&asked](const Budget&) {
    ++asked;
    return false;
  });
  std::vector<TensorId> ids;
  for (int32_t slot = 0; slot < 200; ++slot) ids.push_back(Tensor(slot, 1));
  names_.NameFailed(ids, std::make_shared<Error>(Reason::kMismatch));
  EXPECT_EQ(names_.live_tensors(), 64);
  EXPECT_EQ(asked, 1);
  budget_->Forget(&asked);
}

TEST_F(NamesTest, APromisedTensorCannotBeUsed) {
  const CellRef cell = Ready();
  names_.NameTensor(Tensor(1, 1), cell);
  cell->donated_to = Sequence(12);
  const absl::Status refused = names_.FindTensor(Tensor(1, 1)).status();
  EXPECT_EQ(ReasonOf(refused), Reason::kDonated);
  EXPECT_THAT(ErrorOf(refused).message, HasSubstr("donated to run 12"));
}

TEST_F(NamesTest, AGraphThatWasRefusedTellsItsRunsWhy) {
  ASSERT_TRUE(names_.CheckFresh(GraphAt(2, 1)).ok());
  EXPECT_FALSE(names_.NameGraph(GraphAt(2, 1), MakeError(Reason::kBadType, "no such shape")).ok());
  EXPECT_EQ(ErrorOf(names_.FindGraph(GraphAt(2, 1)).status()).message, "no such shape");
  EXPECT_EQ(names_.live_graphs(), 0);
  EXPECT_EQ(ReasonOf(names_.CheckFresh(GraphAt(2, 1))), Reason::kMalformed);
  auto record = std::make_shared<GraphRecord>();
  record->bytes = 1000;
  EXPECT_TRUE(names_.NameGraph(GraphAt(2, 2), record).ok());
  EXPECT_EQ(budget_->held(Resource::kGraphBytes), 1000);
  EXPECT_EQ(*names_.FindGraph(GraphAt(2, 2)), record);
  EXPECT_EQ(names_.live_graphs(), 1);
  EXPECT_EQ(ReasonOf(names_.CheckFresh(GraphAt(2, 3))), Reason::kMalformed) << "it is in use";
  names_.ReleaseGraph(GraphAt(2, 1));
  EXPECT_EQ(names_.live_graphs(), 1);
  names_.ReleaseGraph(GraphAt(2, 2));
  EXPECT_EQ(ReasonOf(names_.FindGraph(GraphAt(2, 2)).status()), Reason::kUnknownName);
  // There is no memory for a larger one: that is what its runs are told.
  record = std::make_shared<GraphRecord>();
  record->bytes = 1 << 20;
  EXPECT_EQ(ReasonOf(names_.NameGraph(GraphAt(2, 3), record)), Reason::kOutOfMemory);
  EXPECT_EQ(ReasonOf(names_.FindGraph(GraphAt(2, 3)).status()), Reason::kOutOfMemory);
  EXPECT_EQ(ReasonOf(names_.CheckFresh(GraphAt(4, 1))), Reason::kMalformed);
}

// It is charged for already; others are for themselves, and the session that had it made no longer.
TEST_F(NamesTest, TheFirstNameOfAGraphTakesWhatMakingItIsChargedFor) {
  const BudgetRef other = Budget::OfNode(int64_t{1} << 20);
  const auto charge_for = [](GraphRecord* record, const BudgetRef& budget) {
    record->bytes = 1000;
    record->charge = *budget->Charge(Domain::kHost, Resource::kGraphBytes, record->bytes);
  };
  auto own = std::make_shared<GraphRecord>();
  charge_for(own.get(), budget_);
  EXPECT_TRUE(names_.NameGraph(GraphAt(0, 1), own).ok());
  EXPECT_EQ(budget_->held(Resource::kGraphBytes), 1000);
  EXPECT_EQ(own->charge.amount(), 0);
  EXPECT_TRUE(names_.NameGraph(GraphAt(3, 1), own).ok());
  EXPECT_EQ(budget_->held(Resource::kGraphBytes), 2000) << "each name is charged";
  names_.ReleaseGraph(GraphAt(0, 1));
  EXPECT_EQ(budget_->held(Resource::kGraphBytes), 1000);
  names_.ReleaseGraph(GraphAt(3, 1));
  EXPECT_EQ(budget_->held(Resource::kGraphBytes), 1000) << "its runs may still need it";
  own.reset();
  EXPECT_EQ(budget_->held(Resource::kGraphBytes), 0);

  const auto others = std::make_shared<GraphRecord>();
  charge_for(others.get(), other);
  EXPECT_TRUE(names_.NameGraph(GraphAt(1, 1), others).ok());
  EXPECT_EQ(budget_->held(Resource::kGraphBytes), 1000);
  EXPECT_EQ(other->held(Resource::kGraphBytes), 0);
}

TEST(NamesTablesTest, AGraphForWhoseNameThereIsNoMemoryTellsItsRunsSo) {
  News news;
  Completions completions(&news);
  Names names({/*tensors=*/8, /*graphs=*/8}, Budget::OfNode(100), &completions);
  EXPECT_EQ(ReasonOf(names.FindGraph(GraphAt(0, 1)).status()), Reason::kUnknownName);
  EXPECT_EQ(ReasonOf(names.NameGraph(GraphAt(0, 1), std::make_shared<GraphRecord>())),
            Reason::kOutOfMemory);
  EXPECT_EQ(ReasonOf(names.FindGraph(GraphAt(0, 1)).status()), Reason::kOutOfMemory);
}

TEST_F(NamesTest, NamesAreChargedBeforeTheyAreGiven) {
  constexpr int32_t kNames = 64 - Names::kSpareNames;
  ASSERT_TRUE(names_.Reserve(kNames - 4, kNames - 5).ok());
  for (int32_t i = 0; i < kNames - 4; ++i) names_.NameTensor(Tensor(i, 1), Ready());
  EXPECT_EQ(budget_->used(), 64 * Names::kBytesPerTensor + Names::kTableStep);
  EXPECT_TRUE(names_.Reserve(4, kNames - 1).ok());
  EXPECT_EQ(ReasonOf(names_.Reserve(5, kNames)), Reason::kOutOfMemory);
  // The others are for what fails, as long as there is memory.
  for (int32_t i = kNames; i < 100; ++i) {
    names_.NameFailed({Tensor(i, 1)}, std::make_shared<Error>(Reason::kMismatch));
  }
  EXPECT_EQ(names_.live_tensors(), 64);
  EXPECT_TRUE(names_.FindTensor(Tensor(kNames, 1)).ok());
  EXPECT_EQ(ReasonOf(names_.FindTensor(Tensor(99, 1)).status()), Reason::kUnknownName);
  EXPECT_EQ(ReasonOf(names_.Reserve(1, 0)), Reason::kOutOfMemory);
  for (int32_t i = kNames; i < 100; ++i) names_.ReleaseTensor(Tensor(i, 1));
  EXPECT_TRUE(names_.Reserve(4, 0).ok());
  names_.TakeAll();
  EXPECT_EQ(budget_->used(), 0);
}

TEST_F(NamesTest, AnErrorIsChargedAsLongAsItIsKept) {
  Error error(Reason::kPeerRefused, std::string(3000, 'x'));
  error.ranks.push_back({2, std::string(500, 'y'), "train.cc:7"});
  const int64_t most = budget_->limit() / (3500 + static_cast<int64_t>(sizeof(Error)));
  std::vector<std::shared_ptr<const Error>> kept;
  for (int64_t i = 0; i <= most; ++i) {
    kept.push_back(names_.Keep(error));
    if (kept.back()->message != error.message) break;
    EXPECT_EQ(kept.back()->ranks, error.ranks);
    EXPECT_GE(budget_->used(), static_cast<int64_t>(kept.size()) * 3500);
  }
  EXPECT_NE(kept.back()->message, error.message) << "there is no memory for more";
  EXPECT_GE(kept.size(), 8u);
  // It is one, whatever number of names stands for it.
  const std::shared_ptr<const Error> first = kept.front();
  kept.clear();
  for (int i = 0; i < 100; ++i) EXPECT_EQ(names_.Keep(error)->message, error.message);
  EXPECT_EQ(first->message, error.message);
}

TEST(NamesErrorsTest, WithoutMemoryAnErrorIsKeptWithoutItsTexts) {
  News news;
  Completions completions(&news);
  const BudgetRef budget = Budget::OfNode(2000);
  Names names({/*tensors=*/8, /*graphs=*/8}, budget, &completions);
  Error error(Reason::kMismatch, std::string(3000, 'x'));
  error.id = ErrorId(17);
  error.source = "train.cc:7";
  error.ended.push_back({WorldId(3), Epoch(5)});
  error.alone = true;
  const std::shared_ptr<const Error> brief = names.Keep(error);
  EXPECT_EQ(budget->used(), 0);
  EXPECT_EQ(brief->reason, Reason::kMismatch);
  EXPECT_EQ(brief->code, error.code);
  EXPECT_EQ(brief->id, ErrorId(17));
  EXPECT_EQ(brief->ended, error.ended);
  EXPECT_TRUE(brief->alone);
  EXPECT_LT(brief->message.size(), 64u);
  EXPECT_EQ(brief->source, "");
}

TEST_F(NamesTest, GraphsHaveANumberOfTheirOwn) {
  const auto record = std::make_shared<GraphRecord>();
  EXPECT_TRUE(names_.NameGraph(GraphAt(0, 1), record).ok());
  EXPECT_TRUE(names_.NameGraph(GraphAt(1, 1), record).ok());
  const absl::Status third = names_.NameGraph(GraphAt(2, 1), record);
  EXPECT_EQ(ReasonOf(third), Reason::kQuota);
  EXPECT_THAT(ErrorOf(third).message, HasSubstr("2 graphs of 2"));
  EXPECT_EQ(names_.FindGraph(GraphAt(2, 1)).status(), third) << "its runs are told";
  names_.ReleaseGraph(GraphAt(2, 1));
  EXPECT_EQ(ReasonOf(names_.FindGraph(GraphAt(2, 1)).status()), Reason::kUnknownName);
  names_.ReleaseGraph(GraphAt(0, 1));
  EXPECT_EQ(budget_->held(Resource::kGraphs), 1);
  EXPECT_TRUE(names_.NameGraph(GraphAt(2, 2), record).ok());
  EXPECT_EQ(names_.live_graphs(), 2);
}

// Refusals, and tables of slots that name little, are held as well.
TEST(NamesTablesTest, AreCharged) {
  News news;
  Completions completions(&news);
  const BudgetRef budget = Budget::OfNode(int64_t{1} << 30);
  Names names({/*tensors=*/1 << 16, /*graphs=*/1 << 14}, budget, &completions);
  ASSERT_TRUE(names.Reserve(1, (1 << 16) - 1).ok());
  names.NameTensor(Tensor((1 << 16) - 1, 1), Ready());
  EXPECT_GE(budget->used(), (1 << 16) * Names::kBytesPerSlot);
  const int64_t before = budget->used();
  for (int32_t slot = 0; slot < 1000; ++slot) {
    EXPECT_FALSE(names.NameGraph(GraphAt(slot, 1), MakeError(Reason::kBadType, "no")).ok());
  }
  const int64_t refused = budget->used() - before;
  EXPECT_GE(refused, 900 * (Names::kBytesPerGraphSlot + Names::kBytesPerRefusal));
  names.TakeAll();
  EXPECT_EQ(budget->used(), 0);
}

TEST_F(NamesTest, NothingIsLeftOfAll) {
  const CellRef cell = Ready();
  names_.NameTensor(Tensor(1, 1), cell);
  EXPECT_TRUE(names_.NameGraph(GraphAt(0, 1), std::make_shared<GraphRecord>()).ok());
  names_.TakeAll();
  EXPECT_EQ(cell.use_count(), 1);
  EXPECT_EQ(names_.live_tensors(), 0);
  EXPECT_EQ(names_.live_graphs(), 0);
}

// Names of so many tensors, of one cell, and of a graph.
Names::Remains RemainsOf(size_t tensors, const CellRef& cell, const BudgetRef& budget,
                         Completions* completions) {
  Names names({/*tensors=*/1 << 16, /*graphs=*/4}, budget, completions);
  const auto count = static_cast<int32_t>(tensors);
  EXPECT_TRUE(names.Reserve(tensors, count).ok());
  for (int32_t slot = 0; slot < count; ++slot) names.NameTensor(Tensor(slot, 1), cell);
  EXPECT_TRUE(names.NameGraph(GraphAt(0, 1), std::make_shared<GraphRecord>()).ok());
  return names.TakeAll();
}

// Releases more names than a slice has the time for.
TEST(NamesReleaseTest, WhatASliceHasNoTimeForIsReleasedInOthers) {
  constexpr int32_t kNames = 3 * static_cast<int32_t>(kTurnWork);
  News news;
  Completions completions(&news);
  const BudgetRef budget = Budget::OfNode(int64_t{1} << 30);
  Names names({/*tensors=*/1 << 16, /*graphs=*/1 << 14}, budget, &completions);
  const CellRef cell = Ready();
  const auto record = std::make_shared<GraphRecord>();
  ASSERT_TRUE(names.Reserve(kNames, kNames).ok());
  for (int32_t slot = 0; slot < kNames; ++slot) {
    names.NameTensor(Tensor(slot, 1), cell);
    ASSERT_TRUE(names.NameGraph(GraphAt(slot, 1), record).ok());
  }
  const auto live = [&] { return names.live_tensors() + names.live_graphs(); };
  {
    const WorkSlice slice;
    for (int32_t slot = 0; slot < kNames; ++slot) names.ReleaseTensor(Tensor(slot, 1));
    for (int32_t slot = 0; slot < kNames; ++slot) names.ReleaseGraph(GraphAt(slot, 1));
    // Twice, as a frame may have it.
    for (int32_t slot = 0; slot < kNames; ++slot) names.ReleaseTensor(Tensor(slot, 1));
    EXPECT_FALSE(names.ReleaseMarked());
  }
  EXPECT_GT(live(), kNames);
  int slices = 1;
  for (bool all = false; !all; ++slices) {
    const int64_t before = live();
    const WorkSlice slice;
    all = names.ReleaseMarked();
    EXPECT_LE(before - live(), kTurnWork + 1);
  }
  EXPECT_GE(slices, 6);
  EXPECT_EQ(live(), 0);
  EXPECT_EQ(cell.use_count(), 1);
  EXPECT_EQ(record.use_count(), 1);
  EXPECT_EQ(budget->held(Resource::kGraphs), 0);
  EXPECT_TRUE(names.ReleaseMarked());
  names.NameTensor(Tensor(7, 2), cell);
  names.ReleaseTensor(Tensor(7, 2));
  EXPECT_EQ(cell.use_count(), 1) << "a slot is used again";
}

TEST(NamesReleaseTest, RemainsOfSessionsGoATurnsShareAtATime) {
  News news;
  Completions completions(&news);
  const BudgetRef budget = Budget::OfNode(int64_t{1} << 30);
  const CellRef cell = Ready();
  ReleaseQueue<Names::Remains> ended;
  int heard = 0;
  const auto hear = [&heard] { ++heard; };
  EXPECT_FALSE(ended.Continue());
  ended.After(hear);
  EXPECT_EQ(heard, 1);
  constexpr auto kShare = static_cast<size_t>(kTurnWork);
  {
    const WorkSlice slice;
    ended.Add(RemainsOf(kShare / 2, cell, budget, &completions));
    EXPECT_EQ(cell.use_count(), 1) << "few go at once";
    EXPECT_EQ(budget->used(), 0);
    ended.Add(RemainsOf(3 * kShare, cell, budget, &completions));
    ended.After(hear);
    ended.Add(RemainsOf(kShare / 2, cell, budget, &completions));
    EXPECT_GT(cell.use_count(), static_cast<long>(2 * kShare));
  }
  int turns = 0;
  const auto turn = [&] {
    const WorkSlice slice;
    return ended.Continue();
  };
  for (long held = cell.use_count(); turn(); held = cell.use_count()) {
    ++turns;
    EXPECT_LE(held - cell.use_count(), static_cast<long>(kShare) + 1);
    const long others = cell.use_count() - 1 - static_cast<long>(kShare / 2);
    if (others != 0) {
      EXPECT_EQ(heard, others > 0 ? 1 : 2);
    }
    EXPECT_EQ(budget->used() == 0, cell.use_count() == 1);
  }
  EXPECT_GE(turns, 3);
  EXPECT_EQ(cell.use_count(), 1);
  EXPECT_EQ(budget->used(), 0);
}

}  // namespace
}  // namespace chorus::node
