#include "server/peers.h"

#include <errno.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "core/base/counting_heap.h"
#include "core/base/error.h"
#include "core/base/unique_fd.h"
#include "core/transport/attach/lingering_socket.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/client_socket.h"
#include "server/own_memory.h"
#include "server/testing/http2_client.h"

namespace chorus::server {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

constexpr absl::Duration kNever = absl::InfiniteDuration();

bool HungUp(int fd) {
  pollfd entry = {fd, POLLRDHUP, 0};
  return poll(&entry, 1, 0) > 0;
}

// Both ends of a connection that `table` has.
struct Pair {
  Pair(PeerTable* table, uid_t uid) {
    int ends[2];
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
    client = UniqueFd(ends[0]);
    PeerCredentials peer;
    peer.uid = uid;
    peer.pid = 17;
    absl::StatusOr<UniqueFd> added = table->Add(ClientSocket(UniqueFd(ends[1])), peer);
    status = added.status();
    if (added.ok()) server = *std::move(added);
  }
  int number() const { return server.get(); }

  absl::Status status;
  UniqueFd client;
  UniqueFd server;  // gRPC's
};

TEST(PeerTableTest, OneUidHasSevenEighthsAndAnotherGetsIn) {
  PeerTable table(0, 16, {16, 16, 16});
  std::vector<Pair> pairs;
  for (int i = 0; i < 14; ++i) {
    pairs.emplace_back(&table, 1000);
    ASSERT_TRUE(pairs.back().status.ok()) << pairs.back().status;
  }
  const absl::Status refused = Pair(&table, 1000).status;
  EXPECT_EQ(ErrorOf(refused).reason, Reason::kQuota);
  EXPECT_THAT(std::string(refused.message()),
              HasSubstr("connections by uid 1000: the caller has 14; expected at most 14"));
  const Pair other(&table, 1001);
  EXPECT_TRUE(other.status.ok()) << other.status;
  const Pair third(&table, 1002);
  EXPECT_TRUE(third.status.ok()) << third.status;
  EXPECT_FALSE(Pair(&table, 1003).status.ok());
  // One that goes makes room.
  pairs.pop_back();
  table.TakeHangups();
  EXPECT_EQ(table.open(), 15);
  EXPECT_TRUE(Pair(&table, 1000).status.ok());
}

// A call that its handler has asked for.
struct AdmittedCall {
  AdmittedCall(PeerTable* peers, const Pair& pair) : table(peers), number(pair.number()) {
    EXPECT_TRUE(table->CallBegan(number).ok());
    auto admitted = table->Admit(absl::StrCat("fd:", number));
    status = admitted.status();
    if (admitted.ok()) slot = std::move(admitted->slot);
  }
  void End() {
    slot = PeerTable::Slot();
    table->CallEnded(number, /*was_counted=*/true);
  }

