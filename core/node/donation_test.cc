#include "core/node/donation.h"

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/base/error.h"
#include "core/node/session.h"
#include "core/runtime/budget.h"
#include "core/runtime/memory.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace chorus::node {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kBytes = 104;  // of each tensor, and of each output

TensorId Tensor(int32_t slot) {
  TensorId id;
  id.slot = slot;
  id.generation = 1;
  return id;
}

// Gives all of its inputs away. (In a test `Run` alone is gtest's.)
chorus::Run Donating(const std::vector<TensorId>& inputs) {
  chorus::Run command;
  for (const TensorId id : inputs) {
    command.inputs.push_back(id);
    command.donate.push_back(true);
  }
  return command;
}

class DonationTest : public ::testing::Test {
 protected:
  DonationTest() {
    auto tenant = std::make_shared<Tenant>();
    tenant->name = "uid:1";
    tenant->budget = Budget::OfNode(int64_t{64} << 20);
    tenant->arenas = ArenaSet::Create(tenant->budget);
    OpenSessionRequest open;
    open.tenant = tenant->name;
    session_ = std::make_shared<Session>(SessionId(1), open, std::move(tenant),
                                         CommandLog::Shared{&timers_, &errors_, absl::Seconds(1)},
                                         Names::Limits{/*tensors=*/64, /*graphs=*/1},
                                         Budget::Limits(), &news_);
  }

  Names& names() { return session_->names; }
  BufferRef Allocate(int64_t bytes = kBytes) { return *session_->tenant->arenas->Allocate(bytes); }

  static CellRef NewCell() {
    auto cell = std::make_shared<Cell>();
    cell->type = std::make_shared<TensorType>(DType::kF64, std::vector<Dim>{13});
    cell->device = DeviceIndex(3);
    return cell;
  }
  // A tensor that is there, in memory of its own; only its name refers to it.
  Cell* Ready(TensorId id, int64_t bytes = kBytes) {
    CellRef cell = NewCell();
    cell->state = Cell::State::kReady;
    cell->buffer = Allocate(bytes);
    cell->bytes = bytes;
    Cell* const ready = cell.get();
    names().NameTensor(id, std::move(cell));
    return ready;
  }
  // A run of a graph all of whose inputs can be donated, and whose output i may take over the
  // memory of input donors[i].
  RunState* NewRun(int64_t sequence, const std::vector<TensorId>& inputs,
                   const std::vector<int32_t>& donors) {
    RunState* const run = runs_.Add();
    run->sequence = Sequence(sequence);
    run->session = session_;
    run->graph = std::make_shared<GraphRecord>();
    run->plan = &run->graph->main;
    for (const TensorId id : inputs) {
      GraphInput input;
      input.donatable = true;
      run->graph->graph.inputs.push_back(input);
      run->inputs.push_back(*names().FindTensor(id));
    }
    for (const int32_t donor : donors) {
      Plan::Output output;
      output.buffer = static_cast<int32_t>(inputs.size() + run->outputs.size());
      output.bytes = kBytes;
      output.donor = donor;
      output.sole = true;
      run->plan->plan.outputs.push_back(output);
      run->outputs.push_back(NewCell());
      run->outputs.back()->producer = run->handle;
      run->outputs.back()->output = static_cast<int32_t>(run->outputs.size()) - 1;
    }
    run->refs.resize(inputs.size() + donors.size());
    run->addresses.resize(inputs.size() + donors.size());
    return run;
  }
  RunState* RunOfOne(int64_t sequence) { return NewRun(sequence, {Tensor(0)}, {0}); }
  // A run under way, which makes Tensor(0) in memory that nothing else stands in.
  RunState* Producer() {
    RunState* const producer = NewRun(5, {}, {-1});
    producer->SetBuffer(0, Allocate());
    names().NameTensor(Tensor(0), producer->outputs[0]);
    return producer;
  }

