#include "tests/conformance/conformance.h"

#include <iostream>

namespace chorus {
namespace conformance {

const ConformanceParam& Conformance::GetParam() {
  const ConformanceParam& all = ::testing::TestWithParam<ConformanceParam>::GetParam();
  if (all.in_turn.empty()) return all;
  const ::testing::UnitTest& unit = *::testing::UnitTest::GetInstance();
  const ::testing::TestSuite& suite = *unit.current_test_suite();
  int number = 0;  // whatever the filter lets through
  while (suite.GetTestInfo(number) != unit.current_test_info()) ++number;
  return all.in_turn[(all.first + static_cast<size_t>(number)) % all.in_turn.size()];
}

void Conformance::SetUp() {
  if (!::testing::TestWithParam<ConformanceParam>::GetParam().in_turn.empty()) {
    std::cout << "on " << GetParam().name << std::endl;
  }
}

}  // namespace conformance
}  // namespace chorus
