#include "core/base/error.h"

#include <algorithm>
#include <set>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace chorus {
namespace {

Error Full() {
  Error error;
  error.code = absl::StatusCode::kInvalidArgument;
  error.reason = Reason::kMismatch;
  error.message = "ranks disagree";
  error.id = ErrorId(7);
  error.culprit = {2, 4711, "node-a"};
  error.instance = "group 0 step 3 call 17";
  error.op = "all_reduce";
  error.source = "train.cc:42";
  error.expected = "f32[4]";
  error.got = "f32[5]";
  error.ended = {{WorldId(3), Epoch(8)}, {WorldId(int64_t{1} << 40), Epoch(2)}};
  error.alone = true;
  error.ranks = {{0, "all_reduce SUM f32[4]", "train.cc:42"}, {1, "all_reduce SUM f32[5]", ""}};
  return error;
}

TEST(ErrorTest, EverythingSurvivesAStatus) {
  const Error got = ErrorOf(ToStatus(Full()));
  EXPECT_EQ(EncodeError(got), EncodeError(Full()));
  EXPECT_EQ(got.ranks.size(), 2u);
  EXPECT_EQ(got.ranks[1].what, "all_reduce SUM f32[5]");
  EXPECT_EQ(got.ended, Full().ended);
  EXPECT_TRUE(got.alone);
}

TEST(ErrorTest, AStatusFromElsewhereKeepsCodeAndText) {
  const Error got = ErrorOf(absl::NotFoundError("gone"));
  EXPECT_EQ(got.code, absl::StatusCode::kNotFound);
  EXPECT_EQ(got.message, "gone");
  EXPECT_EQ(got.reason, Reason::kUnspecified);
}

TEST(ErrorTest, NeverEncodesToMoreThanTheWireTakes) {
  Error error = Full();
  error.message.assign(100000, 'm');
  error.expected.assign(100000, 'e');
  error.ranks.assign(20, {1, std::string(5000, 'w'), std::string(5000, 's')});
  error.ended.assign(20, {WorldId(int64_t{1} << 62), Epoch(int64_t{1} << 62)});
  const std::string bytes = EncodeError(error);
  EXPECT_LE(bytes.size(), Error::kMaxBytes);
  const Error got = DecodeError(bytes);
  EXPECT_EQ(got.reason, Reason::kMismatch);
  EXPECT_EQ(got.ranks.size(), Error::kMaxRanks);
  ASSERT_EQ(got.ended.size(), Error::kMaxRanks);
  EXPECT_EQ(got.ended[7], error.ended[7]);
  EXPECT_THAT(got.message, testing::EndsWith("..."));
}

TEST(ErrorTest, EveryTruncationDecodesToInternal) {
  const std::string bytes = EncodeError(Full());
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_EQ(DecodeError(absl::string_view(bytes).substr(0, size)).code,
              absl::StatusCode::kInternal)
        << size;
  }
}

TEST(ErrorTest, AnUnknownNameIsNoReason) {
  EXPECT_EQ(ReasonFromName("NO_SUCH_REASON"), Reason::kUnspecified);
}

TEST(ErrorTest, EveryReasonHasANumberANameACodeAndARemedyOfItsOwn) {
  int last = -1;
  std::set<std::string> names;
  for (const ReasonInfo& info : Reasons()) {
    SCOPED_TRACE(info.name);
    EXPECT_TRUE(names.insert(info.name).second);
    EXPECT_GE(std::string(info.remedy).size(), 5u);
    EXPECT_LE(std::string(info.remedy).size(), 90u) << "one short sentence";
    EXPECT_THAT(info.remedy,
                testing::Not(testing::AnyOf(testing::HasSubstr("["), testing::EndsWith("."))));
    EXPECT_EQ(Error(info.reason).code, info.code);
    EXPECT_EQ(MakeError(info.reason, "text").code(), info.code);
    EXPECT_EQ(InfoOf(info.reason).name, info.name);
    EXPECT_EQ(ReasonFromName(info.name), info.reason);
    last = std::max(last, static_cast<int>(info.reason));
  }
  EXPECT_EQ(InfoOf(static_cast<Reason>(last + 1)).reason, Reason::kUnspecified);
}

TEST(ErrorTest, TheTextSaysReasonRemedyAndNumber) {
  EXPECT_EQ(BadType("add: f32[4] and f32[5]").message(),
            "add: f32[4] and f32[5] [BAD_TYPE; fix the call]");
  EXPECT_EQ(ToStatus(Full()).message(),
            "ranks disagree [MISMATCH; make all ranks ask for the same, and go on with the next "
            "World::Step; error 7]");
}