  // Of a run with Tensor(0) as its only input, for its only output.
  bool IsPromised(RunState* run) {
    EXPECT_TRUE(donations_.Promise(Donating({Tensor(0)}), run).ok());
    ExpectPromisedOrKept(*run);
    return !run->donations.empty();
  }
  // All of it, or nothing of it.
  void ExpectPromisedOrKept(const RunState& run) {
    const bool promised = !run.donations.empty();
    EXPECT_EQ(run.vote.donates, promised);
    EXPECT_EQ(static_cast<bool>(run.refs[1]), promised);
    EXPECT_EQ(run.addresses[1], promised ? run.refs[1]->address() : 0);
    EXPECT_EQ(ErrorOf(names().FindTensor(Tensor(0)).status()).reason,
              promised ? Reason::kDonated : Reason::kUnspecified);
  }
  // What the name stands for: it was given away to run 7.
  void ExpectNameIsAnError(const Cell& donated, const std::string& how) {
    const absl::StatusOr<CellRef> named = names().FindTensor(Tensor(0));
    ASSERT_TRUE(named.ok()) << named.status();
    ASSERT_EQ((*named)->state, Cell::State::kFailed);
    EXPECT_FALSE((*named)->buffer);
    EXPECT_EQ((*named)->type, donated.type);
    EXPECT_EQ((*named)->device, donated.device);
    const Error& error = *(*named)->error;
    EXPECT_EQ(error.reason, Reason::kDonated);
    EXPECT_EQ(error.message, "the tensor was donated to run 7, " + how);
    const absl::optional<Error> recorded = errors_.Find(error.id, "uid:1");
    ASSERT_TRUE(recorded.has_value());
    EXPECT_EQ(recorded->message, error.message);
  }
  void ExpectNameStandsFor(const Cell* cell) {
    const absl::StatusOr<CellRef> named = names().FindTensor(Tensor(0));
    ASSERT_TRUE(named.ok()) << named.status();
    EXPECT_EQ(named->get(), cell);
  }

  News news_;
  TimerQueue timers_;
  ErrorStore errors_{8};
  std::shared_ptr<Session> session_;
  RunTable runs_;
  Donations donations_{&runs_, &errors_};
};

// --- Promise ------------------------------------------------------------------------------------

TEST_F(DonationTest, AnOutputIsPromisedTheMemoryOfItsDonor) {
  const Cell* const cell = Ready(Tensor(0));
  const Buffer* const buffer = cell->buffer.get();
  RunState* const run = RunOfOne(7);
  ASSERT_TRUE(IsPromised(run));
  ASSERT_EQ(run->donations.size(), 1u);
  EXPECT_EQ(run->donations[0].input, 0);
  EXPECT_EQ(run->donations[0].id, Tensor(0));
  EXPECT_EQ(run->refs[1].get(), buffer);
  EXPECT_EQ(cell->donated_to, Sequence(7));
  EXPECT_THAT(ErrorOf(names().FindTensor(Tensor(0)).status()).message,
              HasSubstr("donated to run 7"));
  EXPECT_FALSE(run->donated) << "it is not launched";
  EXPECT_EQ(cell->state, Cell::State::kReady) << "those who have it read on";
}

TEST_F(DonationTest, EachOutputHasItsOwnDonor) {
  const std::vector<TensorId> inputs = {Tensor(0), Tensor(1), Tensor(2)};
  std::vector<const Buffer*> buffers;
  for (const TensorId id : inputs) buffers.push_back(Ready(id)->buffer.get());
  RunState* const run = NewRun(7, inputs, {2, -1, 0});
  ASSERT_TRUE(donations_.Promise(Donating(inputs), run).ok());
  ASSERT_EQ(run->donations.size(), 2u);
  EXPECT_EQ(run->donations[0].input, 2);
  EXPECT_EQ(run->donations[0].id, Tensor(2));
  EXPECT_EQ(run->donations[1].input, 0);
  EXPECT_EQ(run->donations[1].id, Tensor(0));
  EXPECT_EQ(run->refs[3].get(), buffers[2]);
  EXPECT_FALSE(run->refs[4]) << "it has no donor";
  EXPECT_EQ(run->refs[5].get(), buffers[0]);
  EXPECT_TRUE(names().FindTensor(Tensor(1)).ok()) << "no output wants its memory";
}

