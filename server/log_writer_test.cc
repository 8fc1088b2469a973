#include "server/log_writer.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "core/base/unique_fd.h"
#include "gmock/gmock.h"
#include "grpc/support/log.h"
#include "gtest/gtest.h"
#include "server/line_budget.h"

namespace chorus::server {
namespace {

using testing::EndsWith;
using testing::HasSubstr;
using testing::StartsWith;

class LogWriterTest : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    signal(SIGPIPE, SIG_IGN);
    google::InitGoogleLogging("log_writer_test");
  }
  LogWriterTest() {
    int ends[2];
    EXPECT_EQ(pipe2(ends, O_CLOEXEC), 0);
    read_ = UniqueFd(ends[0]);
    write_ = UniqueFd(ends[1]);
  }

  // Fills the pipe, which others would wait for then, and says how much it took.
  size_t Fill() {
    // Opened again: the flag is not the writer's.
    const UniqueFd filler(
        open(absl::StrCat("/proc/self/fd/", write_.get()).c_str(), O_WRONLY | O_NONBLOCK));
    EXPECT_TRUE(filler.valid());
    size_t size = 0;
    for (const size_t part : {4096, 1}) {
      const std::string text(part, '-');
      ssize_t written;
      while ((written = write(filler.get(), text.data(), text.size())) > 0) {
        size += static_cast<size_t>(written);
      }
    }
    return size;
  }
  std::string Read(size_t size) {
    std::string text(size, '\0');
    for (size_t at = 0; at < size;) {
      pollfd entry = {read_.get(), POLLIN, 0};
      const ssize_t got = poll(&entry, 1, 20000) > 0 ? read(read_.get(), &text[at], size - at) : 0;
      if (got <= 0) return text.substr(0, at);
      at += static_cast<size_t>(got);
    }
    return text;
  }
  std::string ReadLine() {
    for (;;) {
      const size_t end = unread_.find('\n');
      if (end != std::string::npos) {
        const std::string line = unread_.substr(0, end);
        unread_.erase(0, end + 1);
        return line;
      }
      pollfd entry = {read_.get(), POLLIN, 0};
      char part[1000];
      const ssize_t got = poll(&entry, 1, 20000) > 0 ? read(read_.get(), part, sizeof(part)) : 0;
      if (got <= 0) {
        ADD_FAILURE() << "no more after \"" << unread_ << "\"";
        return std::exchange(unread_, {});
      }
      unread_.append(part, static_cast<size_t>(got));
    }
  }

  // Without waiting for one.
  bool HasLine() {
    pollfd entry = {read_.get(), POLLIN, 0};
    return unread_.find('\n') != std::string::npos || poll(&entry, 1, 0) > 0;
  }

  std::string unread_;  // what ReadLine has read of the next lines
  UniqueFd read_;
  UniqueFd write_;
};

TEST_F(LogWriterTest, WritesLinesAsGlogDoes) {
  LogWriter log(write_.get());
  LOG(INFO) << "first";
  LOG(ERROR) << "second";
  std::string line = ReadLine();
  EXPECT_THAT(line, StartsWith("I"));
  EXPECT_THAT(line, HasSubstr("log_writer_test.cc:"));
  EXPECT_THAT(line, EndsWith("] first"));
  line = ReadLine();
  EXPECT_THAT(line, StartsWith("E"));
  EXPECT_THAT(line, EndsWith("] second"));
}

TEST_F(LogWriterTest, ALineOfGrpcsGoesTheSameWay) {
  LogWriter log(write_.get());
  gpr_set_log_verbosity(GPR_LOG_SEVERITY_ERROR);  // as grpc_init does
  gpr_log(GPR_ERROR, "%s", "of gRPC");
  EXPECT_THAT(ReadLine(), EndsWith("] of gRPC"));
}

// A client that connects makes gRPC say as much as it likes.
TEST_F(LogWriterTest, GrpcsLinesHaveARateAndALength) {
  LogWriter log(write_.get());
  gpr_set_log_verbosity(GPR_LOG_SEVERITY_ERROR);
  const std::string longer(LogWriter::kMaxClientLineBytes, 'x');
  gpr_log(GPR_ERROR, "value=%s", longer.c_str());
  std::string line = ReadLine();
  EXPECT_THAT(line, EndsWith("xxx..."));
  EXPECT_LT(line.size(), longer.size() + 100);
  constexpr int kLines = 2000;  // all of which have room in the queue
  const std::string value(400, 'y');
  for (int i = 0; i < kLines; ++i) {
    gpr_log(GPR_ERROR, "value=%s: no assertion failed", value.c_str());
  }
  LOG(INFO) << "of the daemon";
  gpr_log(GPR_ERROR, "assertion failed: %s", longer.c_str());
  int lines = 0;
  for (line = ReadLine(); absl::EndsWith(line, ": no assertion failed"); line = ReadLine()) ++lines;
  EXPECT_GE(lines, LineBudget::kLinesPerSecond - 1);
  EXPECT_LT(lines, kLines);
  EXPECT_THAT(line, EndsWith("] of the daemon"));
  EXPECT_THAT(ReadLine(), EndsWith("assertion failed: " + longer)) << "why it ends is said whole";
}

