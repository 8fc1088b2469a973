// Rings of many sessions: each session that has something in its ring is heard, and soon.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/stat.h>

#include <algorithm>
#include <fstream>
#include <iostream>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "core/backend/host/host_backend.h"
#include "core/base/counting_heap.h"
#include "core/base/error.h"
#include "core/base/thread_pool.h"
#include "core/base/unique_fd.h"
#include "core/base/work.h"
#include "core/graph/encoding.h"
#include "core/node/command_log.h"
#include "core/node/node.h"
#include "core/node/options.h"
#include "core/node/rings.h"
#include "core/ops/graph_builder.h"
#include "core/ops/host_kernels.h"
#include "core/runtime/devices.h"
#include "core/transport/command.h"
#include "core/transport/ring.h"
#include "core/transport/session_memory.h"

namespace chorus::node {
namespace {

// An attached session, as its client sees it.
class Client {
 public:
  explicit Client(LocalNode* node, std::string tenant = "uid:0", int32_t pid = 1) {
    OpenSessionRequest open;
    open.tenant = std::move(tenant);
    open.pid = pid;
    open.attached = true;
    open.devices = {DeviceIndex(0)};
    session_ = node->OpenSession(open, absl::Now())->id;
    const SessionDescriptors attached = *node->AttachMemory(session_);
    memory_ = *MapSessionMemory(attached.memory_fd);
    EXPECT_TRUE(node->ConfirmMemory(session_).ok());
    wake_ = attached.wake_fd;
    writer_ = std::make_unique<SubmissionRingWriter>(memory_.get());
  }

  SessionId session() const { return session_; }
  // A descriptor of the session's memory, as a client gets it.
  UniqueFd OwnDescriptor(LocalNode* node) const {
    return UniqueFd(fcntl(node->AttachMemory(session_)->memory_fd, F_DUPFD_CLOEXEC, 0));
  }

  void Submit() { Submit(Release()); }
  void Submit(CommandBody body) {
    SubmitWithoutRinging(std::move(body));
    if (writer_->must_ring()) RingWakeEvent(wake_);
  }
  void SubmitWithoutRinging(CommandBody body = Release()) {
    Command command;
    command.sequence = Sequence(++sequence_);
    command.body = std::move(body);
    ByteWriter frame;
    EncodeFrame(command, &frame);
    ASSERT_TRUE(*writer_->TryWrite(frame.bytes()));
  }
  // More bytes than a ring has are said to be in it.
  void BreakRing() { memory_->control().client.tail += uint64_t{1} << 32; }
  // From now on its heavy frames are one that it has sent before.
  void BeginToRepeat() {
    Submit();
    repeats_ = true;
  }
  // Heavy frames, so many as the ring has room for: each is a turn's work, and changes nothing.
  void Flood() {
    constexpr int32_t kNames = 12000;
    Command command;
    Release names;
    for (int32_t i = 0; i < kNames; ++i) names.tensors.push_back({300 + i, 1});
    command.body = std::move(names);
    for (bool room = true; room; sequence_ += room ? 1 : 0) {
      command.sequence = Sequence(repeats_ ? 1 : sequence_ + 1);
      ByteWriter frame;
      EncodeFrame(command, &frame);
      heavy_bytes_ = frame.bytes().size();
      room = *writer_->TryWrite(frame.bytes());
    }
    if (writer_->must_ring()) RingWakeEvent(wake_);
  }
  // How many of them have been taken, about.
  uint64_t HeavyTaken() const { return memory_->control().daemon.head.load() / heavy_bytes_; }
  bool Heard() const {
    const SessionControl& control = memory_->control();
    return control.daemon.head.load() == control.client.tail.load();
  }

 private:
  SessionId session_;
  std::unique_ptr<SessionMemory> memory_;
  int wake_ = -1;  // the node's
  std::unique_ptr<SubmissionRingWriter> writer_;
  int64_t sequence_ = 0;
  bool repeats_ = false;
  uint64_t heavy_bytes_ = 1;
};

class NodePollTest : public ::testing::Test {
 protected:
  static constexpr int kSessions = 100;

