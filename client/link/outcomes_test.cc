#include "client/link/outcomes.h"

#include <cstdint>
#include <string>

#include "core/base/error.h"
#include "gtest/gtest.h"

namespace chorus {
namespace internal {
namespace {

std::string Peek(const Outcomes& outcomes, int64_t sequence) {
  const absl::StatusOr<absl::optional<absl::Status>> outcome = outcomes.Peek(Sequence(sequence));
  if (!outcome.ok()) return std::string(ReasonName(ErrorOf(outcome.status()).reason));
  if (!outcome->has_value()) return "pending";
  return (*outcome)->ok() ? "OK" : std::string(ReasonName(ErrorOf(**outcome).reason));
}

TEST(OutcomesTest, ALateOutcomeIsNoForgottenOne) {
  constexpr int64_t kKept = Outcomes::kKept;
  Outcomes outcomes;
  outcomes.Set(Sequence(2), BadType("two"));
  EXPECT_EQ(Peek(outcomes, 1), "pending");
  EXPECT_EQ(Peek(outcomes, 2), "BAD_TYPE");
  for (const int64_t early : {int64_t{1}, int64_t{2}, kKept, 2 * kKept}) {
    outcomes.Set(Sequence(early + 2 * kKept), absl::OkStatus());
  }
  EXPECT_EQ(Peek(outcomes, 1), "pending");
  EXPECT_EQ(Peek(outcomes, 2), "OUTCOME_FORGOTTEN");
  EXPECT_EQ(Peek(outcomes, kKept), "pending");
  EXPECT_EQ(Peek(outcomes, 1 + kKept), "pending");
  EXPECT_EQ(Peek(outcomes, 2 + kKept), "pending");
  EXPECT_EQ(Peek(outcomes, 2 + 2 * kKept), "OK");
  EXPECT_EQ(ErrorOf(outcomes.Wait(Sequence(1), absl::ZeroDuration())).reason,
            Reason::kTransportTimeout);
  for (const int64_t late : {int64_t{1}, kKept, 1 + kKept}) {
    outcomes.Set(Sequence(late), absl::OkStatus());
    EXPECT_EQ(Peek(outcomes, late), "OUTCOME_FORGOTTEN") << late;
    EXPECT_EQ(ErrorOf(outcomes.Wait(Sequence(late), absl::ZeroDuration())).reason,
              Reason::kOutcomeForgotten);
  }
  EXPECT_EQ(Peek(outcomes, 2 + kKept), "pending");
}

}  // namespace
}  // namespace internal
}  // namespace chorus