TEST_F(DonationTest, WhatTheRunDoesNotGiveAwayIsKept) {
  Ready(Tensor(0));
  RunState* const run = RunOfOne(7);
  chorus::Run command = Donating({Tensor(0)});
  command.donate = {false};
  EXPECT_TRUE(donations_.Promise(command, run).ok());
  EXPECT_TRUE(run->donations.empty());
  ExpectPromisedOrKept(*run);
  command.donate.clear();
  EXPECT_TRUE(donations_.Promise(command, run).ok());
  EXPECT_TRUE(run->donations.empty());
  ExpectPromisedOrKept(*run);
  EXPECT_TRUE(IsPromised(run));
}

TEST_F(DonationTest, WhatTheGraphDoesNotGiveAwayIsRefused) {
  Ready(Tensor(0));
  Ready(Tensor(1));
  RunState* const run = NewRun(7, {Tensor(0), Tensor(1)}, {0});
  run->graph->graph.inputs[1].donatable = false;
  const absl::Status refused = donations_.Promise(Donating({Tensor(0), Tensor(1)}), run);
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ErrorOf(refused).reason, Reason::kMalformed);
  EXPECT_THAT(ErrorOf(refused).message, HasSubstr("input 1 of the graph cannot be donated"));
  EXPECT_TRUE(run->donations.empty());
  EXPECT_TRUE(names().FindTensor(Tensor(0)).ok()) << "nor was the other promised";
}

TEST_F(DonationTest, WhatOthersHaveIsKept) {
  const Cell* const cell = Ready(Tensor(0));
  RunState* const run = RunOfOne(7);
  CellRef reader = run->inputs[0];
  EXPECT_FALSE(IsPromised(run)) << "a second reference to the tensor";
  reader.reset();
  BufferRef alias = cell->buffer;
  EXPECT_FALSE(IsPromised(run)) << "a second reference to its memory";
  alias.reset();
  EXPECT_TRUE(IsPromised(run));
}

TEST_F(DonationTest, MemoryThatAClientWritesIsKept) {
  const Cell* const cell = Ready(Tensor(0));
  RunState* const run = RunOfOne(7);
  cell->buffer->set_state(Buffer::State::kStaging);
  EXPECT_FALSE(IsPromised(run));
  cell->buffer->set_state(Buffer::State::kFrozen);
  EXPECT_TRUE(IsPromised(run));
}

TEST_F(DonationTest, MemoryOfAnotherSizeIsKept) {
  Cell* const cell = Ready(Tensor(0));
  RunState* const run = RunOfOne(7);
  for (const int64_t bytes : {kBytes - 1, kBytes + 1}) {
    run->plan->plan.outputs[0].bytes = bytes;
    EXPECT_FALSE(IsPromised(run)) << bytes;
  }
  run->plan->plan.outputs[0].bytes = kBytes;
  cell->offset = 8;
  EXPECT_FALSE(IsPromised(run)) << "it is a part of its buffer";
  cell->offset = 0;
  EXPECT_TRUE(IsPromised(run));
}

TEST_F(DonationTest, WhatHasNoBytesIsKept) {
  Cell* const cell = Ready(Tensor(0), 0);
  RunState* const run = RunOfOne(7);
  run->plan->plan.outputs[0].bytes = 0;
  EXPECT_FALSE(IsPromised(run));
  run->plan->plan.outputs[0].bytes = kBytes;
  cell->buffer = BufferRef();
  EXPECT_FALSE(IsPromised(run));
}

TEST_F(DonationTest, ForADiscardedOutputNothingIsPromised) {
  Ready(Tensor(0));
  RunState* const run = RunOfOne(7);
  run->outputs[0] = nullptr;
  EXPECT_FALSE(IsPromised(run));
}