  PeerTable* table;
  int number;
  absl::Status status;
  PeerTable::Slot slot;
};

TEST(PeerTableTest, OneUidHasSevenEighthsOfTheCallsAndAnotherGetsIn) {
  PeerTable table(0, 8, {16, 16, 16});
  const Pair one(&table, 1000);
  const Pair two(&table, 1000);
  const Pair other(&table, 1001);
  std::vector<AdmittedCall> calls;
  for (int i = 0; i < 14; ++i) {
    calls.emplace_back(&table, i % 2 == 0 ? one : two);
    EXPECT_TRUE(calls.back().status.ok()) << i << ": " << calls.back().status;
  }
  AdmittedCall refused(&table, two);
  EXPECT_EQ(ErrorOf(refused.status).reason, Reason::kQuota);
  EXPECT_THAT(std::string(refused.status.message()),
              HasSubstr("the caller has 14; expected at most 14 of one user, 16 in all"));
  AdmittedCall others(&table, other);
  EXPECT_TRUE(others.status.ok()) << others.status;
  calls.back().End();
  calls.pop_back();
  calls.emplace_back(&table, two);
  EXPECT_TRUE(calls.back().status.ok()) << calls.back().status;
  EXPECT_FALSE(AdmittedCall(&table, one).status.ok());
}

TEST(PeerTableTest, ACallThatCanBeSparedGivesItsPlaceToOneOfItsUsers) {
  PeerTable table(0, 8, {8, 64, 64});
  const Pair one(&table, 1000);
  const Pair two(&table, 1000);
  const Pair other(&table, 1001);
  std::vector<int> taken;
  std::vector<AdmittedCall> calls;
  for (int i = 0; i < 7; ++i) {
    calls.emplace_back(&table, one);
    ASSERT_TRUE(calls.back().status.ok()) << i << ": " << calls.back().status;
    // All but one.
    if (i != 2) {
      calls.back().slot.Spare([&table, &taken, i] {
        EXPECT_GT(table.calls(), 0);  // no lock is held
        taken.push_back(i);
      });
    }
  }
  // One that has ended is none, and the slot of nobody.
  calls[1].slot.End();
  AdmittedCall free(&table, two);
  EXPECT_TRUE(free.status.ok()) << free.status;
  EXPECT_THAT(taken, ElementsAre());
  AdmittedCall others(&table, other);
  EXPECT_TRUE(others.status.ok()) << others.status;
  // There are no more, neither for one user nor for all.
  std::vector<AdmittedCall> later;
  for (int i = 0; i < 5; ++i) {
    later.emplace_back(&table, two);
    EXPECT_TRUE(later.back().status.ok()) << i << ": " << later.back().status;
  }
  EXPECT_THAT(taken, ElementsAre(0, 3, 4, 5, 6));
  EXPECT_FALSE(AdmittedCall(&table, two).status.ok());
  EXPECT_FALSE(AdmittedCall(&table, other).status.ok());
  // Nor do those whose slot was taken make room when they end.
  for (const int i : taken) {
    if (i % 2 == 0) calls[i].slot.End();
    calls[i].slot = PeerTable::Slot();
  }
  EXPECT_FALSE(AdmittedCall(&table, one).status.ok());
  calls[2].slot = PeerTable::Slot();
  EXPECT_TRUE(AdmittedCall(&table, one).status.ok());
}

// A client that has its answer makes the next call, however late gRPC has done with the last one.
TEST(PeerTableTest, CallsThatAreAnsweredKeepNobodyOut) {
  PeerTable table(0, 8, {16, 8, 16});
  const Pair one(&table, 1000);
  std::vector<AdmittedCall> answered;
  for (int i = 0; i < 14; ++i) {
    answered.emplace_back(&table, one);
    ASSERT_TRUE(answered.back().status.ok()) << i << ": " << answered.back().status;
    answered.back().slot.End();
  }
  std::vector<AdmittedCall> calls;
  for (int i = 0; i < 14; ++i) {
    calls.emplace_back(&table, one);
    EXPECT_TRUE(calls.back().status.ok()) << i << ": " << calls.back().status;
  }
  EXPECT_FALSE(AdmittedCall(&table, one).status.ok());
  table.CallEnded(one.number(), /*was_counted=*/true);
  // Nor do they make room twice.
  for (AdmittedCall& call : answered) call.End();
  EXPECT_FALSE(AdmittedCall(&table, one).status.ok());
  table.CallEnded(one.number(), /*was_counted=*/true);
  EXPECT_EQ(table.calls(), 14);
}

// Those of gRPC's own services, and those that are refused.
TEST(PeerTableTest, CallsThatAreNotAdmittedKeepNobodyOut) {
  PeerTable table(0, 8, {16, 16, 16});
  const Pair one(&table, 1000);
  const Pair other(&table, 1001);
  for (int i = 0; i < 14; ++i) EXPECT_TRUE(table.CallBegan(one.number()).ok()) << i;
  for (int i = 0; i < 100; ++i) EXPECT_FALSE(table.CallBegan(one.number()).ok());
  EXPECT_TRUE(table.CallBegan(other.number()).ok());
  EXPECT_TRUE(table.CallBegan(other.number()).ok());
  // There are sixteen: one more is too many, whichever user's it is.
  const absl::Status refused = table.CallBegan(other.number());
  EXPECT_EQ(ErrorOf(refused).reason, Reason::kQuota);
  EXPECT_THAT(std::string(refused.message()),
              HasSubstr("the caller has 2; expected at most 14 of one user, 16 in all"));
  table.CallEnded(other.number(), /*was_counted=*/true);
  table.CallEnded(other.number(), /*was_counted=*/true);
  // For calls that are admitted there is as much room as before.
  std::vector<AdmittedCall> calls;
  for (int i = 0; i < 14; ++i) {
    calls.emplace_back(&table, other);
    EXPECT_TRUE(calls.back().status.ok()) << i << ": " << calls.back().status;
  }
}

Http2Frames::Counts CallsOf(int calls) {
  Http2Frames::Counts counts;
  counts.calls = calls;
  counts.requests = calls;
  return counts;
}

TEST(PeerTableTest, AConnectionThatMakesMoreCallsThanThereMayBeHasToEnd) {
  std::string told;
  PeerTable table(0, 8, {16, 8, 8},  // 32 in all, 28 of one user
                  [&told](absl::string_view, absl::string_view why) { told = std::string(why); });
  const Pair one(&table, 1000);
  const Pair two(&table, 1000);
  const Pair other(&table, 1001);
  EXPECT_TRUE(table.MayAsk(one.number(), CallsOf(20)));
  EXPECT_FALSE(table.MayAsk(two.number(), CallsOf(9)));
  EXPECT_EQ(told,
            "its user has 20 calls that have not ended, and makes 9 more; expected at most 28");
  EXPECT_TRUE(table.MayAsk(two.number(), CallsOf(8)));
  EXPECT_FALSE(table.MayAsk(one.number(), CallsOf(1)));
  // Others are there, too, with as many of the rest each.
  const Pair third(&table, 1002);
  for (const Pair* pair : {&other, &third}) {
    EXPECT_TRUE(table.MayAsk(pair->number(), CallsOf(4)));
    EXPECT_FALSE(table.MayAsk(pair->number(), CallsOf(1)));
  }
  // Those that end make room, refused or not.
  EXPECT_TRUE(table.CallBegan(one.number()).ok());
  table.CallEnded(one.number(), /*was_counted=*/true);
  for (int i = 0; i < 5; ++i) table.CallEnded(one.number(), /*was_counted=*/false);
  EXPECT_FALSE(table.MayAsk(one.number(), CallsOf(3)));
  EXPECT_TRUE(table.MayAsk(one.number(), CallsOf(2)));
}

// Messages behind the first of a call.
TEST(PeerTableTest, AUserHasSoManyMessagesThatNobodyHasTaken) {
  std::string told;
  PeerTable table(0, 8, {16, 16, 16},
                  [&told](absl::string_view, absl::string_view why) { told = std::string(why); });
  const Pair one(&table, 1000);
  const Pair two(&table, 1000);
  const Pair other(&table, 1001);
  Http2Frames::Counts call = CallsOf(1);
  call.later_messages = kMaxLaterMessages / 8 * 7 - 10;
  EXPECT_TRUE(table.MayAsk(one.number(), call));
  AdmittedCall stream(&table, one);
  ASSERT_TRUE(stream.status.ok()) << stream.status;
  call.later_messages = 11;
  EXPECT_FALSE(table.MayAsk(two.number(), call));
  EXPECT_EQ(told, absl::StrCat("its user has ", kMaxLaterMessages / 8 * 7 - 10,
                               " messages that nobody has taken, and sends 11 more; expected at "
                               "most ",
                               kMaxLaterMessages / 8 * 7));
  EXPECT_TRUE(table.MayAsk(other.number(), call));
  // Taken ones make room, and the end of a connection's last call.
  stream.slot.Took(1);
  EXPECT_TRUE(table.MayAsk(two.number(), call));
  EXPECT_FALSE(table.MayAsk(one.number(), call));
  table.CallEnded(two.number(), /*was_counted=*/false);
  table.CallEnded(two.number(), /*was_counted=*/false);
  EXPECT_TRUE(table.MayAsk(one.number(), call));
}

TEST(PeerTableTest, AConnectionThatAsksAndDoesNotReadHasToEnd) {
  std::string told;
  PeerTable table(0, 8, {16, 16, 16}, [&told](absl::string_view tenant, absl::string_view why) {
    told = absl::StrCat(tenant, ": ", why);
  });
  const Pair pair(&table, 1000);
  Http2Frames::Counts ping;
  ping.requests = 1;
  // One that reads may go on.
  for (int i = 0; i < 2000; ++i) EXPECT_TRUE(table.MayAsk(pair.number(), ping)) << i;
  const std::string bytes(1 << 12, 'x');
  while (send(pair.number(), bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL) > 0) {
  }
  int asked = 0;
  while (asked < 2000 && table.MayAsk(pair.number(), ping)) ++asked;
  EXPECT_GE(asked, 200);
  EXPECT_LE(asked, 256);
  EXPECT_EQ(told,
            "uid:1000: it has asked for 257 answers, and was not seen to read; expected at most "
            "256");
}

void Sends(const Pair& pair, const std::string& bytes) {
  EXPECT_EQ(write(pair.client.get(), bytes.data(), bytes.size()),
            static_cast<ssize_t>(bytes.size()));
}
// So many bytes, which gRPC reads. False: it is not given them.
bool Receives(const Pair& pair, size_t size) {
  std::string buffer(16 << 10, '\0');
  iovec part = {&buffer[0], buffer.size()};
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  const ssize_t got = recvmsg(pair.number(), &message, 0);
  if (got == static_cast<ssize_t>(size)) return true;
  EXPECT_EQ(errno, ECONNRESET);
  return false;
}
bool Reads(const Pair& pair, const std::string& bytes) {
  Sends(pair, bytes);
  return Receives(pair, bytes.size());
}

uint32_t StreamOf(int call) { return static_cast<uint32_t>(2 * call + 1); }
// HEADERS of so many calls from this one on.
std::string Headers(int first, int calls) {
  std::string bytes;
  for (int i = first; i < first + calls; ++i) {
    bytes += Frame(kHeaders, kEndHeaders, StreamOf(i), "");
  }
  return bytes;
}
// So many calls on a fresh connection.
bool Reads(const Pair& pair, int calls) {
  return Reads(pair, absl::StrCat(kPreface, Headers(0, calls)));
}
// Its client ends so many of its calls, from this one on.
bool ReadsResets(const Pair& pair, int first, int calls) {
  std::string bytes;
  for (int i = first; i < first + calls; ++i) {
    bytes += Frame(kReset, 0, StreamOf(i), BigEndian(8, 4));
  }
  return Reads(pair, bytes);
}

// Of one of its own services, until its message has come; however long that takes.
TEST(PeerTableTest, ACallThatGrpcDoesNotTellOfCountsWhileItIsOpen) {
  PeerTable table(0, 8, {16, 8, 8, absl::ZeroDuration()});  // 28 of one user
  const Pair one(&table, 1000);
  const Pair two(&table, 1000);
  EXPECT_TRUE(Reads(one, 15));
  EXPECT_TRUE(Reads(one, Headers(15, 1)));
  EXPECT_TRUE(Reads(two, 12));
  PeerTable::Idle idle;
  idle.first_call = kNever;
  idle.next_call = kNever;
  table.EndIdle(idle);
  EXPECT_FALSE(table.MayAsk(two.number(), CallsOf(1)));
  // Those that their client ends nobody tells of: they are gone.
  EXPECT_TRUE(ReadsResets(one, 3, 5));
  table.EndIdle(idle);
  EXPECT_FALSE(table.MayAsk(two.number(), CallsOf(6)));
  EXPECT_TRUE(table.MayAsk(two.number(), CallsOf(5)));
  // And all of a connection that has ended.
  EXPECT_EQ(shutdown(one.client.get(), SHUT_RDWR), 0);
  table.TakeHangups();
  table.EndIdle(idle);
  const Pair three(&table, 1000);
  EXPECT_TRUE(table.MayAsk(three.number(), CallsOf(11)));
}

// Its client has ended them before gRPC could tell of them, and has another one under way.
TEST(PeerTableTest, CallsThatGrpcNeverTellsOfAreForgotten) {
  PeerTable table(0, 8, {16, 8, 8, absl::ZeroDuration()});  // 28 of one user
  const Pair one(&table, 1000);
  EXPECT_TRUE(Reads(one, 1));
  EXPECT_TRUE(table.CallBegan(one.number()).ok());
  for (int first = 1; first < 100; first += 10) {
    EXPECT_TRUE(Reads(one, Headers(first, 10))) << first;
    EXPECT_TRUE(ReadsResets(one, first, 10)) << first;
  }
  // That one is still counted.
  PeerTable::Idle idle;
  idle.first_call = kNever;
  idle.next_call = kNever;
  table.EndIdle(idle);
  const Pair two(&table, 1000);
  EXPECT_TRUE(Reads(one, Headers(101, 4)));
  EXPECT_FALSE(table.MayAsk(two.number(), CallsOf(24)));
  EXPECT_TRUE(table.MayAsk(two.number(), CallsOf(22)));
}

TEST(PeerTableTest, AConnectionThatDeclaresMoreThanTheLongestMessageHasToEnd) {
  std::string told;
  PeerTable table(0, 8, {16, 8, 8}, [&told](absl::string_view tenant, absl::string_view why) {
    told = absl::StrCat(tenant, ": ", why);
  });
  const Pair one(&table, 1000);
  const Pair two(&table, 1000);
  EXPECT_TRUE(Reads(one, 1));
  EXPECT_TRUE(Reads(two, 1));
  // One byte more than 260 KiB; and these.
  const auto declares = [](uint64_t size) {
    return Frame(kData, 0, 1, BigEndian(0, 1) + BigEndian(size, 4));
  };
  EXPECT_FALSE(Reads(one, declares(266241)));
  EXPECT_EQ(told, "uid:1000: it declares a message of 266241 bytes; expected at most 266240");
  EXPECT_TRUE(HungUp(one.client.get()));
  EXPECT_TRUE(Reads(two, declares(266240)));
  EXPECT_FALSE(HungUp(two.client.get()));
}

TEST(PeerTableTest, WhatGrpcReadsIsCounted) {
  PeerTable table(0, 8, {16, 8, 8});
  const Pair one(&table, 1000);
  const Pair two(&table, 1000);
  EXPECT_TRUE(Reads(one, 28));
  EXPECT_FALSE(HungUp(one.client.get()));
  EXPECT_FALSE(Reads(two, 1));
  EXPECT_TRUE(HungUp(two.client.get()));
}

// Of the process, until this object goes.
class DescriptorLimits {
 public:
  explicit DescriptorLimits(rlim_t most) {
    EXPECT_EQ(getrlimit(RLIMIT_NOFILE, &usual_), 0);
    rlimit changed = usual_;
    changed.rlim_cur = most;
    EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &changed), 0);
  }
  ~DescriptorLimits() { EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &usual_), 0); }

 private:
  rlimit usual_ = {};
};

