// Runs that go the short way, beside the same runs on a node that has none: whatever else happens,
// sessions are told the same.
#include "core/node/short_way.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <iostream>
#include <iterator>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <regex>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "core/backend/host/host_backend.h"
#include "core/base/error.h"
#include "core/base/thread_pool.h"
#include "core/base/work.h"
#include "core/graph/encoding.h"
#include "core/node/node.h"
#include "core/node/node_rig.h"
#include "core/ops/graph_builder.h"
#include "core/ops/host_kernels.h"
#include "core/ops/testing/rank_builder.h"
#include "core/transport/command.h"

namespace chorus::node {
namespace {

constexpr int kRanks = 3;
constexpr int kElements = 4;
constexpr int64_t kStagingBytes = 256;

const TensorType& Type() {
  static const TensorType type(DType::kF32, {kElements});
  return type;
}

// The graphs that each rank registers, by slot.
enum GraphSlotOf {
  kSum,
  kMax,
  kSumElsewhere,  // in another line
  kGather,
  kScatter,
  kBroadcast,
  kBarrier,
  kTwo,
  kRecorded,
  kUpdate,  // work that ranks have in common where its second operand is one result
  kNegate,
  kNumGraphs,
  // Of as many numbers as make work worth sharing.
  kLargeOnes = kNumGraphs,
  kLargeSum,
  kLargeUpdate,
  kAllGraphs,
};

Graph MakeGraph(int which, int rank) {
  if (which == kNegate) return NegateGraph(kElements);
  const TensorType large(DType::kF32, {4096});
  if (which == kLargeOnes) {
    GraphBuilder builder(1, {});
    AddOutput(&builder, AddFill(&builder, 4096, 1));
    return builder.Build();
  }
  testing::RankBuilder b(rank, kRanks);
  b.set_wants_grad(which == kRecorded);
  const auto output = [&b](ValueIndex value) {
    GraphOutput output;
    output.value = value;
    b.graph().AddOutput(output);
  };
  const auto reduce = [&b](ValueIndex x, Reduction reduction) {
    testing::RankBuilder::How how;
    how.reduction = reduction;
    return b.ApplyCollective("all_reduce", {x}, how).front();
  };
  if (which == kBarrier) {
    b.Barrier();
    return b.graph().Build();
  }
  const ValueIndex x = b.Input(which < kNumGraphs ? Type() : large);
  switch (which) {
    case kSum:
    case kLargeSum:
    case kRecorded:
    case kSumElsewhere:
      output(b.AllReduce(x));
      break;
    case kMax:
      output(reduce(x, Reduction::kMax));
      break;
    case kGather:
      for (const ValueIndex piece : b.AllGather(x)) output(piece);
      break;
    case kScatter:
      output(b.ReduceScatter({x, x, x}));
      break;
    case kBroadcast:
      output(b.Broadcast(x, Type(), /*root=*/1));
      break;
    case kUpdate:
      output(b.Op("add", {b.AllReduce(x), b.Input(Type())}));
      break;
    case kLargeUpdate: {
      ValueIndex y = b.AllReduce(x);
      const ValueIndex s = b.Input(large);
      for (int i = 0; i < 16; ++i) y = b.Op("add", {y, s});
      output(y);
      break;
    }
    default:
      const ValueIndex y = b.AllReduce(x);
      output(y);
      output(b.AllReduce(y));
  }
  return b.graph().Build();
}

// A node, its ranks, and what they have been told.
class Job {
 public:
  explicit Job(bool short_way, CheckCallSites check = CheckCallSites::kOff) {
    HostBackendOptions host;
    host.devices = kRanks;
    host.pool = &pool_;
    host.make_kernel = MakeHostKernel;
    backend_ = CreateHostBackend(host);
    NodeOptions options;
    options.short_way = short_way;
    options.sequencer.agree_timeout = absl::Seconds(1);
    node_ = std::make_unique<LocalNode>(options, DevicesOf(backend_.get()), [] {});
    ranks_.resize(kRanks);
    for (int r = 0; r < kRanks; ++r) {
      OpenSessionRequest open;
      open.tenant = "uid:0";
      open.devices = {DeviceIndex(r)};
      ranks_[r].session = node_->OpenSession(open, now_)->id;
    }
    for (int r = 0; r < kRanks; ++r) {
      JoinRequest join;
      join.name = "job";
      join.size = kRanks;
      join.rank = Rank(r);
      join.check_call_sites = check;
      node_->JoinWorld(ranks_[r].session, join, now_,
                       [this](const absl::StatusOr<WorldInfo>& info) { world_ = info->id; });
    }
    for (int r = 0; r < kRanks; ++r) {
      for (int g = 0; g < kAllGraphs; ++g) {
        RegisterGraph graph;
        graph.graph = {g, 1};
        graph.encoded = EncodeGraph(MakeGraph(g, r));
        Submit(r, std::move(graph));
      }
    }
    for (int r = 0; r < kRanks; ++r) MakeStaging(r);
    Settle();
  }

