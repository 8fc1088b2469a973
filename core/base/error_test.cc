#include "core/base/error.h"

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

TEST(ErrorTest, ReasonNamesRoundTrip) {
  for (int i = 0; i <= static_cast<int>(Reason::kInternal); ++i) {
    const Reason reason = static_cast<Reason>(i);
    if (ReasonName(reason) == "UNSPECIFIED") continue;  // a gap in the numbering
    EXPECT_EQ(ReasonFromName(ReasonName(reason)), reason);
  }
  EXPECT_EQ(ReasonFromName("NO_SUCH_REASON"), Reason::kUnspecified);
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
