#include "core/node/patience.h"

#include "absl/time/clock.h"
#include "core/base/error.h"
#include "core/runtime/budget.h"
#include "gtest/gtest.h"

namespace chorus::node {
namespace {

// What a budget answers whose bytes leave.
absl::Status ForNow() {
  const BudgetRef budget = Budget::OfNode(1000);
  absl::StatusOr<Charge> leaving = budget->Charge(Domain::kHost, Resource::kResultBytes, 1000);
  leaving->Leave();
  return budget->Charge(Domain::kHost, Resource::kResultBytes, 1).status();
}

TEST(PatienceTest, WaitsOnlyForWhatIsOnItsWay) {
  Patience patience;
  const absl::Time now = absl::UnixEpoch();
  EXPECT_FALSE(patience.Waits(absl::OkStatus(), now));
  EXPECT_FALSE(patience.Waits(MakeError(Reason::kOutOfMemory, "there is none"), now));
  EXPECT_TRUE(patience.Waits(ForNow(), now));
}

TEST(PatienceTest, EndsAndIsThereAgainForTheNextQuestion) {
  Patience patience;
  absl::Time now = absl::UnixEpoch();
  const absl::Duration nearly = Patience::kLongest - absl::Milliseconds(1);
  EXPECT_TRUE(patience.Waits(ForNow(), now));
  EXPECT_TRUE(patience.Waits(ForNow(), now + nearly));
  EXPECT_FALSE(patience.Waits(ForNow(), now + Patience::kLongest));
  now += Patience::kLongest;
  EXPECT_TRUE(patience.Waits(ForNow(), now));
  EXPECT_FALSE(patience.Waits(absl::OkStatus(), now + nearly)) << "answered";
  EXPECT_TRUE(patience.Waits(ForNow(), now + Patience::kLongest));
}

}  // namespace
}  // namespace chorus::node