TEST(ErrorTest, TheRemedyIsSaidOnce) {
  absl::Status status = ToStatus(Full());
  for (int i = 0; i < 3; ++i) {
    Error error = ErrorOf(status);
    EXPECT_EQ(error.message, Full().message);
    error.id = ErrorId(error.id.value() + 1);  // another text, for the same error
    status = ToStatus(error);
  }
  EXPECT_THAT(std::string(status.message()), testing::EndsWith("World::Step; error 10]"));
  // An error that quotes another says its own.
  const absl::Status told = MakeError(Reason::kPeerRefused, ErrorOf(status).message);
  EXPECT_EQ(told.message(),
            "ranks disagree [PEER_REFUSED; fix that rank's call, and go on with the next "
            "World::Step]");
  // What was written behind a text by others stays.
  EXPECT_EQ(WithoutRemedyText("a [MISMATCH; b] c", Reason::kMismatch), "a [MISMATCH; b] c");
  EXPECT_EQ(WithoutRemedyText("a [MISMATCH; b]", Reason::kMismatch), "a");
  EXPECT_EQ(WithoutRemedyText("a [MISMATCH; b]", Reason::kBadType), "a [MISMATCH; b]");
}

TEST(ErrorTest, ToStringShowsTextOnly) {
  Error error = Full();
  error.culprit.node = "b\\\xc3\xa4r\n\x01; rank=3|%41'\"";
  error.ranks[1].source = error.culprit.node;
  const absl::Status status = ToStatus(error);
  const std::string shown = status.ToString();
  EXPECT_THAT(shown, testing::Not(testing::HasSubstr("\\"))) << "nothing is escaped";
  EXPECT_THAT(shown, testing::AllOf(testing::HasSubstr("op=all_reduce; source=train.cc:42; "),
                                    testing::HasSubstr("asked=0|all_reduce SUM f32[4]|train.cc:42"),
                                    testing::HasSubstr("error_id=7; rank=2; pid=4711")));
  const Error got = ErrorOf(status);
  EXPECT_EQ(EncodeError(got), EncodeError(error));
}

TEST(ErrorTest, APayloadOfAnyBytesIsReadWithoutHarm) {
  for (const char* bytes :
       {"", "=", "; ; ", "asked=1", "asked=x|y|z", "ended=|", "rank=999999999999", "reason=NO_SUCH",
        "op=%", "op=%4", "op=%zz", "\xff\x01"}) {
    absl::Status status = absl::AbortedError("text");
    status.SetPayload("chorus.error", absl::Cord(bytes));
    EXPECT_EQ(ErrorOf(status).message, "text") << bytes;
    EXPECT_EQ(ErrorOf(status).code, absl::StatusCode::kAborted);
  }
}

TEST(ErrorTest, APayloadStaysBelowTheLimitWhateverTheTexts) {
  for (const char filler : {'x', '\xff', '\n', '\0'}) {
    Error error = Full();
    const std::string text(100000, filler);
    error.message = error.culprit.node = error.instance = error.op = error.source = text;
    error.expected = error.got = text;
    error.ranks.assign(20, {1, text, text});
    error.ended.assign(20, {WorldId(int64_t{1} << 62), Epoch(int64_t{1} << 62)});
    const absl::Status status = ToStatus(error);
    EXPECT_LE(status.GetPayload("chorus.error")->size(), Error::kMaxBytes);
    const Error got = ErrorOf(status);
    EXPECT_EQ(got.message, text);
    EXPECT_EQ(got.ranks.size(), Error::kMaxRanks);
    EXPECT_EQ(got.ended.size(), Error::kMaxRanks);
    EXPECT_EQ(got.reason, Reason::kMismatch);
  }
}

TEST(ErrorTest, ADetachedCopyCarriesEverything) {
  Error error;
  error.code = absl::StatusCode::kAborted;
  error.reason = Reason::kPeerDied;
  error.message = "rank 2 died";
  error.culprit.rank = 2;
  const absl::Status status = ToStatus(error);
  const absl::Status copy = Detached(status);
  EXPECT_EQ(copy, status);
  EXPECT_EQ(ErrorOf(copy).culprit.rank, 2);
  EXPECT_TRUE(Detached(absl::OkStatus()).ok());
}

}  // namespace
}  // namespace chorus
