// Random programs with faults: ranks stay in line, or are told.
//
// Every result that is handed out is right for its number or an error; and from the step after the
// last that any rank had begun before it heard of the last fault on, every result is right on every
// rank. Ranks are threads of this process without a transport, on host and sim; or processes, over
// the ring to a chorusd of either kind.
// --programs=N, --processes=N and --first_seed=S choose the programs.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "benchmarks/daemon.h"
#include "benchmarks/process.h"
#include "chorus/chorus.h"
#include "core/base/error.h"
#include "core/base/unique_fd.h"
#include "gtest/gtest.h"
#include "tests/conformance/conformance.h"
#include "tests/conformance/direct_cluster.h"
#include "tests/conformance/job.h"
#include "tests/conformance/line_program.h"
#include "tests/conformance/messages.h"

namespace chorus {
namespace conformance {
namespace {

constexpr int kMostRanks = 4;
// Nobody may be left waiting: it would be an error that no rule explains.
constexpr std::chrono::seconds kAgreeTimeout(60);

uint64_t first_seed = 1;
int programs = 300;
int process_programs = 40;
std::string self;

struct Sums {
  int64_t right = 0;
  int64_t right_afterwards = 0;
  int64_t refused = 0;
};

void Check(uint64_t seed, const LineProgram& p, std::vector<LineOutcome> outcomes, Sums* sums) {
  const int trouble = LastStepOfTrouble(p, outcomes);
  SCOPED_TRACE(absl::StrCat("--first_seed=", seed, "; trouble until step ", trouble, " of ",
                            p.steps, "\n", Text(p)));
  ASSERT_LT(trouble, p.steps);
  for (int rank = 0; rank < p.ranks; ++rank) {
    LineOutcome& outcome = outcomes[static_cast<size_t>(rank)];
    for (const auto& error : outcome.refused) {
      if (error.first > trouble) outcome.wrong += error.second;
    }
    ASSERT_EQ(outcome.wrong, "");
    const int64_t afterwards = std::count_if(outcome.right.begin(), outcome.right.end(),
                                             [trouble](int step) { return step > trouble; });
    ASSERT_EQ(afterwards, (p.steps - trouble) * ResultsOfAStep(p, rank)) << "rank " << rank;
    sums->right += static_cast<int64_t>(outcome.right.size());
    sums->refused += static_cast<int64_t>(outcome.refused.size());
    sums->right_afterwards += afterwards;
  }
}

void Report(const Sums& sums) {
  std::cout << sums.right << " right results, " << sums.right_afterwards
            << " of them when all had heard; " << sums.refused << " refused" << std::endl;
  EXPECT_GT(sums.refused, 0);
  EXPECT_GT(sums.right_afterwards, sums.right / 3);
}

void PrintSeeds(int count) {
  std::cout << "seeds " << first_seed << " to " << first_seed + static_cast<uint64_t>(count) - 1
            << std::endl;
}

TEST(LineTest, WhateverRanksDoWrongTheirResultsAreRightOrErrorsAndRightAgainAfterwards) {
  PrintSeeds(programs);
  Sums sums;
  for (int i = 0; i < programs; ++i) {
    const uint64_t seed = first_seed + static_cast<uint64_t>(i);
    const LineProgram p = MakeLineProgram(seed);
    ConformanceParam param;
    param.name = p.sim ? "Sim" : "Host";
    param.open = DirectCluster(p.sim ? "sim" : "host");
    JobOptions options;
    options.ranks = p.ranks;
    options.agree_timeout = kAgreeTimeout;
    Job job(param, options);
    std::vector<LineOutcome> outcomes(static_cast<size_t>(p.ranks));
    job.Run(
        [&](int rank, World& world) { outcomes[static_cast<size_t>(rank)] = RunRank(p, world); });
    Check(seed, p, std::move(outcomes), &sums);
    if (HasFatalFailure()) return;
    if (i % 1000 == 999) std::cout << i + 1 << " programs" << std::endl;
  }
  Report(sums);
}

// --- Processes ----------------------------------------------------------------------------------

// A rank's process: runs its part of what it is told, until the input ends.
int Serve(int in_fd, int out_fd) {
  Session session;
  std::string opened;
  std::string task;
  absl::StatusOr<World> joined = absl::UnknownError("none yet");
  while (ReadMessage(in_fd, absl::InfiniteFuture(), &task)) {
    // Of the program before: the others may have needed it until they had ended.
    if (joined.ok()) joined->Leave().IgnoreError();
    std::string address;
    uint64_t seed = 0;
    WorldOptions join;
    std::istringstream(task) >> address >> join.name >> join.rank >> seed;
    const LineProgram p = MakeLineProgram(seed);
    if (opened != address) {
      session = Session();
      SessionOptions options;
      options.address = address;
      options.transport = Transport::kRing;
      options.devices = {join.rank};
      options.open_timeout = kWaitTimeout;
      options.wait_timeout = kWaitTimeout;
      options.label = "conformance";
      absl::StatusOr<Session> open = Session::Open(options);
      if (!open.ok()) {
        std::cerr << "cannot open a session: " << open.status() << std::endl;
        return 3;
      }
      session = *std::move(open);
      opened = address;
    }
    join.size = p.ranks;
    join.agree_timeout = kAgreeTimeout;
    joined = session.Join(join);
    if (!joined.ok()) {
      std::cerr << "rank " << join.rank << " cannot join: " << joined.status() << std::endl;
      return 4;
    }
    if (!WriteMessage(out_fd, ToText(RunRank(p, *joined)))) return 5;
  }
  return 0;
}

// The processes of all ranks and the daemon that they share.
class Processes {
 public:
  absl::Status Start(bool sim) {
    CHORUS_ASSIGN_OR_RETURN(daemon_,
                            bench::Daemon::Start("server/chorusd", scratch_,
                                                 {absl::StrCat("--backend=", sim ? "sim" : "host"),
                                                  absl::StrCat("--sim_seed=", TestSeed()),
                                                  absl::StrCat("--host_devices=", kMostRanks)}));
    for (int rank = 0; rank < kMostRanks; ++rank) {
      int down[2];
      int up[2];
      if (pipe2(down, O_CLOEXEC) != 0 || pipe2(up, O_CLOEXEC) != 0) {
        return absl::InternalError("pipe");
      }
      ranks_.emplace_back();
      ranks_.back().to.Reset(down[1]);
      ranks_.back().from.Reset(up[0]);
      const UniqueFd in(down[0]);
      const UniqueFd out(up[1]);
      bench::Process::Options options;
      options.keep_fds = {in.get(), out.get()};
      CHORUS_ASSIGN_OR_RETURN(
          ranks_.back().process,
          bench::Process::Start({self, absl::StrCat("--serve=", in.get(), ",", out.get())},
                                options));
    }
    return absl::OkStatus();
  }