// The system gives the next free one, wherever that is.
TEST(PeerTableTest, NumbersStayInTheirRangeWhereTheLastOneIsTaken) {
  std::unique_ptr<PeerTable> table;
  {
    const DescriptorLimits few(512);
    table = std::make_unique<PeerTable>(0, 8, PeerTable::MaxCalls{16, 8, 8});
  }
  std::vector<Pair> last;
  for (int i = 0; i < 600; ++i) {
    table->TakeHangups();
    while (TooManyUnclosed()) std::this_thread::yield();
    Pair pair(table.get(), 1000);
    ASSERT_TRUE(pair.status.ok()) << pair.status;
    EXPECT_GE(pair.number(), 256);
    ASSERT_LT(pair.number(), 512);
    if (pair.number() == 511) last.push_back(std::move(pair));
  }
  EXPECT_EQ(last.size(), 1u);
}

// However many the process may have: the table keeps a row for each number.
TEST(PeerTableTest, NoMoreNumbersAreUsedThanTheDaemonAsksFor) {
  for (const rlim_t few : {512, 65535, 65536}) {
    EXPECT_EQ(DescriptorsOf(few), static_cast<int>(few));
  }
  for (const rlim_t many : {rlim_t{65537}, rlim_t{1} << 20, (rlim_t{1} << 20) + 2, RLIM_INFINITY}) {
    EXPECT_EQ(DescriptorsOf(many), 65536) << many;
  }
}

