// The program is its own helper: with three arguments it is one, else it runs the tests.
#include "benchmarks/helper.h"

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "benchmarks/process.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace chorus {
namespace bench {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

Outcome Echo(int index, const Task& task) {
  Outcome outcome;
  if (task.op == "fail" && index == task.number) {
    outcome.status = absl::DataLossError("element 7: expected 3, got 4");
  }
  if (task.op == "die" && index == task.number) _exit(3);
  outcome.start_ns = 100 + index;
  outcome.end_ns = 200 + 10 * index;
  outcome.cpu_ns = task.bytes;
  outcome.text = absl::StrCat(task.text, index);
  for (int64_t i = 0; i < task.iterations; ++i) outcome.samples.push_back(index + 0.5);
  return outcome;
}

class HelperTest : public testing::Test {
 protected:
  void Start(int count) {
    auto group = HelperGroup::Create(scratch_, "echo", count);
    ASSERT_TRUE(group.ok()) << group.status();
    group_ = std::move(*group);
    for (int i = 0; i < count; ++i) StartOne(i);
    ASSERT_TRUE(group_->AwaitHellos().ok());
  }
  void StartOne(int index) {
    auto process =
        Process::Start({"/proc/self/exe", "helper", group_->path(), absl::StrCat(index)}, {});
    ASSERT_TRUE(process.ok()) << process.status();
    group_->Own(std::move(*process));
  }

  ScratchDirectory scratch_;
  std::unique_ptr<HelperGroup> group_;
};

TEST_F(HelperTest, EveryHelperHandlesTheTask) {
  Start(3);
  Task task;
  task.op = "echo";
  task.bytes = int64_t{1} << 40;
  task.iterations = 2;
  task.text = "rank ";
  auto outcomes = group_->Run(task);
  ASSERT_TRUE(outcomes.ok()) << outcomes.status();
  ASSERT_EQ(outcomes->size(), 3u);
  EXPECT_EQ((*outcomes)[2].text, "rank 2");
  EXPECT_EQ((*outcomes)[2].cpu_ns, int64_t{1} << 40);
  EXPECT_THAT((*outcomes)[1].samples, ElementsAre(1.5, 1.5));
  EXPECT_EQ(WallNanos(*outcomes), 220 - 100);
}

TEST_F(HelperTest, AWrongResultNamesTheHelperAndTheOthersGoOn) {
  Start(2);
  Task task;
  task.op = "fail";
  task.number = 1;
  const absl::Status status = group_->Run(task).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(status.message(), "fail, helper 1: element 7: expected 3, got 4");
  task.op = "echo";
  EXPECT_TRUE(group_->Run(task).ok());
}

TEST_F(HelperTest, ADeadHelperIsNamedAndCanBeReplaced) {
  Start(2);
  Task task;
  task.op = "die";
  task.number = 0;
  const absl::Status status = group_->Run(task).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()), HasSubstr("helper 0"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("exit status is 3"));
  task.op = "echo";
  // The other one's outcome of the failed task is still on its way.
  ASSERT_TRUE(group_->Receive(1).ok());
  group_->Kill(0);
  EXPECT_EQ(group_->pid(0), -1);
  StartOne(0);
  ASSERT_TRUE(group_->AwaitHellos().ok());
  EXPECT_TRUE(group_->Run(task).ok());
}

TEST_F(HelperTest, AHelperThatCannotStartIsReported) {
  auto group = HelperGroup::Create(scratch_, "none", 1);
  ASSERT_TRUE(group.ok());
  auto process = Process::Start({"false"}, {});
  ASSERT_TRUE(process.ok());
  (*group)->Own(std::move(*process));
  EXPECT_EQ((*group)->AwaitHellos().code(), absl::StatusCode::kUnavailable);
}

TEST(GroupSamplesTest, AnIterationLastsUntilTheLastOneHasIt) {
  std::vector<Outcome> outcomes(3);
  outcomes[0].start_ns = 1000;
  outcomes[0].samples = {500, 10, 490};  // at 1500, 1510, 2000
  outcomes[1].start_ns = 1200;
  outcomes[1].samples = {10, 790, 10};  // at 1210, 2000, 2010
  EXPECT_THAT(GroupSamples(outcomes), ElementsAre(300, 500, 10));
  EXPECT_TRUE(GroupSamples({}).empty());
}

TEST(ProcessTest, SaysHowItEnded) {
  auto process = Process::Start({"sh", "-c", "exit 5"}, {});
  ASSERT_TRUE(process.ok());
  EXPECT_EQ(*process->Wait(int64_t{20} * 1000000000), 5);
  EXPECT_FALSE(process->running());
  process = Process::Start({"sleep", "1000"}, {});
  ASSERT_TRUE(process.ok());
  EXPECT_EQ(process->Wait(1000000).status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_TRUE(CpuNanosOf(process->pid()).ok());
  process->Stop();
  EXPECT_THAT(FileText(absl::StrCat("/proc/", process->pid(), "/stat")), HasSubstr(" T "));
  process->Signal(SIGCONT);
  process->Signal(SIGTERM);
  EXPECT_EQ(*process->Wait(int64_t{20} * 1000000000), 128 + SIGTERM);
  EXPECT_EQ(Process::Start({"no-such-program-at-all"}, {}).status().code(),
            absl::StatusCode::kNotFound);
}

TEST(ProcessTest, AForkKeepsOnlyTheDescriptorsThatItIsGiven) {
  int kept[2];
  int closed[2];
  ASSERT_EQ(pipe(kept), 0);
  ASSERT_EQ(pipe(closed), 0);
  const auto is_open = [](int fd) { return fcntl(fd, F_GETFD) >= 0; };
  auto process = Process::Fork(
      [&] {
        if (is_open(closed[0]) || is_open(closed[1])) return 1;
        return is_open(kept[0]) && is_open(kept[1]) ? 42 : 2;
      },
      {kept[1], kept[0]});
  ASSERT_TRUE(process.ok());
  EXPECT_EQ(*process->Wait(int64_t{20} * 1000000000), 42);
  for (const int fd : {kept[0], kept[1], closed[0], closed[1]}) close(fd);
}

TEST(ProcessTest, OutputGoesToTheLogAndTheScratchDirectoryGoes) {
  std::string path;
  {
    const ScratchDirectory scratch;
    path = scratch.path();
    Process::Options options;
    options.log = scratch.path() + "/log";
    options.env = {"GREETING=hello"};
    auto process = Process::Start({"sh", "-c", "echo $GREETING; echo there >&2"}, options);
    ASSERT_TRUE(process.ok());
    EXPECT_EQ(*process->Wait(int64_t{20} * 1000000000), 0);
    EXPECT_EQ(FileText(options.log), "hello\nthere\n");
  }
  EXPECT_NE(access(path.c_str(), F_OK), 0);
}

}  // namespace
}  // namespace bench
}  // namespace chorus

int main(int argc, char** argv) {
  if (argc == 4 && std::string(argv[1]) == "helper") {
    const int index = std::atoi(argv[3]);
    return chorus::bench::RunHelper(argv[2], index, [index](const chorus::bench::Task& task) {
      return chorus::bench::Echo(index, task);
    });
  }
  testing::InitGoogleMock(&argc, argv);
  return RUN_ALL_TESTS();
}
