// Runs random programs in all ways and compares what comes of them:
//
//   random_programs --seed=1 --programs=1000 [--ways=direct] [--shrink=300] [--keep_going]
//
// Prints each program that fails, as small as it gets, and a command that runs it again. What was
// shrunk is run again with --file. The exit status is not 0 if any failed.
#include <chrono>
#include <fstream>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "tests/random/generate.h"
#include "tests/random/search.h"
#include "tests/random/ways.h"

ABSL_FLAG(uint64_t, seed, 1, "Seed of the first program; the next ones count on from it.");
ABSL_FLAG(int, programs, 1, "How many programs.");
ABSL_FLAG(absl::Duration, limit, absl::InfiniteDuration(),
          "No other program is begun when this time is over.");
ABSL_FLAG(std::string, file, "", "Runs the program that is written in this file instead.");
ABSL_FLAG(std::string, ways, "", "Only ways whose names contain this, and the first.");
ABSL_FLAG(int, shrink, 400, "How many smaller programs may be tried for one that fails; 0: none.");
ABSL_FLAG(int, orders, 3, "Gradients of this order at most.");
ABSL_FLAG(std::string, without, "", "No ops whose names contain this.");
ABSL_FLAG(bool, directly, false,
          "Ranks reach what others differentiate without broadcasts whose root they are not.");
ABSL_FLAG(bool, keep_going, false, "Goes on after a program that failed.");
ABSL_FLAG(bool, print, false, "Prints the programs and runs nothing.");
ABSL_FLAG(std::string, save, "", "A directory that gets a file of each program that failed.");
ABSL_FLAG(absl::Duration, patience, absl::Seconds(20), "How late a rank may be.");
ABSL_FLAG(std::string, chorusd, "server/chorusd", "The program chorusd, for ways with processes.");
ABSL_FLAG(std::string, serve, "", "Internal: a trainer's process, IN,OUT descriptors.");

namespace chorus {
namespace random_programs {
namespace {

int Main(const char* self) {
  const std::string serve = absl::GetFlag(FLAGS_serve);
  if (!serve.empty()) {
    const std::vector<std::string> fds = absl::StrSplit(serve, ',');
    int in = -1;
    int out = -1;
    if (fds.size() != 2 || !absl::SimpleAtoi(fds[0], &in) || !absl::SimpleAtoi(fds[1], &out)) {
      return 2;
    }
    return Serve(in, out);
  }
  std::vector<Program> given;
  if (!absl::GetFlag(FLAGS_file).empty()) {
    std::ifstream in(absl::GetFlag(FLAGS_file));
    std::stringstream text;
    text << in.rdbuf();
    const absl::StatusOr<Program> program = FromText(text.str());
    if (!program.ok()) {
      std::cerr << program.status() << std::endl;
      return 2;
    }
    given.push_back(*program);
  }
  RunnerOptions options;
  options.seed = absl::GetFlag(FLAGS_seed);
  options.patience = absl::ToChronoNanoseconds(absl::GetFlag(FLAGS_patience));
  options.trainer = self;
  options.daemon = absl::GetFlag(FLAGS_chorusd);
  Runner runner(options);
  GeneratorOptions generator;
  generator.orders = absl::GetFlag(FLAGS_orders);
  generator.without = absl::GetFlag(FLAGS_without);
  generator.directly = absl::GetFlag(FLAGS_directly);
  const std::vector<Way> ways = WaysNamed(absl::GetFlag(FLAGS_ways));
  Counts counts;
  int failed = 0;
  const int programs = given.empty() ? absl::GetFlag(FLAGS_programs) : 1;
  const absl::Time end = absl::Now() + absl::GetFlag(FLAGS_limit);
  for (int i = 0; i < programs && (i == 0 || absl::Now() < end); ++i) {
    const uint64_t seed = absl::GetFlag(FLAGS_seed) + static_cast<uint64_t>(i);
    const Program program = given.empty() ? Generate(seed, generator) : given[0];
    if (absl::GetFlag(FLAGS_print)) {
      std::cout << Lines(program) << std::endl;
      continue;
    }
    if (i > 0 && i % 500 == 0) {
      std::cout << "before seed " << seed << ": " << CountsText(counts) << "; " << failed
                << " failed" << std::endl;
    }
    const Finding finding = Test(program, ways, &runner, &counts);
    if (!finding.found()) continue;
    ++failed;
    std::cout << "seed " << program.seed << ": FAILED in " << finding.way << ": " << finding.text
              << std::endl;
    Program least = program;
    if (absl::GetFlag(FLAGS_shrink) > 0) {
      least = Shrink(program, finding, &runner, absl::GetFlag(FLAGS_shrink));
      Counts again;
      const Finding left = Test(least, WaysFor(finding.way), &runner, &again);
      std::cout << Lines(least) << "// " << left.way << ": " << left.text << std::endl;
    }
    const std::string directory = absl::GetFlag(FLAGS_save);
    if (!directory.empty()) {
      std::ofstream(absl::StrCat(directory, "/", program.seed, ".txt")) << ToText(least);
    }
    std::cout << "again: random_programs --seed=" << program.seed << " --ways=" << finding.way
              << "\n"
              << std::endl;
    if (!absl::GetFlag(FLAGS_keep_going)) break;
  }
  std::cout << CountsText(counts) << "; " << failed << " failed" << std::endl;
  return failed > 0 ? 1 : 0;
}

}  // namespace
}  // namespace random_programs
}  // namespace chorus

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  return chorus::random_programs::Main(argv[0]);
}