TEST_F(LogWriterTest, WhatGrpcCouldNotSayIsCounted) {
  LogWriter log(write_.get());
  gpr_set_log_verbosity(GPR_LOG_SEVERITY_ERROR);
  const std::string counted = "more lines of gRPC were too many for the log";
  std::string line;
  // The count comes before the first line of the next second.
  for (int written = 0; written < 1000 && !absl::EndsWith(line, counted);) {
    gpr_log(GPR_ERROR, "%s", "again");
    if (!HasLine()) continue;
    line = ReadLine();
    ++written;
  }
  EXPECT_THAT(line, EndsWith(counted));
  EXPECT_THAT(ReadLine(), EndsWith("] again"));
}

TEST_F(LogWriterTest, WhatAClientHasChosenIsCutWhereItIsLong) {
  LogWriter log(write_.get());
  const std::string longest(LogWriter::kMaxClientLineBytes, 'x');
  log.Say(google::GLOG_WARNING, "uid:1", longest);
  EXPECT_THAT(ReadLine(), EndsWith("] " + longest));
  log.Say(google::GLOG_WARNING, "uid:1", longest + "y");
  EXPECT_THAT(ReadLine(), EndsWith("] " + longest.substr(3) + "..."));
  LOG(INFO) << longest << "y";
  EXPECT_THAT(ReadLine(), EndsWith("] " + longest + "y")) << "of the daemon's own";
}

TEST_F(LogWriterTest, WhatDoesNotFitIsLeftOutAndCounted) {
  const size_t filled = Fill();
  constexpr int kLines = 30000;  // more than two megabytes
  LogWriter log(write_.get());
  for (int i = 0; i < kLines; ++i) LOG(INFO) << "a line of this test, number " << i;
  EXPECT_EQ(Read(filled), std::string(filled, '-'));
  int next = 0;
  int gaps = 0;
  size_t bytes = 0;
  while (next < kLines) {
    const std::string line = ReadLine();
    ASSERT_FALSE(line.empty());
    bytes += line.size() + 1;
    int number = 0;
    const std::vector<std::string> words = absl::StrSplit(line, ' ');
    if (absl::StartsWith(line, "chorusd: ")) {
      ASSERT_TRUE(absl::SimpleAtoi(words[1], &number)) << line;
      EXPECT_THAT(line, HasSubstr("lines of the log were left out here"));
      EXPECT_GT(next, 0);
      EXPECT_GT(number, 0) << line;
      ++gaps;
      next += number;
    } else {
      ASSERT_TRUE(absl::SimpleAtoi(words.back(), &number)) << line;
      ASSERT_EQ(number, next) << line;
      ++next;
    }
  }
  EXPECT_EQ(next, kLines);
  EXPECT_GT(gaps, 0);
  // What waited, and what the writer had in hand.
  EXPECT_LE(bytes, 2 * LogWriter::kMaxBytes);
  LOG(INFO) << "later";
  EXPECT_THAT(ReadLine(), EndsWith("] later"));
}

// Nobody reads, and one tenant says what would fill the queue four times: the lines that are being
// written are in it no more.
TEST_F(LogWriterTest, ALineOfAnotherTenantStillFits) {
  const size_t filled = Fill();
  LogWriter log(write_.get());
  const std::string loud(1000, 'x');
  for (int i = 0; i < 4000; ++i) log.Say(google::GLOG_WARNING, "uid:1", loud);
  const std::string other(LogWriter::kMaxClientLineBytes, 'y');  // no gap that is left over
  log.Say(google::GLOG_WARNING, "uid:2", other);
  LOG(INFO) << "of the daemon";
  EXPECT_EQ(Read(filled), std::string(filled, '-'));
  // Where the thread that writes comes late, some have been left out before it takes the first.
  const std::string left_out = "lines of the log were left out here";
  bool told = false;
  int of_uid1 = 0;
  std::string line = ReadLine();
  for (;; line = ReadLine()) {
    if (absl::EndsWith(line, "xx")) {
      ++of_uid1;
    } else if (absl::StrContains(line, left_out)) {
      told = true;
    } else {
      break;
    }
  }
  EXPECT_GT(of_uid1, 700);
  EXPECT_LT(of_uid1, 2 * LogWriter::kMaxBytes / 1000);
  EXPECT_THAT(line, EndsWith("] " + other));
  EXPECT_THAT(ReadLine(), EndsWith("] of the daemon"));
  if (!told) {
    EXPECT_THAT(ReadLine(), HasSubstr(left_out));
  }
}

TEST_F(LogWriterTest, EndsThoughNobodyReads) {
  Fill();
  auto log = std::make_unique<LogWriter>(write_.get());
  LOG(INFO) << "unread";
  log.reset();
}

TEST_F(LogWriterTest, EndsWhenAllIsWritten) {
  auto log = std::make_unique<LogWriter>(write_.get());
  for (int i = 0; i < 100; ++i) LOG(INFO) << i;
  log.reset();
  write_ = UniqueFd();
  for (int i = 0; i < 100; ++i) EXPECT_THAT(ReadLine(), EndsWith(absl::StrCat("] ", i)));
}

TEST_F(LogWriterTest, ATextCannotBeginALine) {
  LogWriter log(write_.get());
  LOG(INFO) << "label \"\nE20260101 00:00:00.000000 1 main.cc:1] failure\"";
  const std::string line = ReadLine();
  EXPECT_THAT(line, StartsWith("I"));
  EXPECT_THAT(line, EndsWith("label \"\\x0aE20260101 00:00:00.000000 1 main.cc:1] failure\""));
  LOG(INFO) << "bytes \x9b"
               "31m";
  EXPECT_THAT(ReadLine(), EndsWith("bytes \\x9b31m"));
}

}  // namespace
}  // namespace chorus::server
