// One client that asks for too much, beside two honest ranks: it is refused, they go on with right
// results, the daemon holds no more than it may, and gets back what it gave.
//
// No times are checked, but for the patience with which everything is waited for.
#include <signal.h>

#include <cstdint>
#include <iostream>
#include <memory>
#include <ostream>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "benchmarks/process.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/fault/processes.h"

namespace chorus {
namespace hostile {
namespace {

constexpr int64_t kMemoryLimit = int64_t{96} << 20;
constexpr int64_t kShare = kMemoryLimit / 8 * 7;  // of one tenant
// What the daemon may take beside what it is told to hold.
constexpr int64_t kOwnBytes = int64_t{256} << 20;

struct Case {
  const char* attack;
  const char* code;   // with which it is refused at last
  int64_t done_from;  // how often it is not refused
  int64_t done_to;
  int64_t kept = 0;  // of its results: a tenant keeps arenas for its next ones while there is room
};
std::ostream& operator<<(std::ostream& os, const Case& c) { return os << c.attack; }

constexpr Case kCases[] = {
    {"zeros", "RESOURCE_EXHAUSTED", 0, 0},
    {"quadratic", "RESOURCE_EXHAUSTED", 0, 0},
    {"graphs", "RESOURCE_EXHAUSTED", 1, 999},
    {"pages", "RESOURCE_EXHAUSTED", 10, kShare >> 22},
    {"gaps", "INVALID_ARGUMENT", 1998, 1998},
    {"names", "INVALID_ARGUMENT", 60000, 60000},
    {"sessions", "RESOURCE_EXHAUSTED", 10, 35},
    {"worlds", "RESOURCE_EXHAUSTED", 40, 56},
    {"planning", "OK", 4, 4},
    {"sizes", "OK", 40, 40},
    {"steps", "OK", 20, 20},
    {"strides", "OK", 8, 8, int64_t{32} << 20},
    {"flood", "OK", 20000, 20000},
    {"listing", "OK", 100, 100},
};

class HostileTest : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    fault::Daemon::Options options;
    options.socket = scratch_.path() + "/chorusd";
    options.log = scratch_.path() + "/chorusd.log";
    options.clock = scratch_.path() + "/clock";
    options.flags = {"--host_devices=4", absl::StrCat("--memory_limit_bytes=", kMemoryLimit),
                     "--max_sessions=40", "--max_worlds=64"};
    absl::StatusOr<std::unique_ptr<fault::Daemon>> daemon = fault::Daemon::Start(options);
    ASSERT_TRUE(daemon.ok()) << daemon.status() << "\n" << bench::FileText(options.log);
    daemon_ = *std::move(daemon);
    absl::StatusOr<std::unique_ptr<fault::Trainer>> honest =
        fault::Trainer::Start(scratch_.path() + "/honest.log");
    ASSERT_TRUE(honest.ok()) << honest.status();
    honest_ = *std::move(honest);
    ASSERT_TRUE(honest_->Ask(absl::StrCat("pair ", daemon_->address(), " honest")).ok);
    ExpectHonestOnesGoOn();
  }

  void ExpectHonestOnesGoOn() {
    const fault::Reply reply = honest_->Ask("pair-steps 3");
    EXPECT_TRUE(reply.ok) << reply;
  }
  // More than a little: the honest ones' own goes up and down.
  void ExpectNothingLeft(int64_t before) {
    const absl::Status back = fault::AskUntil([&]() -> absl::StatusOr<bool> {
      const auto stats = daemon_->Stats();
      if (!stats.ok()) return stats.status();
      return stats->memory_used_bytes() <= before + (1 << 20);
    });
    EXPECT_TRUE(back.ok()) << back;
  }

  bench::ScratchDirectory scratch_;
  std::unique_ptr<fault::Daemon> daemon_;
  std::unique_ptr<fault::Trainer> honest_;
};

TEST_P(HostileTest, AsksForTooMuch) {
  const auto before = daemon_->Stats();
  ASSERT_TRUE(before.ok()) << before.status();
  const std::string log = scratch_.path() + "/attack.log";
  bench::Process::Options options;
  options.log = log;
  absl::StatusOr<bench::Process> attacker = bench::Process::Start(
      {"tests/hostile/attack", daemon_->address(), GetParam().attack}, options);
  ASSERT_TRUE(attacker.ok()) << attacker.status();
  const absl::Status told = fault::AskUntil([&]() -> absl::StatusOr<bool> {
    ExpectHonestOnesGoOn();
    return absl::EndsWith(bench::FileText(log), "\n");
  });
  const std::string report = bench::FileText(log);
  std::cout << GetParam().attack << ": " << report;
  ASSERT_TRUE(told.ok()) << told << "\n" << bench::FileText(scratch_.path() + "/chorusd.log");

  // It still has what it got.
  ExpectHonestOnesGoOn();
  const auto during = daemon_->Stats();
  ASSERT_TRUE(during.ok()) << during.status();
  EXPECT_LE(during->memory_used_bytes(), kShare);
  const absl::StatusOr<int64_t> own = bench::AnonymousBytesOf(daemon_->pid());
  ASSERT_TRUE(own.ok()) << own.status();
  std::cout << GetParam().attack << ": memory_used_bytes=" << during->memory_used_bytes()
            << " own=" << *own << std::endl;
  if (!bench::kSanitized) {
    EXPECT_LE(*own, kMemoryLimit + kOwnBytes);
  }
  const auto word = [&report](absl::string_view name) {
    const std::string::size_type at = report.find(absl::StrCat(name, "="));
    if (at == std::string::npos) return std::string();
    return std::string(*absl::StrSplit(report.substr(at + name.size() + 1), ' ').begin());
  };
  EXPECT_EQ(word("code"), GetParam().code) << report;
  EXPECT_GE(std::atoll(word("done").c_str()), GetParam().done_from) << report;
  EXPECT_LE(std::atoll(word("done").c_str()), GetParam().done_to) << report;

  attacker->Signal(SIGKILL);
  ExpectNothingLeft(before->memory_used_bytes() + GetParam().kept);
  const fault::Reply stopped = honest_->Ask("pair-stop");
  EXPECT_TRUE(stopped.ok) << stopped;
  EXPECT_GT(stopped.number("done"), 0);
  EXPECT_TRUE(daemon_->Lives());
}

INSTANTIATE_TEST_SUITE_P(Attacks, HostileTest, ::testing::ValuesIn(kCases),
                         [](const ::testing::TestParamInfo<Case>& info) {
                           return std::string(info.param.attack);
                         });

}  // namespace
}  // namespace hostile
}  // namespace chorus