  // Of numbers that count up from 0.
  void MakeStaging(int r) {
    RankOf& rank = ranks_[static_cast<size_t>(r)];
    node_->CreateStaging(rank.session, kStagingBytes, [&](const auto& made) {
      if (made.ok()) rank.staging = made->arena;
    });
    Settle();
    WriteStaging(r, 0);
  }
  void WriteStaging(int r, float first) {
    std::vector<float> numbers(kStagingBytes / sizeof(float));
    std::iota(numbers.begin(), numbers.end(), first);
    const RankOf& rank = ranks_[static_cast<size_t>(r)];
    (void)node_->WriteStaging(
        rank.session, rank.staging, 0,
        absl::string_view(reinterpret_cast<const char*>(numbers.data()), kStagingBytes));
  }
  void ReleaseStaging(int r) {
    const RankOf& rank = ranks_[static_cast<size_t>(r)];
    (void)node_->ReleaseStaging(rank.session, rank.staging);
  }
  ExternalRange Staged(int r, int64_t offset) const {
    ExternalRange range;
    range.arena = staging(r);
    range.offset = offset;
    return range;
  }
  ArenaId staging(int r) const { return ranks_[static_cast<size_t>(r)].staging; }

  int64_t Submit(int r, CommandBody body) {
    RankOf& rank = ranks_[static_cast<size_t>(r)];
    const int64_t sequence = ++rank.sequence;
    if (rank.ended) return sequence;
    Command command{Sequence(sequence), std::move(body)};
    ByteWriter frame;
    EncodeFrame(command, &frame);
    const WorkSlice slice;
    node_->Submit(rank.session, std::string(frame.bytes()), now_, [&rank](const Outcome& outcome) {
      rank.told[outcome.sequence.value()] = TextOf(outcome.status);
    });
    return sequence;
  }
  // Everything that can happen now has.
  void Settle() {
    while (node_->Poll(now_)) {
    }
  }
  void Wait(absl::Duration time) {
    now_ += time;
    Settle();
  }
  std::string Read(int r, TensorId id) {
    std::string text = "it waits";
    StartReading(r, id, &text, absl::ZeroDuration());
    Wait(absl::ZeroDuration());
    return text;
  }
  void StartReading(int r, TensorId id, std::string* text,
                    absl::Duration patience = absl::InfiniteDuration()) {
    node_->ReadTensor(ranks_[static_cast<size_t>(r)].session, id, now_ + patience,
                      [text](const absl::StatusOr<ReadableTensor>& tensor) {
                        *text = TextOf(tensor.status());
                        if (!tensor.ok()) return;
                        *text = tensor->type.ToString();
                        for (int64_t i = 0; i + 4 <= tensor->bytes; i += 4) {
                          float value = 0;
                          std::memcpy(&value, tensor->data + i, 4);
                          absl::StrAppend(text, " ", value);
                        }
                      });
  }
  void Leave(int r) {
    (void)node_->LeaveWorld(ranks_[static_cast<size_t>(r)].session, world_, Rank(r), now_);
  }
  void End(int r) {
    RankOf& rank = ranks_[static_cast<size_t>(r)];
    if (!std::exchange(rank.ended, true)) node_->SessionDied(rank.session, now_);
  }
  void Abort(int r, Epoch epoch) {
    AbortWorldRequest abort;
    abort.world = world_;
    abort.rank = Rank(r);
    abort.epoch = epoch;
    abort.message = "by hand";
    (void)node_->AbortWorld(ranks_[static_cast<size_t>(r)].session, abort, now_);
  }
  Epoch epoch() {
    const auto worlds = node_->Worlds("", world_, now_);
    return worlds.ok() ? worlds->rows.front().epoch : Epoch();
  }
  std::string Positions() {
    const auto worlds = node_->Worlds("", world_, now_);
    std::string text;
    if (!worlds.ok()) return TextOf(worlds.status());
    for (const auto& member : worlds->rows.front().members) {
      absl::StrAppend(&text, member.next.ToString(), "; ");
    }
    return text;
  }
  const std::map<int64_t, std::string>& told(int r) const {
    return ranks_[static_cast<size_t>(r)].told;
  }
  NodeStats stats() const { return node_->Stats(""); }
  LocalNode* node() { return node_.get(); }
  WorldId world() const { return world_; }