TEST_F(DonationTest, BytesThatComeWithTheRunAreNobodysToGive) {
  RunState* const run = NewRun(7, {}, {0});
  run->graph->graph.inputs.emplace_back();
  run->graph->graph.inputs[0].donatable = true;
  run->inputs.push_back(nullptr);
  chorus::Run command;
  const InlineData nothing;
  command.inputs.push_back(nothing);
  command.donate = {true};
  EXPECT_TRUE(donations_.Promise(command, run).ok());
  EXPECT_TRUE(run->donations.empty());
  EXPECT_FALSE(run->vote.donates);
}

// --- Promise, of what is not there yet ----------------------------------------------------------

TEST_F(DonationTest, MemoryThatARunUnderWayWritesIsPromised) {
  const RunState* const producer = Producer();
  RunState* const run = RunOfOne(7);
  ASSERT_TRUE(IsPromised(run));
  EXPECT_EQ(run->refs[1], producer->refs[0]);
  EXPECT_EQ(producer->outputs[0]->donated_to, Sequence(7));
}

TEST_F(DonationTest, AResultThatOthersMayHaveIsKept) {
  const RunState* const producer = Producer();
  Cell* const cell = producer->outputs[0].get();
  RunState* const run = RunOfOne(7);
  producer->plan->plan.outputs[0].sole = false;
  EXPECT_FALSE(IsPromised(run)) << "something else stands in its buffer";
  producer->plan->plan.outputs[0].sole = true;
  cell->value_id.lo = 1;
  EXPECT_FALSE(IsPromised(run)) << "another run may be given the same buffer";
  cell->value_id = Hash128();
  CellRef reader = run->inputs[0];
  EXPECT_FALSE(IsPromised(run)) << "another run reads it";
  reader.reset();
  EXPECT_TRUE(IsPromised(run));
}

// They have no reference, and come when the next run may have written there.
TEST_F(DonationTest, AResultThatSomebodyWaitsForIsKept) {
  Cell* const cell = Producer()->outputs[0].get();
  RunState* const run = RunOfOne(7);
  const auto waiter = cell->on_settled.Add([](const CellRef&) {});
  EXPECT_FALSE(IsPromised(run));
  cell->on_settled.Remove(waiter);
  EXPECT_TRUE(IsPromised(run));
}

TEST_F(DonationTest, AResultThatHasFailedIsKept) {
  Cell* const cell = Producer()->outputs[0].get();
  RunState* const run = RunOfOne(7);
  cell->state = Cell::State::kFailed;
  EXPECT_FALSE(IsPromised(run));
  cell->state = Cell::State::kPending;
  EXPECT_TRUE(IsPromised(run));
}

TEST_F(DonationTest, AResultWhoseRunIsGoneIsKept) {
  const RunHandle producer = Producer()->handle;
  RunState* const run = RunOfOne(7);
  const CellRef third = run->inputs[0];  // as many as before
  runs_.Remove(producer);
  EXPECT_FALSE(IsPromised(run));
}

// --- Take ---------------------------------------------------------------------------------------

TEST_F(DonationTest, FromTheLaunchOnTheNameStandsForAnError) {
  const Cell* const cell = Ready(Tensor(0));
  Buffer* const buffer = cell->buffer.get();
  buffer->set_state(Buffer::State::kFrozen);
  const BufferRef mirror = Allocate();
  buffer->AddMirror(0, mirror);
  RunState* const run = RunOfOne(7);
  ASSERT_TRUE(IsPromised(run));
  donations_.Take(run);
  EXPECT_TRUE(run->donated);
  EXPECT_EQ(run->refs[1].get(), buffer);
  EXPECT_EQ(buffer->state(), Buffer::State::kResult);
  EXPECT_EQ(buffer->mirror(0, mirror->bytes()), nullptr) << "it is of what stood there";
  ExpectNameIsAnError(*cell, "whose result has its memory");
}