TEST(PeerTableTest, WhatIsReadFromANumberThatIsGivenOutAgainIsCounted) {
  std::unique_ptr<PeerTable> made;
  {
    const DescriptorLimits few(512);
    made = std::make_unique<PeerTable>(0, 8, PeerTable::MaxCalls{16, 8, 8});
  }
  PeerTable& table = *made;
  const int first = Pair(&table, 1000).number();
  int numbers = 1;
  for (; numbers < 600; ++numbers) {
    table.TakeHangups();
    while (TooManyUnclosed()) std::this_thread::yield();
    const Pair pair(&table, 1000);
    if (pair.number() != first) continue;
    EXPECT_FALSE(Reads(pair, 29));
    break;
  }
  EXPECT_EQ(numbers, 256);
}

// Whatever its client had opened, and whether it was ended for that or went by itself.
TEST(PeerTableTest, AConnectionThatHasEndedKeepsNoRowsOfStreams) {
  constexpr int kStreams = 768;
  constexpr int kRowBytes = 32;
  constexpr int kConnections = 200;
  PeerTable table(0, 8, {kStreams, 128, 128, absl::ZeroDuration()});  // 896 of one user
  PeerTable::Idle idle;
  idle.first_call = kNever;
  idle.next_call = kNever;
  const HeapUse held;
  for (int i = 0; i < kConnections; ++i) {
    Pair pair(&table, 1000);
    ASSERT_TRUE(pair.status.ok()) << pair.status;
    const bool may = i % 2 == 0;
    EXPECT_EQ(Reads(pair, may ? 896 : 897), may) << i;
    EXPECT_GE(held.bytes(), kStreams * kRowBytes);
    // gRPC closes its descriptor behind the end or before.
    if (i % 3 == 0) pair.server = UniqueFd();
    pair.client = UniqueFd();
    table.TakeHangups();
    table.EndIdle(idle);  // forgets its calls
    ASSERT_EQ(table.open(), 0);
  }
  // Those of the last one may be left; and whose each number is.
  EXPECT_LE(held.bytes(), 2 * kStreams * kRowBytes + kConnections * 512);
}