 private:
  // Ids of errors, tickets and arenas are the node's own.
  static std::string TextOf(const absl::Status& status) {
    if (status.ok()) return "OK";
    const Error error = ErrorOf(status);
    static const auto* const arena = new std::regex("arena [0-9]+");
    return absl::StrCat(ReasonName(error.reason), " rank ", error.culprit.rank, ": ",
                        std::regex_replace(error.message, *arena, "arena"));
  }

  struct RankOf {
    SessionId session;
    int64_t sequence = 0;
    bool ended = false;
    ArenaId staging;
    std::map<int64_t, std::string> told;
  };
  absl::Time now_ = absl::UnixEpoch() + absl::Hours(1);
  ThreadPool pool_{1};
  std::unique_ptr<Backend> backend_;
  std::vector<RankOf> ranks_;
  WorldId world_;
  std::unique_ptr<LocalNode> node_;
};

// What a trainer knows.
struct Trainer {
  int64_t step = 0;
  int64_t calls = 0;  // in it
  int32_t next_slot = 0;
  std::vector<TensorId> tensors;
  TensorId New() {
    tensors.push_back({next_slot++, 1});
    return tensors.back();
  }
};

InlineData Numbers(float first) {
  InlineData data;
  data.bytes.resize(kElements * sizeof(float));
  for (int i = 0; i < kElements; ++i) {
    const float value = first + static_cast<float>(i);
    std::memcpy(data.bytes.data() + i * sizeof(float), &value, sizeof(float));
  }
  return data;
}

size_t OutputsOf(int which) {
  if (which == kBarrier) return 0;
  return which == kGather ? kRanks : which == kTwo ? 2 : 1;
}
int64_t CallsOf(int which) {
  return which == kNegate || which == kLargeOnes ? 0 : which == kTwo ? 2 : 1;
}

Run MakeRun(const Job& job, int which, Binding input, Epoch epoch, Trainer* trainer) {
  Run run;
  run.graph = {which, 1};
  const bool has_input = which != kBarrier && which != kLargeOnes;
  if (has_input) run.inputs.push_back(input);
  if (which == kUpdate || which == kLargeUpdate) {
    run.inputs.push_back(trainer->tensors.empty() ? input : trainer->tensors.back());
  }
  for (size_t i = 0; i < OutputsOf(which); ++i) {
    OutBinding output;
    output.kind = OutBinding::Kind::kFresh;
    output.id = trainer->New();
    run.outputs.push_back(output);
  }
  if (CallsOf(which) == 0) return run;
  RunGroup group;
  group.world = job.world();
  group.epoch = epoch;
  group.base.push_back({trainer->step, trainer->calls, 0});
  run.groups.push_back(group);
  trainer->calls += CallsOf(which);
  return run;
}

// --- One by one ---------------------------------------------------------------------------------

class ShortWayTest : public ::testing::Test {
 protected:
  void Call(int r, int which, float first = 1) {
    job_.Submit(r, MakeRun(job_, which, Numbers(first), Epoch(1), &trainers_[r]));
  }
  Job job_{/*short_way=*/true};
  Trainer trainers_[kRanks];
};

TEST_F(ShortWayTest, TheLastOfAllCarriesItOut) {
  for (uint32_t round = 0; round < 3; ++round) {
    for (int r = 0; r < kRanks; ++r) Call(r, kSum, static_cast<float>(r));
    for (int r = 0; r < kRanks; ++r) {
      EXPECT_EQ(job_.told(r).size(), kAllGraphs + round + 1);
      EXPECT_EQ(job_.told(r).rbegin()->second, "OK");
    }
  }
  // The first time the plans are not on their devices yet.
  EXPECT_EQ(job_.stats().short_runs, 2 * kRanks);
  EXPECT_EQ(job_.stats().runs_published, 3 * kRanks);
  for (int r = 0; r < kRanks; ++r) EXPECT_EQ(job_.Read(r, {2, 1}), "f32[4] 3 6 9 12");
}

// What a user asks of its own things keeps nobody else from it.
TEST_F(ShortWayTest, OfAQuestionItsTenantsRunsMakeWay) {
  for (int r = 0; r < kRanks; ++r) Call(r, kSum);
  int64_t expected = 0;
  for (const char* tenant : {"uid:1", "uid:0", ""}) {
    SCOPED_TRACE(tenant);
    const auto ask = [&](auto question) {
      for (int r = 0; r < kRanks; ++r) {
        Call(r, kSum);
        if (r == 0) question();
      }
      job_.Settle();
      if (absl::string_view(tenant) == "uid:1") expected += kRanks;
      EXPECT_EQ(job_.stats().short_runs, expected);
    };
    ask([&] { (void)job_.node()->Stats(tenant); });
    ask([&] { (void)job_.node()->Sessions(tenant, absl::Now()); });
    ask([&] { (void)job_.node()->Worlds(tenant, absl::nullopt, absl::Now()); });
    ask([&] { (void)job_.node()->Pending(tenant, absl::Now()); });
    ask([&] { (void)job_.node()->Flight(tenant, 1); });
  }
}

TEST_F(ShortWayTest, EveryKindOfSmallCollectiveGoesIt) {
  for (const int which : {kSum, kMax, kGather, kScatter, kBroadcast, kBarrier}) {
    // Others' results may stand in tensors, not in bytes that come along.
    std::vector<TensorId> operands;
    for (int r = 0; r < kRanks; ++r) {
      chorus::Run run = MakeRun(job_, kNegate, Numbers(1), Epoch(1), &trainers_[r]);
      operands.push_back(run.outputs.front().id);
      job_.Submit(r, std::move(run));
    }
    job_.Settle();
    for (const int64_t short_runs : {0, kRanks}) {
      const int64_t before = job_.stats().short_runs;
      for (int r = 0; r < kRanks; ++r) {
        job_.Submit(
            r, MakeRun(job_, which, operands[static_cast<size_t>(r)], Epoch(1), &trainers_[r]));
      }
      job_.Settle();
      EXPECT_EQ(job_.stats().short_runs, before + short_runs) << which;
      for (int r = 0; r < kRanks; ++r) EXPECT_EQ(job_.told(r).rbegin()->second, "OK") << which;
    }
  }
}

// Where nobody keeps them, the bytes are read where they stand.
TEST_F(ShortWayTest, OperandsMayStandInStagingMemory) {
  for (const int which : {kSum, kScatter}) {
    for (const int64_t short_runs : {0, kRanks}) {
      const int64_t before = job_.stats().short_runs;
      for (int r = 0; r < kRanks; ++r) {
        job_.Submit(r, MakeRun(job_, which, job_.Staged(r, 16), Epoch(1), &trainers_[r]));
      }
      job_.Settle();
      EXPECT_EQ(job_.stats().short_runs, before + short_runs) << which;
    }
  }
  EXPECT_EQ(job_.stats().paths.copied_bytes, 0);
  for (int r = 0; r < kRanks; ++r) EXPECT_EQ(job_.Read(r, {1, 1}), "f32[4] 12 15 18 21");
  for (int r = 0; r < kRanks; ++r) {
    // Others get these bytes: they go the general way, which copies them.
    job_.Submit(r, MakeRun(job_, kGather, job_.Staged(r, 16), Epoch(1), &trainers_[r]));
  }
  job_.Settle();
  EXPECT_EQ(job_.stats().short_runs, 2 * kRanks);
}

TEST_F(ShortWayTest, StagingMemoryIsThereForWhoStands) {
  for (int r = 0; r < kRanks; ++r) Call(r, kSum);
  job_.Settle();
  job_.Submit(0, MakeRun(job_, kSum, job_.Staged(0, 0), Epoch(1), &trainers_[0]));
  job_.ReleaseStaging(0);
  job_.Wait(2 * ShortWay::kMostWait);  // in which it goes the general way
  Call(1, kSum);
  Call(2, kSum);
  job_.Settle();
  EXPECT_EQ(job_.told(0).rbegin()->second, "OK");
  EXPECT_EQ(job_.Read(0, {1, 1}), "f32[4] 2 5 8 11");
}

TEST_F(ShortWayTest, WhatIsNotUsualDoesNot) {
  for (int round = 0; round < 2; ++round) {
    for (const int which : {kTwo, kRecorded}) {
      for (int r = 0; r < kRanks; ++r) Call(r, which);
    }
  }
  job_.Settle();
  for (int r = 0; r < kRanks; ++r) Call(r, r == 1 ? kMax : kSum);
  job_.Wait(absl::Seconds(2));
  EXPECT_EQ(job_.stats().short_runs, 0);
  for (int r = 0; r < kRanks; ++r) {
    EXPECT_THAT(job_.told(r).rbegin()->second, ::testing::HasSubstr("MISMATCH")) << r;
  }
}

TEST_F(ShortWayTest, WhoStandsIsSeen) {
  for (int r = 0; r < kRanks; ++r) Call(r, kSum);
  job_.Settle();
  Call(0, kSum);
  Call(1, kSum);
  EXPECT_TRUE(job_.node()->Busy());
  const Listing<PendingView> pending = job_.node()->Pending("", absl::Now());
  ASSERT_EQ(pending.rows.size(), 1u);
  EXPECT_EQ(pending.rows[0].instance.voted.size(), 2u);
  Call(2, kSum);
  job_.Settle();
  EXPECT_EQ(job_.told(0).rbegin()->second, "OK");
  EXPECT_EQ(job_.stats().short_runs, 0);
  for (int r = 0; r < kRanks; ++r) Call(r, kSum);
  EXPECT_EQ(job_.stats().short_runs, kRanks);
  Call(0, kSum);
  EXPECT_EQ(job_.stats().live_runs, 1);
}

TEST_F(ShortWayTest, WhoStandsCanBeWaitedFor) {
  Call(0, kSum);
  Call(1, kSum);
  std::string read;
  job_.StartReading(0, {0, 1}, &read);
  EXPECT_EQ(read, "");
  Call(2, kSum);
  job_.Settle();
  EXPECT_EQ(read, "f32[4] 3 6 9 12");
}

TEST_F(ShortWayTest, WhoIsAtAnotherPositionIsToldAtOnce) {
  for (int r = 0; r < kRanks; ++r) Call(r, kSum);
  trainers_[0].calls = 0;
  Call(0, kSum);
  EXPECT_EQ(job_.told(0).size(), kAllGraphs + 2);
  EXPECT_THAT(job_.told(0).rbegin()->second, ::testing::HasSubstr("the run goes back to call 0"));
}

// As of when it came, not of when it was seen to.
TEST_F(ShortWayTest, WhoStandsTooLongIsLateInTime) {
  Call(0, kSum);
  job_.Wait(absl::Milliseconds(999));
  EXPECT_EQ(job_.told(0).size(), kAllGraphs);
  job_.Wait(absl::Milliseconds(1));
  ASSERT_EQ(job_.told(0).size(), kAllGraphs + 1);
  EXPECT_THAT(job_.told(0).rbegin()->second, ::testing::HasSubstr("AGREE_TIMEOUT rank 1"));
}

TEST_F(ShortWayTest, WhoStandsIsToldOfADeath) {
  Call(0, kSum);
  job_.End(2);
  job_.Settle();
  ASSERT_EQ(job_.told(0).size(), kAllGraphs + 1);
  EXPECT_THAT(job_.told(0).rbegin()->second, ::testing::HasSubstr("PEER_DIED rank 2"));
}

TEST_F(ShortWayTest, WhoStandsIsToldOfAnAbortAtOnce) {
  for (int r = 0; r < kRanks; ++r) Call(r, kSum);
  job_.Settle();
  Call(0, kSum);
  job_.Abort(1, Epoch(1));
  EXPECT_EQ(job_.told(0).size(), kAllGraphs + 2);
  EXPECT_THAT(job_.told(0).rbegin()->second, ::testing::HasSubstr("ABORTED rank 1"));
}

TEST_F(ShortWayTest, WhoIsOfAnEpochThatHasEndedMeetsNobody) {
  for (int r = 0; r < kRanks; ++r) Call(r, kSum);
  job_.Settle();
  job_.Abort(1, Epoch(1));
  for (const int r : {0, 1}) {
    job_.Submit(r, MakeRun(job_, kSum, Numbers(1), Epoch(2), &trainers_[r]));
  }
  Call(2, kSum);  // of the first one
  EXPECT_THAT(job_.told(2).rbegin()->second, ::testing::HasSubstr("ABORTED rank 1"));
  job_.Settle();
  for (const int r : {0, 1}) {
    EXPECT_THAT(job_.told(r).rbegin()->second, ::testing::HasSubstr("MISMATCH")) << r;
  }
  EXPECT_EQ(job_.stats().short_runs, 0);
}

TEST_F(ShortWayTest, WhatIsDiscardedHasNoName) {
  for (int round = 0; round < 3; ++round) {
    for (int r = 0; r < kRanks; ++r) {
      chorus::Run run =
          MakeRun(job_, kSum, Numbers(static_cast<float>(round)), Epoch(1), &trainers_[r]);
      if (round == 2) run.outputs.front().kind = OutBinding::Kind::kDiscard;
      job_.Submit(r, std::move(run));
    }
    job_.Settle();
  }
  EXPECT_EQ(job_.stats().short_runs, 2 * kRanks);
  for (int r = 0; r < kRanks; ++r) {
    EXPECT_EQ(job_.Read(r, {1, 1}), "f32[4] 3 6 9 12");
    EXPECT_THAT(job_.Read(r, {2, 1}), ::testing::HasSubstr("UNKNOWN_NAME"));
  }
}

// So what ranks compute of them is computed once.
TEST(ShortWay, ItsResultsAreKnownToBeEqual) {
  int64_t shared_kernels[2];
  for (const bool short_way : {false, true}) {
    Job job(short_way);
    Trainer trainers[kRanks];
    TensorId last[kRanks];
    for (const int which : {kLargeOnes, kLargeSum, kLargeSum, kLargeUpdate}) {
      for (int r = 0; r < kRanks; ++r) {
        chorus::Run run = MakeRun(job, which, last[r], Epoch(1), &trainers[r]);
        last[r] = run.outputs.front().id;
        job.Submit(r, std::move(run));
      }
      while (job.node()->Busy()) job.Settle();  // its work is the devices'
    }
    EXPECT_EQ(job.stats().short_runs, short_way ? kRanks : 0);
    EXPECT_EQ(job.stats().runs_published, 4 * kRanks);
    shared_kernels[short_way ? 1 : 0] = job.stats().shared_kernels;
  }
  EXPECT_GT(shared_kernels[0], 0);
  EXPECT_EQ(shared_kernels[1], shared_kernels[0]);
}

TEST_F(ShortWayTest, ANodeEndsWhileSomebodyStands) {
  Call(0, kSum);
  Call(1, kSum);
}

// --- Beside a node without it -------------------------------------------------------------------

// What becomes of a program is to be the same on both.
class Both {
 public:
  Both(uint32_t seed, CheckCallSites check)
      : random_(seed),
        jobs_{std::make_unique<Job>(true, check), std::make_unique<Job>(false, check)} {}

