#include "tools/gpu_probe/record.h"

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/str_split.h"
#include "gtest/gtest.h"
#include "tools/gpu_probe/child.h"

namespace chorus {
namespace probe {
namespace {

std::vector<Record> Read(const std::string& content) {
  std::vector<Record> records;
  for (const absl::string_view line : absl::StrSplit(content, '\n', absl::SkipEmpty())) {
    Record record;
    EXPECT_TRUE(ParseRecord(line, &record)) << line;
    records.push_back(record);
  }
  return records;
}

TEST(RecordTest, WhatIsToldIsRead) {
  const UniqueFd file = TemporaryFile();
  Recorder recorder(file.get());
  recorder.Fact("device", "a \"GPU\"\nof two lines \xff");
  EXPECT_EQ(recorder.Numbers("rate", {3, 1, 2, 5}, "GB/s"), 2);
  recorder.Number("one", 7.25, "us");
  EXPECT_TRUE(std::isnan(recorder.Numbers("none", {}, "us")));
  EXPECT_FALSE(recorder.has_verdict());
  recorder.Say("P7", {Decision::kDoesNotHold, "too slow"});
  EXPECT_TRUE(recorder.has_verdict());

  const std::vector<Record> records = Read(ContentOf(file.get()));
  ASSERT_EQ(records.size(), 4u);
  EXPECT_EQ(records[0].kind, Record::Kind::kFact);
  EXPECT_EQ(records[0].text.substr(0, 24), "a \"GPU\"\nof two lines \xef\xbf\xbd");
  EXPECT_EQ(records[1].kind, Record::Kind::kNumber);
  EXPECT_EQ(records[1].value, 2);
  EXPECT_EQ(records[1].least, 1);
  EXPECT_EQ(records[1].most, 5);
  EXPECT_EQ(records[1].samples, 4);
  EXPECT_EQ(records[1].unit, "GB/s");
  EXPECT_EQ(records[2].value, 7.25);
  EXPECT_EQ(records[3].kind, Record::Kind::kVerdict);
  EXPECT_EQ(records[3].what, "P7");
  EXPECT_EQ(records[3].decision, Decision::kDoesNotHold);
  EXPECT_EQ(records[3].text, "too slow");
}

TEST(RecordTest, NumbersThatJsonLacksAreRecordsToo) {
  Record record;
  record.kind = Record::Kind::kNumber;
  record.value = std::numeric_limits<double>::infinity();
  Record read;
  EXPECT_TRUE(ParseRecord(record.Json(), &read));
}

TEST(RecordTest, GarbageIsNoRecord) {
  for (const std::string line :
       {"", "hello", "{", "[]", "7", "{}", R"({"kind":"fact"})", R"({"kind":"fact","what":3})",
        R"({"kind":"fact","what":"a"})", R"({"kind":"other","what":"a","text":"b"})",
        R"({"kind":"number","what":"a","value":"b"})",
        R"({"kind":"verdict","what":"P1","text":"","verdict":"perhaps"})",
        R"({"kind":"verdict","what":"P1","text":""})"}) {
    Record record;
    EXPECT_FALSE(ParseRecord(line, &record)) << line;
  }
}

TEST(JudgeTest, HoldsWhereEverythingDoes) {
  Judge judge;
  judge.AtLeast("rate", 0.95, 0.95);
  judge.AtMost("time", 1, 1.5, " us");
  judge.True("bits are equal", true);
  const Verdict verdict = judge.verdict();
  EXPECT_EQ(verdict.decision, Decision::kHolds);
  EXPECT_EQ(verdict.why, "rate 0.950 >= 0.950; time 1 us <= 1.50 us; bits are equal");
}

TEST(JudgeTest, OneThatFailsDecidesWhateverIsUnknown) {
  Judge judge;
  judge.True("fine", true);
  judge.Unknown("something");
  judge.AtLeast("rate", 0.94, 0.95, " of it");
  judge.AtMost("time", 1.6, 1.5);
  judge.True("bits are equal", false);
  const Verdict verdict = judge.verdict();
  EXPECT_EQ(verdict.decision, Decision::kDoesNotHold);
  EXPECT_EQ(verdict.why,
            "rate 0.940 of it < 0.950 of it; time 1.60 > 1.50; not so: bits are equal");
}

TEST(JudgeTest, WhatWasNotMeasuredIsNotDecided) {
  Judge judge;
  EXPECT_EQ(judge.verdict().decision, Decision::kNotDecided);
  judge.True("fine", true);
  judge.AtLeast("rate", std::nan(""), 0.95);
  judge.AtMost("time", std::nan(""), 1);
  EXPECT_EQ(judge.verdict().decision, Decision::kNotDecided);
  EXPECT_EQ(judge.verdict().why, "unknown: rate; time; true: fine");
}

TEST(NumberTextTest, HasThreeDigits) {
  EXPECT_EQ(NumberText(0), "0");
  EXPECT_EQ(NumberText(3), "3");
  EXPECT_EQ(NumberText(4321.7), "4322");
  EXPECT_EQ(NumberText(43.217), "43.2");
  EXPECT_EQ(NumberText(4.3217), "4.32");
  EXPECT_EQ(NumberText(0.43217), "0.432");
  EXPECT_EQ(NumberText(0.043217), "0.0432");
  EXPECT_EQ(NumberText(-4.3217), "-4.32");
  EXPECT_EQ(NumberText(std::nan("")), "?");
}

}  // namespace
}  // namespace probe
}  // namespace chorus