TEST_F(DonationTest, WithoutAPromiseALaunchTakesNothing) {
  const Cell* const cell = Ready(Tensor(0));
  RunState* const run = RunOfOne(7);
  donations_.Take(run);
  EXPECT_FALSE(run->donated);
  ExpectNameStandsFor(cell);
  donations_.Return(run);
  ExpectNameStandsFor(cell);
}

// --- Return -------------------------------------------------------------------------------------

TEST_F(DonationTest, WhatWasNotTakenIsAsBefore) {
  const Cell* const cell = Ready(Tensor(0));
  for (const bool held_back : {true, false}) {  // that is of those that were launched
    RunState* const run = RunOfOne(7);
    ASSERT_TRUE(IsPromised(run));
    run->held_back = held_back;
    donations_.Return(run);
    EXPECT_TRUE(run->donations.empty());
    EXPECT_EQ(cell->donated_to, Sequence());
    EXPECT_EQ(cell->state, Cell::State::kReady);
    ExpectNameStandsFor(cell);
    runs_.Remove(run->handle);
  }
  EXPECT_TRUE(IsPromised(RunOfOne(8))) << "nobody has kept anything of it";
}

TEST_F(DonationTest, AResultUnderWayThatWasNotTakenIsAsBefore) {
  const RunState* const producer = Producer();
  const Cell* const cell = producer->outputs[0].get();
  RunState* const run = RunOfOne(7);
  ASSERT_TRUE(IsPromised(run));
  donations_.Return(run);
  EXPECT_TRUE(run->donations.empty());
  EXPECT_EQ(cell->state, Cell::State::kPending);
  ExpectNameStandsFor(cell);
  runs_.Remove(run->handle);
  EXPECT_EQ(producer->refs[0]->references(), 1);
  EXPECT_TRUE(IsPromised(RunOfOne(8)));
}

TEST_F(DonationTest, WhereNothingWasWrittenTheTensorIsBack) {
  const Cell* const cell = Ready(Tensor(0));
  const Buffer* const buffer = cell->buffer.get();
  RunState* const run = RunOfOne(7);
  ASSERT_TRUE(IsPromised(run));
  donations_.Take(run);
  ASSERT_TRUE(run->held_back);
  donations_.Return(run);
  EXPECT_TRUE(run->donations.empty());
  EXPECT_EQ(cell->donated_to, Sequence());
  EXPECT_EQ(cell->state, Cell::State::kReady);
  EXPECT_EQ(cell->buffer.get(), buffer);
  ExpectNameStandsFor(cell);
  runs_.Remove(run->handle);
  EXPECT_TRUE(IsPromised(RunOfOne(8))) << "nobody has kept anything of it";
}

TEST_F(DonationTest, WhereSomethingWasWrittenTheNameStandsForAnError) {
  const Cell* const cell = Ready(Tensor(0));
  RunState* const run = RunOfOne(7);
  ASSERT_TRUE(IsPromised(run));
  donations_.Take(run);
  run->held_back = false;
  donations_.Return(run);
  EXPECT_TRUE(run->donations.empty());
  ExpectNameIsAnError(*cell, "which failed after it had written there");
  runs_.Remove(run->handle);
  EXPECT_EQ(session_->tenant->arenas->live_buffers(), 0) << "nobody has its memory any more";
}

TEST_F(DonationTest, ANameThatWasReleasedStaysSo) {
  Ready(Tensor(0));
  RunState* const run = RunOfOne(7);
  ASSERT_TRUE(IsPromised(run));
  names().ReleaseTensor(Tensor(0));
  donations_.Take(run);
  EXPECT_EQ(ErrorOf(names().FindTensor(Tensor(0)).status()).reason, Reason::kUnknownName);
  donations_.Return(run);
  EXPECT_EQ(ErrorOf(names().FindTensor(Tensor(0)).status()).reason, Reason::kUnknownName);
  EXPECT_EQ(names().live_tensors(), 0);
  runs_.Remove(run->handle);
  EXPECT_EQ(session_->tenant->arenas->live_buffers(), 0);
}

}  // namespace
}  // namespace chorus::node