  void Step() {
    const int r = Up(kRanks);
    Trainer& trainer = trainers_[r];
    const int what = Up(42);
    if (what < 26) return CallAll();
    if (what < 29) return Call(r, Up(kNumGraphs), Up(8) == 0);
    if (what < 31) {
      Release release;
      for (int i = Up(3); i >= 0 && !trainer.tensors.empty(); --i) {
        release.tensors.push_back(Pick(trainer));
      }
      return Submit(r, release);
    }
    switch (what) {
      case 31:
      case 32:
      case 33:
        // All of them are in line again.
        for (Trainer& other : trainers_) {
          ++other.step;
          other.calls = 0;
        }
        return;
      case 34:
        return InBoth(
            [&](Job* job) { job->Wait(absl::Milliseconds(trainers_[0].next_slot % 20)); });
      case 35:
        return InBoth([&](Job* job) { job->Wait(absl::Seconds(2)); });
      case 36: {
        Cancel cancel;
        cancel.run = Sequence(last_[r]);
        return Submit(r, cancel);
      }
      case 37: {
        if (trainer.tensors.empty()) return;
        const TensorId id = Pick(trainer);
        std::vector<std::string> read;
        InBoth([&](Job* job) { read.push_back(job->Read(r, id)); });
        EXPECT_EQ(read[0], read[1]);
        return;
      }
      case 38:
        InBoth([&](Job* job) { (void)job->stats(); });
        return;
      case 39:
        // Who reads it has come and gone, or comes later.
        return InBoth([&, first = static_cast<float>(Up(9))](Job* job) {
          job->Settle();
          job->WriteStaging(r, first);
        });
      case 40:
        return InBoth([&, makes = Up(3) > 0](Job* job) {
          job->ReleaseStaging(r);
          if (makes) job->MakeStaging(r);
        });
      default:
        if (Up(6) > 0) return;
        const int how = Up(3);
        const Epoch epoch = jobs_[1]->epoch();
        InBoth([&](Job* job) {
          if (how == 0) job->Abort(r, epoch);
          if (how == 1) job->Leave(r);
          if (how == 2) job->End(r);
        });
    }
  }
  void Compare() {
    InBoth([](Job* job) {
      job->Wait(absl::Seconds(2));
      job->Wait(absl::Seconds(2));
    });
    EXPECT_EQ(jobs_[0]->Positions(), jobs_[1]->Positions());
    const std::vector<std::string> flights[] = {Flight(jobs_[0].get()), Flight(jobs_[1].get())};
    std::vector<std::string> differing;
    std::set_symmetric_difference(flights[0].begin(), flights[0].end(), flights[1].begin(),
                                  flights[1].end(), std::back_inserter(differing));
    EXPECT_THAT(differing, ::testing::IsEmpty());
    for (int r = 0; r < kRanks; ++r) {
      EXPECT_EQ(jobs_[0]->told(r), jobs_[1]->told(r)) << "rank " << r;
      for (const TensorId id : trainers_[r].tensors) {
        EXPECT_EQ(jobs_[0]->Read(r, id), jobs_[1]->Read(r, id)) << r << ": " << id.slot;
      }
    }
    const NodeStats stats[] = {jobs_[0]->stats(), jobs_[1]->stats()};
    EXPECT_EQ(stats[0].shared_kernels, stats[1].shared_kernels);
    EXPECT_EQ(stats[0].paths.aliased_bytes, stats[1].paths.aliased_bytes);
    EXPECT_EQ(stats[0].paths.reduced_bytes, stats[1].paths.reduced_bytes);
    EXPECT_EQ(stats[0].paths.copied_bytes, stats[1].paths.copied_bytes);
    EXPECT_EQ(stats[0].runs_published, stats[1].runs_published);
    EXPECT_EQ(stats[0].runs_failed, stats[1].runs_failed);
    EXPECT_EQ(stats[0].live_buffers, stats[1].live_buffers);
    EXPECT_EQ(stats[1].short_runs, 0);
  }
  int64_t short_runs() { return jobs_[0]->stats().short_runs; }