// Its end is known, and others have come, before gRPC reads what it has sent.
TEST(PeerTableTest, WhatIsReadOfAConnectionThatHasEndedIsCounted) {
  PeerTable table(0, 8, {16, 8, 8});
  Pair one(&table, 1000);
  const std::string bytes = absl::StrCat(kPreface, Headers(0, 29));
  Sends(one, bytes);
  one.client = UniqueFd();
  table.TakeHangups();
  EXPECT_EQ(table.open(), 0);
  const Pair two(&table, 1000);
  EXPECT_FALSE(Receives(one, bytes.size()));
}

// What is before a descriptor is read; and a byte out of band is one like others.
TEST(PeerTableTest, WhatBringsADescriptorIsNotReadAndItsConnectionEnds) {
  for (const int flags : {0, int{MSG_OOB}}) {
    std::string told;
    PeerTable table(0, 8, {16, 8, 8},
                    [&told](absl::string_view, absl::string_view why) { told = std::string(why); });
    Pair one(&table, 1000);
    const std::string bytes = absl::StrCat(kPreface, Headers(0, 2));
    Sends(one, bytes);
    EXPECT_TRUE(Receives(one, bytes.size()));
    LingeringSocket lingering;
    ASSERT_EQ(lingering.SendOver(one.client.get(), "x", flags), 0);
    ASSERT_EQ(shutdown(one.client.get(), SHUT_WR), 0);
    EXPECT_TRUE(IsDoneThough(absl::MakeSpan(&lingering, 1), [&] {
      EXPECT_FALSE(Receives(one, 1));
      EXPECT_FALSE(Receives(one, 1));
    }));
    EXPECT_EQ(told, "it sends descriptors");
    EXPECT_TRUE(HungUp(one.client.get()));
  }
}