  NodePollTest() {
    ForgetLargestSlice();
    HostBackendOptions host;
    host.devices = 1;
    host.pool = &pool_;
    host.make_kernel = MakeHostKernel;
    backend_ = CreateHostBackend(host);
    node_ = std::make_unique<LocalNode>(NodeOptions(), DevicesOf(backend_.get()), [] {});
    for (int i = 0; i < kSessions; ++i) clients_.emplace_back(node_.get());
  }

  // Late enough for a look at which have rung.
  bool Poll() { return node_->Poll(now_ += node::Rings::kLookForRungEvery); }
  int CountHeard() const {
    int heard = 0;
    for (const Client& client : clients_) heard += client.Heard() ? 1 : 0;
    return heard;
  }
  // How many polls it takes until all of them are heard.
  int PollsUntilAllAreHeard() {
    for (int polls = 0; polls < 1000; ++polls) {
      if (CountHeard() == static_cast<int>(clients_.size())) return polls;
      EXPECT_TRUE(Poll() || polls > 0);
    }
    return 1000;
  }
  void SubmitAll() {
    for (Client& client : clients_) client.Submit();
  }

  ThreadPool pool_{1};
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<LocalNode> node_;
  std::vector<Client> clients_;
  absl::Time now_ = absl::Now();
};

TEST_F(NodePollTest, QuietSessionsAreHeardWhenTheyRing) {
  EXPECT_FALSE(Poll());
  SubmitAll();
  EXPECT_TRUE(Poll());
  EXPECT_LE(PollsUntilAllAreHeard(), kSessions / 8);
}

// Out of memory that is not sealed a client takes pages while the node would look at them.
TEST_F(NodePollTest, MemoryIsNotLookedAtBeforeItIsSealed) {
  OpenSessionRequest open;
  open.tenant = "uid:0";
  open.attached = true;
  open.devices = {DeviceIndex(0)};
  const SessionId session = node_->OpenSession(open, now_)->id;
  EXPECT_EQ(ErrorOf(node_->ConfirmMemory(session)).reason, Reason::kWrongState);
  const SessionDescriptors attached = *node_->AttachMemory(session);
  EXPECT_EQ(ErrorOf(node_->ConfirmMemory(session)).reason, Reason::kMalformed);
  const std::unique_ptr<SessionMemory> memory = *MapSessionMemory(attached.memory_fd);
  // Not even a ring that could not be believed.
  memory->control().client.tail += uint64_t{1} << 32;
  RingWakeEvent(attached.wake_fd);
  Poll();
  Poll();
  EXPECT_TRUE(node_->Lives(session));
  EXPECT_TRUE(node_->ConfirmMemory(session).ok());
  Poll();
  EXPECT_FALSE(node_->Lives(session)) << "now it is";
}

TEST_F(NodePollTest, WhoWasHeardIsLookedAtEachTime) {
  SubmitAll();
  PollsUntilAllAreHeard();
  for (int round = 0; round < 3; ++round) {
    now_ += node::Rings::kQuietAfter / 2;
    for (Client& client : clients_) client.SubmitWithoutRinging();
    Poll();
    EXPECT_EQ(CountHeard(), kSessions) << "round " << round;
  }
}

TEST_F(NodePollTest, WhoHasBeenSilentIsLookedAtNoMoreUntilItRings) {
  SubmitAll();
  PollsUntilAllAreHeard();
  now_ += 2 * node::Rings::kQuietAfter;
  Poll();
  for (Client& client : clients_) client.SubmitWithoutRinging();
  EXPECT_FALSE(Poll());
  EXPECT_EQ(CountHeard(), 0);
  SubmitAll();
  EXPECT_LE(PollsUntilAllAreHeard(), kSessions / 8);
}

TEST_F(NodePollTest, WhoHasAFrameKeepsTheNodeFromSleep) {
  SubmitAll();
  PollsUntilAllAreHeard();
  EXPECT_TRUE(node_->SleepUnlessBusy([] {}));
  SubmitAll();
  EXPECT_FALSE(node_->SleepUnlessBusy([] {})) << "there is work";
  Poll();
  EXPECT_EQ(CountHeard(), kSessions);
}

TEST_F(NodePollTest, WhoRingsEndsASleep) {
  Client& one = clients_[kSessions / 2];
  one.Submit();
  pollfd watched = {node_->wake_epoll_fd(), POLLIN, 0};
  EXPECT_TRUE(node_->SleepUnlessBusy([&] { EXPECT_EQ(poll(&watched, 1, 0), 1); }));
  // Heard at once after it, whatever the time.
  node_->Poll(now_);
  EXPECT_TRUE(one.Heard());
  EXPECT_TRUE(node_->SleepUnlessBusy([&] { EXPECT_EQ(poll(&watched, 1, 0), 0); }));
}

TEST_F(NodePollTest, SessionsThatEndLeaveTheOthersHeard) {
  // Every other one active; then active and quiet ones end.
  for (int i = 0; i < kSessions; i += 2) clients_[static_cast<size_t>(i)].Submit();
  PollsUntilAllAreHeard();
  for (int i = kSessions - 1; i >= 0; i -= 3) {
    EXPECT_TRUE(node_->CloseSession(clients_[static_cast<size_t>(i)].session(), now_).ok());
    clients_.erase(clients_.begin() + i);
  }
  for (int round = 0; round < 3; ++round) {
    SubmitAll();
    EXPECT_LE(PollsUntilAllAreHeard(), kSessions / 8) << "round " << round;
    now_ += round * node::Rings::kQuietAfter;
    Poll();
  }
}

// A frame may be the last that its session sends: what stands behind it in the list is not lost.
TEST_F(NodePollTest, ABrokenRingEndsOnlyItsSession) {
  SubmitAll();
  PollsUntilAllAreHeard();
  Client& broken = clients_[kSessions / 2];
  SubmitAll();
  broken.BreakRing();
  Poll();
  clients_.erase(clients_.begin() + kSessions / 2);
  SubmitAll();
  EXPECT_LE(PollsUntilAllAreHeard(), 2);
}

// Their pages cannot be taken from a process that has them: by a mapping, or by a descriptor alone.
TEST_F(NodePollTest, MemoryOfASessionThatHasEndedIsChargedAsLongAsAClientHasIt) {
  clients_.clear();
  const auto used = [this] { return node_->Stats("").memory_used_bytes; };
  const auto held = [this] { return node_->Stats("").client_held_bytes; };
  const auto bytes = static_cast<int64_t>(SessionMemory::TotalBytes(SessionMemoryOptions()));
  for (const bool by_descriptor : {false, true}) {
    const int64_t before = used();
    auto client = std::make_unique<Client>(node_.get());
    UniqueFd descriptor;
    if (by_descriptor) descriptor = client->OwnDescriptor(node_.get());
    EXPECT_GE(used(), before + bytes);
    ASSERT_TRUE(node_->CloseSession(client->session(), now_).ok());
    EXPECT_EQ(used(), before + bytes) << "it is mapped";
    EXPECT_EQ(held(), bytes);
    client.reset();
    EXPECT_EQ(used(), by_descriptor ? before + bytes : before);
    descriptor.Reset();
    EXPECT_EQ(used(), before);
    EXPECT_EQ(held(), 0);
  }
}

// Whether this process maps the shared memory with this inode.
bool IsMapped(ino_t inode) {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    if (absl::StrContains(line, absl::StrCat(" ", inode, " ")) &&
        absl::StrContains(line, "memfd:chorus")) {
      return true;
    }
  }
  return false;
}

// Out of memory that its client never sealed it may take pages: unmapping would wait for that.
TEST_F(NodePollTest, MemoryThatWasNeverSealedStaysMappedAsLongAsAClientHasIt) {
  clients_.clear();
  const auto used = [this] { return node_->Stats("").memory_used_bytes; };
  const int64_t before = used();
  OpenSessionRequest open;
  open.tenant = "uid:0";
  open.attached = true;
  open.devices = {DeviceIndex(0)};
  const SessionId session = node_->OpenSession(open, now_)->id;
  UniqueFd descriptor(fcntl(node_->AttachMemory(session)->memory_fd, F_DUPFD_CLOEXEC, 0));
  struct stat memory;
  ASSERT_EQ(fstat(descriptor.get(), &memory), 0);
  ASSERT_TRUE(node_->CloseSession(session, now_).ok());
  EXPECT_GT(used(), before);
  EXPECT_TRUE(IsMapped(memory.st_ino));
  descriptor.Reset();
  EXPECT_EQ(used(), before);
  while (IsMapped(memory.st_ino)) std::this_thread::yield();  // another thread unmaps it
}

// A client that opens sessions and keeps the memory of each gets to the end of its share, and no
// further.
TEST(NodeSessionMemoryTest, CannotBeKeptOfOneSessionAfterTheOther) {
  NodeOptions options;
  options.memory_limit_bytes = int64_t{32} << 20;
  HostBackendOptions host;
  host.devices = 1;
  host.make_kernel = MakeHostKernel;
  ThreadPool pool(1);
  host.pool = &pool;
  const std::unique_ptr<Backend> backend = CreateHostBackend(host);
  LocalNode node(options, DevicesOf(backend.get()), [] {});
  std::vector<std::unique_ptr<SessionMemory>> kept;
  const auto open_and_close = [&](bool keep) {
    OpenSessionRequest open;
    open.tenant = "uid:0";
    open.attached = true;
    open.devices = {DeviceIndex(0)};
    const SessionId session = node.OpenSession(open, absl::Now())->id;
    const absl::StatusOr<SessionDescriptors> attached = node.AttachMemory(session);
    if (attached.ok() && keep) kept.push_back(*MapSessionMemory(attached->memory_fd));
    EXPECT_TRUE(node.CloseSession(session, absl::Now()).ok());
    return attached.status();
  };
  absl::Status status;
  const int64_t most = options.memory_limit_bytes /
                       static_cast<int64_t>(SessionMemory::TotalBytes(SessionMemoryOptions()));
  while (status.ok() && static_cast<int64_t>(kept.size()) <= most) status = open_and_close(true);
  EXPECT_EQ(ErrorOf(status).reason, Reason::kOutOfMemory) << status;
  EXPECT_GT(kept.size(), 4u);
  // One that lets go gets more, without anybody looking in between.
  kept.pop_back();
  EXPECT_TRUE(open_and_close(false).ok());
}

// --- Turns --------------------------------------------------------------------------------------

class NodeTurnsTest : public NodePollTest {
 protected:
  // One more of those that ask for as much as they can.
  void AddHeavy(const std::string& tenant, int32_t pid) {
    heavy_.push_back(std::make_unique<Client>(node_.get(), tenant, pid));
  }
  void Flood() {
    for (const auto& heavy : heavy_) heavy->Flood();
  }
  uint64_t HeavyTaken() const {
    uint64_t taken = 0;
    for (const auto& heavy : heavy_) taken += heavy->HeavyTaken();
    return taken;
  }
  // The most heavy frames that are taken while a small one of `little` waits.
  uint64_t MostBeforeItIsHeard(Client* little) {
    // Nobody knows before that it asks for little.
    for (int i = 0; i < 20; ++i) {
      little->Submit();
      while (!little->Heard()) Poll();
    }
    uint64_t most = 0;
    for (int i = 0; i < 100; ++i) {
      Flood();
      for (int polls = 0; polls < i % 3; ++polls) Poll();
      const uint64_t before = HeavyTaken();
      little->Submit();
      for (int polls = 0; polls < 1000 && !little->Heard(); ++polls) Poll();
      EXPECT_TRUE(little->Heard());
      most = std::max(most, HeavyTaken() - before);
    }
    return most;
  }
  // Of the frames that are taken of all heavy ones in a while, the share of this one.
  double ShareOf(const Client& one) {
    Flood();
    Poll();
    const uint64_t before = one.HeavyTaken();
    const uint64_t all_before = HeavyTaken();
    for (int polls = 0; polls < 400; ++polls) {
      Flood();
      Poll();
    }
    return static_cast<double>(one.HeavyTaken() - before) /
           static_cast<double>(HeavyTaken() - all_before);
  }

