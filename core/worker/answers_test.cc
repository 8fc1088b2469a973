#include "core/worker/answers.h"

#include <algorithm>
#include <cstdint>
#include <string>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

namespace chorus::worker {
namespace {

TEST(AnswersTest, AQuestionThatWasAskedIsKnown) {
  Answers answers;
  EXPECT_FALSE(answers.Find("a").has_value());
  answers.Keep("a", 1);
  answers.Keep("b", 0);
  answers.Keep("a", 1);
  EXPECT_EQ(answers.Find("a"), 1);
  EXPECT_EQ(answers.Find("b"), 0);
  EXPECT_FALSE(answers.Find("").has_value());
}

TEST(AnswersTest, TheyTakeSoManyBytesHoweverLongQuestionsAre) {
  Answers answers;
  for (const int64_t length : {int64_t{8}, int64_t{1000}, Answers::kLongest}) {
    const int64_t times = std::min<int64_t>(3 * Answers::kMaxBytes / length, 50000);
    for (int64_t i = 0; i < times; ++i) {
      std::string question = absl::StrCat(i);
      question.resize(static_cast<size_t>(length), '.');
      answers.Keep(question, i);
      ASSERT_EQ(answers.Find(question), i);
      ASSERT_LE(answers.bytes(), Answers::kMaxBytes);
      ASSERT_GE(answers.bytes(), length);
    }
  }
}

TEST(AnswersTest, AVeryLongQuestionIsNotKeptAndTakesNoOthersPlace) {
  Answers answers;
  answers.Keep("a", 1);
  const int64_t before = answers.bytes();
  const std::string question(Answers::kLongest + 1, 'x');
  for (int i = 0; i < 100; ++i) answers.Keep(question, i);
  EXPECT_FALSE(answers.Find(question).has_value());
  EXPECT_EQ(answers.bytes(), before);
  EXPECT_EQ(answers.Find("a"), 1);
}

}  // namespace
}  // namespace chorus::worker