// Whether gRPC closes its descriptor behind the end that the table sees, or before; with the table
// itself, too, and where a connection is not let in.
TEST(PeerTableTest, NobodyWaitsForDescriptorsThatAClientHasSent) {
  for (const char* const order : {"gRPC, table", "table, gRPC", "at the end", "never in"}) {
    auto table = std::make_unique<PeerTable>(0, 8, PeerTable::MaxCalls{16, 8, 8});
    LingeringSocket lingering;
    if (order == absl::string_view("never in")) {
      std::vector<Pair> crowd;
      for (int i = 0; i < 7; ++i) crowd.emplace_back(table.get(), 1000);
      int ends[2];
      ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
      const UniqueFd client(ends[0]);
      ASSERT_EQ(lingering.SendOver(client.get()), 0);
      EXPECT_TRUE(IsDoneThough(absl::MakeSpan(&lingering, 1), [&] {
        PeerCredentials peer;
        peer.uid = 1000;
        EXPECT_FALSE(table->Add(ClientSocket(UniqueFd(ends[1])), peer).ok());
      }));
      continue;
    }
    Pair one(table.get(), 1000);
    ASSERT_EQ(lingering.SendOver(one.client.get()), 0);
    EXPECT_TRUE(IsDoneThough(absl::MakeSpan(&lingering, 1), [&] {
      if (order == absl::string_view("gRPC, table")) one.server = UniqueFd();
      one.client = UniqueFd();
      if (order != absl::string_view("at the end")) {
        table->TakeHangups();
        EXPECT_EQ(table->open(), 0);
      }
      one.server = UniqueFd();
      // It looks at what has ended.
      const Pair two(table.get(), 1000);
      table = nullptr;
    })) << order;
  }
}