  // What one Poll() does, and the slice in which it has had enough.
  static constexpr uint64_t kFewFrames = 4;
  std::vector<std::unique_ptr<Client>> heavy_;
};

TEST_F(NodeTurnsTest, WhoAsksForLittleIsHeardSoonHoweverManySessionsOfAProcessAskForMuch) {
  for (int i = 0; i < 80; ++i) AddHeavy("uid:0", 7);
  EXPECT_LE(MostBeforeItIsHeard(&clients_[0]), kFewFrames);
}

TEST_F(NodeTurnsTest, WhoAsksForLittleIsHeardSoonHoweverManyProcessesAskForMuch) {
  for (int i = 0; i < 80; ++i) AddHeavy("uid:0", 7 + i);
  EXPECT_LE(MostBeforeItIsHeard(&clients_[0]), kFewFrames);
}

// Frames that are only answered have to be read all the same.
TEST_F(NodeTurnsTest, WhoAsksForLittleIsHeardSoonHoweverManyRepeatWhatWasAnswered) {
  for (int i = 0; i < 80; ++i) {
    AddHeavy("uid:0", 7);
    heavy_.back()->BeginToRepeat();
  }
  EXPECT_LE(MostBeforeItIsHeard(&clients_[0]), kFewFrames);
}

// Where only one asks for much nobody is left waiting by it: it has had a turn, and a small frame
// has come meanwhile, beside its next one. That is not first because its session was there first.
TEST_F(NodeTurnsTest, WhoAsksForLittleIsHeardBeforeTheOnlyOneThatAsksForMuch) {
  AddHeavy("uid:0", 7);
  Flood();
  for (int polls = 0; polls < 2; ++polls) Poll();
  Client& little = clients_[0];
  for (int i = 0; i < 20; ++i) {
    little.Submit();
    while (!little.Heard()) Poll();
  }
  for (int i = 0; i < 100; ++i) {
    Flood();
    Poll();
    little.Submit();
    Poll();
    EXPECT_TRUE(little.Heard()) << i;
  }
}

// However long a turn takes: a session that was left waiting by it is next.
TEST_F(NodeTurnsTest, WhoIsLeftWaitingIsNextWhateverTimeHasPassed) {
  AddHeavy("uid:0", 7);
  const auto poll = [&] { node_->Poll(now_ += 2 * Rings::kInOrderFor); };
  Client& little = clients_[0];
  Flood();
  poll();
  for (int i = 0; i < 100; ++i) {
    Flood();
    little.Submit();
    for (int polls = 0; polls < 2; ++polls) poll();
    EXPECT_TRUE(little.Heard()) << i;
  }
}

TEST_F(NodeTurnsTest, AProcessHasNotMoreTurnsForHavingMoreSessions) {
  for (int i = 0; i < 30; ++i) AddHeavy("uid:0", 7);
  AddHeavy("uid:0", 8);
  EXPECT_NEAR(ShareOf(*heavy_.back()), 0.5, 0.1);
}

TEST_F(NodeTurnsTest, ATenantHasNotMoreTurnsForHavingMoreProcesses) {
  for (int i = 0; i < 30; ++i) AddHeavy("uid:0", 7 + i);
  AddHeavy("uid:1", 8);
  EXPECT_NEAR(ShareOf(*heavy_.back()), 0.5, 0.1);
}

TEST_F(NodeTurnsTest, SessionsOfAProcessTakeTurns) {
  for (int i = 0; i < 10; ++i) AddHeavy("uid:0", 7);
  EXPECT_NEAR(ShareOf(*heavy_.back()), 0.1, 0.02);
}

// A frame names thousands of graphs; to take them apart is more than a turn has the time for.
TEST_F(NodePollTest, GraphsThatOneFrameReleasesGoInTurnsAndWhatStandsBehindItWaits) {
  constexpr int kGraphs = 1000;
  Client& many = clients_[0];
  Client& other = clients_[1];
  const auto live = [&] { return node_->Describe(many.session(), now_)->live_graphs; };
  const auto graph = [](int number) {
    GraphBuilder builder(1, {});
    GraphInput input;
    input.type = TensorType(DType::kF32, {1});
    NodeSpec negated;
    negated.op = "neg";
    negated.source = std::to_string(number);  // no two have the same bytes
    negated.inputs = {builder.AddInput(input)};
    GraphOutput output;
    output.value = builder.Emit(negated)->front();
    builder.AddOutput(output);
    return EncodeGraph(builder.Build());
  };
  Release all;
  for (int i = 0; i < kGraphs; ++i) {
    RegisterGraph registration;
    registration.graph = {i, 1};
    registration.encoded = graph(i);
    many.Submit(std::move(registration));
    all.graphs.push_back({i, 1});
    while (!many.Heard()) Poll();
  }
  ASSERT_EQ(live(), kGraphs);
  many.Submit(std::move(all));
  RegisterGraph next;
  next.graph = {0, 2};
  next.encoded = graph(kGraphs);
  many.Submit(std::move(next));
  int turns = 0;
  for (int64_t before = kGraphs; before > 1; ++turns) {
    other.Submit();
    for (int polls = 0; polls < 2; ++polls) ASSERT_TRUE(Poll());
    EXPECT_TRUE(other.Heard()) << "in turn " << turns;
    const int64_t left = live();
    EXPECT_GE(left, before - kGraphs / 3) << "in turn " << turns;
    if (left > 1) {
      EXPECT_FALSE(many.Heard());
    }
    before = left;
  }
  EXPECT_GE(turns, 4);
  while (!many.Heard()) ASSERT_TRUE(Poll());
  EXPECT_EQ(live(), 1) << "the graph that came behind them is there";
  EXPECT_LE(LargestSliceWork(), kMaxSliceWork);
}

// It may have kept thousands of arenas for its next results: they go when there is time.
TEST_F(NodePollTest, WhatATenantsLastSessionLeavesIsGivenBackInTheTurnsThatCome) {
  const auto used = [this] { return node_->Stats("").memory_used_bytes; };
  Client last(node_.get(), "uid:1");
  GraphBuilder builder(1, {});
  NodeSpec ones;
  ones.op = "fill";
  ones.attributes = {{"dims", std::vector<int64_t>{100}}, {"dtype", "f32"}, {"value", 1.0}};
  GraphOutput output;
  output.value = builder.Emit(ones)->front();
  builder.AddOutput(output);
  RegisterGraph registration;
  registration.graph = {0, 1};
  registration.encoded = EncodeGraph(builder.Build());
  last.Submit(std::move(registration));
  chorus::Run run;
  run.graph = {0, 1};
  run.outputs.resize(1);
  run.outputs[0].kind = OutBinding::Kind::kFresh;
  run.outputs[0].id = {1, 1};
  last.Submit(std::move(run));
  while (!last.Heard() || node_->Busy()) Poll();
  Release release;
  release.tensors = {{1, 1}};
  last.Submit(std::move(release));
  while (Poll() || !last.Heard()) {
  }
  const int64_t idle = node_->Stats("").idle_bytes;
  ASSERT_GT(idle, 0);
  {
    const WorkSlice slice;
    CountWork(kTurnWork + 1);
    ASSERT_TRUE(node_->CloseSession(last.session(), now_).ok());
  }
  const int64_t ended = used();
  bool released = false;
  node_->AfterReleases("uid:0", [&] {
    released = true;
    EXPECT_LE(used(), ended - idle);
  });
  EXPECT_FALSE(released);
  for (int polls = 0; polls < 10 && !released; ++polls) Poll();
  EXPECT_TRUE(released);
}

// Commands that come without a ring, out of order: each gap is waited for so long and no longer,
// one behind another gap as well.
TEST_F(NodePollTest, WhatIsHeldBehindTwoGapsIsRefusedWhenTheSecondIsNotFilled) {
  OpenSessionRequest open;
  open.tenant = "uid:0";
  open.devices = {DeviceIndex(0)};
  const SessionId session = node_->OpenSession(open, now_)->id;
  std::map<int64_t, absl::Status> outcomes;
  const auto submit = [&](int64_t sequence) {
    Command command;
    command.sequence = Sequence(sequence);
    command.body = Release();
    ByteWriter frame;
    EncodeFrame(command, &frame);
    node_->Submit(session, std::string(frame.bytes()), now_,
                  [&outcomes, sequence](Outcome outcome) { outcomes[sequence] = outcome.status; });
  };
  const absl::Duration patience = NodeOptions().gap_timeout;
  submit(2);
  submit(4);
  now_ += patience / 2;
  submit(1);
  Poll();
  EXPECT_TRUE(outcomes[1].ok() && outcomes[2].ok()) << outcomes[1] << outcomes[2];
  now_ += patience - absl::Milliseconds(1);
  Poll();
  EXPECT_EQ(outcomes.count(4), 0u) << "its own gap has not lasted so long: " << outcomes[4];
  now_ += absl::Milliseconds(2);
  Poll();
  ASSERT_EQ(outcomes.count(4), 1u);
  EXPECT_EQ(ErrorOf(outcomes[4]).reason, Reason::kSequenceGap) << outcomes[4];
  EXPECT_THAT(std::string(outcomes[4].message()), ::testing::HasSubstr("command 3 did not arrive"));
  submit(3);
  submit(4);
  Poll();
  EXPECT_TRUE(outcomes[3].ok() && outcomes[4].ok()) << outcomes[3] << outcomes[4];
}

TEST_F(NodePollTest, CallsThatWaitTakeNoMoreThanIsSaidOfThemAndAllButTheFirstAreCharged) {
  constexpr int64_t kCalls = 1000;
  const SessionId session = clients_[0].session();
  int told = 0;
  const auto call = std::make_shared<int>();  // the server's
  const auto used = [this] { return node_->Stats("").memory_used_bytes; };
  const int64_t before = used();
  const OnOutcome done = [&told, call](const Outcome&) { ++told; };
  {
    const HeapUse heap;
    for (int64_t i = 1; i <= kCalls; ++i) {
      node_->WaitOutcome(session, Sequence(i), now_ + absl::Hours(1), done,
                         std::make_shared<Wait>());
    }
    std::cout << heap.bytes() / kCalls << " bytes each" << std::endl;
    EXPECT_GT(heap.bytes(), kCalls * kWaitBytes / 4);
    EXPECT_LE(heap.bytes(), kCalls * kWaitBytes);
  }
  EXPECT_EQ(used() - before, (kCalls - kFreeWaits) * kWaitBytes);
  // They come before the first: the frames are charged.
  const HeapUse heap;
  int64_t charged = 0;
  for (int64_t i = 2; i <= kCalls; ++i) {
    Command command;
    command.sequence = Sequence(i);
    command.body = Release();
    ByteWriter frame;
    EncodeFrame(command, &frame);
    charged += static_cast<int64_t>(CommandLog::kHeldRowBytes + frame.bytes().size());
    node_->Submit(session, frame.bytes(), now_, done, std::make_shared<Wait>());
  }
  EXPECT_EQ(told, 0);
  EXPECT_LE(heap.bytes(), kCalls * kWaitBytes + charged);
}

}  // namespace
}  // namespace chorus::node