 private:
  int Up(int below) { return static_cast<int>(random_() % static_cast<uint32_t>(below)); }
  template <typename Fn>
  void InBoth(Fn fn) {
    for (auto& job : jobs_) fn(job.get());
  }
  void Submit(int r, CommandBody body) {
    InBoth([&](Job* job) {
      if (auto* run = absl::get_if<Run>(&body)) {
        for (Binding& input : run->inputs) {
          if (auto* range = absl::get_if<ExternalRange>(&input)) range->arena = job->staging(r);
        }
      }
      last_[r] = job->Submit(r, body);
    });
    if (Up(3) == 0) InBoth([](Job* job) { job->Settle(); });
  }
  TensorId Pick(const Trainer& trainer) {
    return trainer.tensors[static_cast<size_t>(Up(static_cast<int>(trainer.tensors.size())))];
  }
  Binding Operand(int r) {
    const Trainer& trainer = trainers_[r];
    if (Up(6) == 0) {
      ExternalRange range;
      range.offset = 16 * Up(4);
      if (Up(8) == 0) range.offset += 1 + Up(300);
      if (Up(8) == 0) range.strides = {1 + Up(2)};
      return range;
    }
    if (trainer.tensors.empty() || Up(3) == 0) return Numbers(static_cast<float>(Up(5)));
    // Most often what is new.
    return Up(4) == 0 ? Pick(trainer) : trainer.tensors.back();
  }
  void Call(int r, int which, bool wrong) {
    Trainer& trainer = trainers_[r];
    Epoch epoch = jobs_[1]->epoch();
    if (Up(120) == 0) epoch = Epoch(epoch.value() - 1 + 2 * Up(2));
    Run run = MakeRun(*jobs_[0], which, Operand(r), epoch, &trainer);
    if (wrong) {
      switch (Up(5)) {
        case 0:
          if (!run.groups.empty()) ++run.groups[0].base[0].call;
          ++trainer.calls;
          break;
        case 1:
          if (!run.groups.empty()) run.groups[0].base.clear();
          break;
        case 2:
          if (!run.outputs.empty()) run.outputs[0].id = Pick(trainer);
          break;
        case 3:
          if (!run.inputs.empty()) run.inputs[0] = TensorId{60000, 1};
          break;
        default:
          if (!run.outputs.empty()) run.outputs[0].kind = OutBinding::Kind::kDiscard;
      }
    }
    Submit(r, run);
  }
  // As a job does.
  void CallAll() {
    const int which = Up(2) == 0 ? kSum : Up(kNumGraphs);
    const int first = Up(kRanks);
    for (int i = 0; i < kRanks; ++i) Call((first + i) % kRanks, which, Up(60) == 0);
  }
  // Ids of errors are not counted alike where one is told of twice.
  static std::vector<std::string> Flight(Job* job) {
    std::vector<std::string> events;
    const auto flight = job->node()->Flight("", 10000);
    EXPECT_TRUE(flight.ok()) << flight.status();
    if (!flight.ok()) return events;
    for (const FlightEvent& event : *flight) {
      events.push_back(absl::StrCat(event.session.value(), " ", event.sequence.value(), " ",
                                    FlightKindName(event.kind), " ", event.ticket.value(), " ",
                                    event.epoch.value(), " ", absl::FormatTime(event.time)));
    }
    std::sort(events.begin(), events.end());
    return events;
  }

  std::mt19937 random_;
  std::unique_ptr<Job> jobs_[2];
  Trainer trainers_[kRanks];
  int64_t last_[kRanks] = {};
};

TEST(ShortWay, TellsWhatANodeWithoutItTells) {
  const uint32_t seed = std::random_device()();
  std::cout << "seed " << seed << "\n";
  std::mt19937 seeds(seed);
  int64_t short_runs = 0;
  constexpr int kPrograms = 300;
  for (int i = 0; i < kPrograms && !::testing::Test::HasFailure(); ++i) {
    const uint32_t program = seeds();
    SCOPED_TRACE(absl::StrCat("program ", program));
    const CheckCallSites check = i % 5 == 0   ? CheckCallSites::kRefuse
                                 : i % 5 == 1 ? CheckCallSites::kWarn
                                              : CheckCallSites::kOff;
    Both both(program, check);
    for (int step = 0; step < 60; ++step) both.Step();
    both.Compare();
    short_runs += both.short_runs();
  }
  // Else it has shown nothing.
  EXPECT_GT(short_runs, 6 * kPrograms);
}

}  // namespace
}  // namespace chorus::node