TEST(PeerTableTest, ACallOfAnUnknownConnectionIsNotAdmitted) {
  PeerTable table(0, 8, {16, 16, 16});
  for (const char* peer : {"fd:1", "ipv4:127.0.0.1:80", ""}) {
    const absl::Status refused = table.Admit(peer).status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kPermissionDenied) << peer;
    EXPECT_EQ(ErrorOf(refused).reason, Reason::kNotAttached) << peer;
  }
}

TEST(PeerTableTest, ItSeesTheEndOfWhatGrpcStillHolds) {
  PeerTable table(0, 8, {16, 16, 16});
  Pair pair(&table, 1000);
  EXPECT_FALSE(HungUp(table.hangups_fd()));
  pair.client = UniqueFd();
  pollfd entry = {table.hangups_fd(), POLLIN, 0};
  EXPECT_EQ(poll(&entry, 1, 20000), 1);
  table.TakeHangups();
  EXPECT_EQ(table.open(), 0);
  entry.revents = 0;
  EXPECT_EQ(poll(&entry, 1, 0), 0);
  // Its calls are still its uid's.
  EXPECT_EQ(table.Resolve(absl::StrCat("fd:", pair.number()))->uid, 1000u);
}

TEST(PeerTableTest, WhatAClientHasHalfEndedIsEndedWhole) {
  PeerTable table(0, 8, {16, 16, 16});
  const Pair pair(&table, 1000);
  const std::string bytes(1 << 16, 'x');
  while (send(pair.number(), bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL) > 0) {
  }
  EXPECT_EQ(errno, EAGAIN);  // where gRPC waits for the client to read
  EXPECT_EQ(shutdown(pair.client.get(), SHUT_WR), 0);
  table.TakeHangups();
  EXPECT_EQ(table.open(), 0);
  EXPECT_LT(send(pair.number(), bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL), 0);
  EXPECT_EQ(errno, EPIPE);
}