  absl::StatusOr<std::vector<LineOutcome>> Run(uint64_t seed, const LineProgram& p) {
    const std::string world = absl::StrCat("line-", ++worlds_);
    for (int rank = 0; rank < p.ranks; ++rank) {
      if (!WriteMessage(ranks_[static_cast<size_t>(rank)].to.get(),
                        absl::StrCat(daemon_->address(), " ", world, " ", rank, " ", seed))) {
        return absl::UnavailableError(absl::StrCat("rank ", rank, "'s process has ended"));
      }
    }
    const absl::Time deadline = absl::Now() + absl::Minutes(5);
    std::vector<LineOutcome> outcomes;
    for (int rank = 0; rank < p.ranks; ++rank) {
      std::string text;
      if (!ReadMessage(ranks_[static_cast<size_t>(rank)].from.get(), deadline, &text)) {
        return absl::DeadlineExceededError(
            absl::StrCat("rank ", rank, "'s process hangs or has ended"));
      }
      CHORUS_ASSIGN_OR_RETURN(LineOutcome outcome, LineOutcomeOf(text));
      outcomes.push_back(std::move(outcome));
    }
    return outcomes;
  }

 private:
  struct Rank {
    bench::Process process;
    UniqueFd to;
    UniqueFd from;
  };
  bench::ScratchDirectory scratch_;
  std::unique_ptr<bench::Daemon> daemon_;
  std::vector<Rank> ranks_;
  int worlds_ = 0;
};

TEST(LineTest, SoItIsWhereRanksAreProcessesOverTheRing) {
  PrintSeeds(process_programs);
  std::unique_ptr<Processes> kinds[2];  // host, sim
  Sums sums;
  for (int i = 0; i < process_programs; ++i) {
    const uint64_t seed = first_seed + static_cast<uint64_t>(i);
    const LineProgram p = MakeLineProgram(seed);
    std::unique_ptr<Processes>& processes = kinds[p.sim ? 1 : 0];
    if (processes == nullptr) {
      processes = std::make_unique<Processes>();
      const absl::Status started = processes->Start(p.sim);
      ASSERT_TRUE(started.ok()) << started;
    }
    absl::StatusOr<std::vector<LineOutcome>> outcomes = processes->Run(seed, p);
    ASSERT_TRUE(outcomes.ok()) << "--first_seed=" << seed << ": " << outcomes.status();
    Check(seed, p, *std::move(outcomes), &sums);
    if (HasFatalFailure()) return;
  }
  Report(sums);
}

}  // namespace
}  // namespace conformance
}  // namespace chorus

int main(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    int in = -1;
    int out = -1;
    if (std::sscanf(argv[i], "--serve=%d,%d", &in, &out) == 2) {
      return chorus::conformance::Serve(in, out);
    }
  }
  ::testing::InitGoogleTest(&argc, argv);
  chorus::conformance::self = argv[0];
  if (std::getenv("CHORUS_LONG") != nullptr) {
    chorus::conformance::programs = 10000;
    chorus::conformance::process_programs = 200;
  }
  for (int i = 1; i < argc; ++i) {
    if (std::strncmp(argv[i], "--programs=", 11) == 0) {
      chorus::conformance::programs = std::atoi(argv[i] + 11);
    }
    if (std::strncmp(argv[i], "--processes=", 12) == 0) {
      chorus::conformance::process_programs = std::atoi(argv[i] + 12);
    }
    if (std::strncmp(argv[i], "--first_seed=", 13) == 0) {
      chorus::conformance::first_seed = std::strtoull(argv[i] + 13, nullptr, 10);
    }
  }
  return RUN_ALL_TESTS();
}