TEST(PeerTableTest, WhatIsIdleIsEndedAndWhatIsNotStays) {
  PeerTable table(0, 64, {16, 16, 16});
  PeerTable::Idle idle;
  idle.keeps = [](const PeerCredentials& peer) { return peer.uid == 1001; };
  const Pair silent(&table, 1000);
  const Pair silent_and_attached(&table, 1001);
  const Pair called(&table, 1000);
  EXPECT_TRUE(table.CallBegan(called.number()).ok());
  table.CallEnded(called.number(), /*was_counted=*/true);
  const Pair calling(&table, 1000);
  EXPECT_TRUE(table.CallBegan(calling.number()).ok());
  EXPECT_TRUE(table.CallBegan(calling.number()).ok());
  table.CallEnded(calling.number(), /*was_counted=*/true);
  const Pair attached(&table, 1001);
  EXPECT_TRUE(table.CallBegan(attached.number()).ok());
  table.CallEnded(attached.number(), /*was_counted=*/true);

  idle.first_call = kNever;
  idle.next_call = kNever;
  table.EndIdle(idle);
  table.TakeHangups();
  EXPECT_EQ(table.open(), 5);

  idle.first_call = absl::ZeroDuration();
  table.EndIdle(idle);
  EXPECT_TRUE(HungUp(silent.client.get()));
  EXPECT_TRUE(HungUp(silent_and_attached.client.get()));
  EXPECT_FALSE(HungUp(called.client.get()));
  table.TakeHangups();
  EXPECT_EQ(table.open(), 3);

  idle.next_call = absl::ZeroDuration();
  table.EndIdle(idle);
  EXPECT_TRUE(HungUp(called.client.get()));
  EXPECT_FALSE(HungUp(calling.client.get()));
  EXPECT_FALSE(HungUp(attached.client.get()));
  table.CallEnded(calling.number(), /*was_counted=*/true);
  table.EndIdle(idle);
  EXPECT_TRUE(HungUp(calling.client.get()));

  table.EndAll();
  EXPECT_TRUE(HungUp(attached.client.get()));
  table.TakeHangups();
  EXPECT_EQ(table.open(), 0);
}

TEST(PeerTableTest, WhoeverIsAskedForIdleOnesMayAskTheTable) {
  PeerTable table(0, 8, {16, 16, 16});
  const Pair attached(&table, 1000);
  const Pair called(&table, 1001);
  for (const Pair* pair : {&attached, &called}) {
    EXPECT_TRUE(table.CallBegan(pair->number()).ok());
    table.CallEnded(pair->number(), /*was_counted=*/true);
  }
  PeerTable::Idle idle;
  // A call may begin meanwhile, too.
  idle.keeps = [&](const PeerCredentials& peer) {
    if (peer.uid == 1001) {
      EXPECT_TRUE(table.CallBegan(called.number()).ok());
    }
    return peer.uid == 1000 && table.open() == 2;
  };
  table.EndIdle(idle);
  EXPECT_FALSE(HungUp(attached.client.get()));
  EXPECT_FALSE(HungUp(called.client.get()));
  table.CallEnded(called.number(), /*was_counted=*/true);
  idle.keeps = [](const PeerCredentials&) { return false; };
  table.EndIdle(idle);
  EXPECT_TRUE(HungUp(called.client.get()));
}

}  // namespace
}  // namespace chorus::server
