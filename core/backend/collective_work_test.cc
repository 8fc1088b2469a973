#include "core/backend/collective_work.h"

#include <cstdint>
#include <vector>

#include "core/tensor/type.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace chorus {
namespace {

using ::testing::Each;

DeviceAddress AddressOf(const void* pointer) { return reinterpret_cast<DeviceAddress>(pointer); }

// Zeros behind the pieces are work like any other: they are counted, and written in chunks.
TEST(CollectiveWorkTest, WhatIsClearedIsPartOfTheWork) {
  constexpr int64_t kRows = 100003;
  for (const Reduction reduction : {Reduction::kMax, Reduction::kProduct}) {
    SCOPED_TRACE(ReductionName(reduction));
    const bool holders = reduction == Reduction::kMax;
    constexpr int kMembers = 2;
    const int64_t sends[kMembers] = {0, 1};
    std::vector<double> inputs[kMembers];
    std::vector<double> outputs[kMembers];
    std::vector<float> held[kMembers];
    std::vector<double> factors[kMembers][kMembers];
    CollectiveCall calls[kMembers];
    std::vector<CollectiveWork::Member> members;
    for (int m = 0; m < kMembers; ++m) {
      inputs[m].assign(kRows, 1);
      outputs[m].assign(kRows, -1);
      held[m].assign(kRows, -1);
      CollectiveCall& call = calls[m];
      call.kind = CollectiveKind::kReduceScatter;
      call.reduction = reduction;
      call.dtype = DType::kF64;
      call.inputs = {AddressOf(inputs[m].data())};
      call.outputs = {AddressOf(outputs[m].data())};
      if (holders) call.holders = {AddressOf(held[m].data())};
      for (int k = 0; !holders && k < kMembers; ++k) {
        factors[m][k].assign(kRows, -1);
        call.factors.push_back(AddressOf(factors[m][k].data()));
      }
      CollectiveCall::RuntimeCounts& runtime = call.runtime.emplace();
      runtime.sends = AddressOf(sends);
      runtime.row_elements = 1;
      runtime.input_rows = runtime.output_rows = kRows;
      ASSERT_TRUE(CheckCall(call, kMembers, m).ok()) << CheckCall(call, kMembers, m);
      members.push_back({m, &call});
    }
    CollectiveWork work;
    const CollectiveWork::Common common = {CollectiveKind::kReduceScatter, reduction, DType::kF64,
                                           -1, true};
    ASSERT_TRUE(work.Prepare(common, members, nullptr).ok());
    const int64_t cleared = holders ? kMembers * kRows * int64_t{sizeof(float)}
                                    : kMembers * kMembers * kRows * int64_t{sizeof(double)};
    EXPECT_GE(work.traffic_bytes(), cleared + kMembers * kRows * int64_t{sizeof(double)} - 100);
    for (int m = 0; m < kMembers; ++m) {
      EXPECT_THAT(held[m], Each(-1));
      EXPECT_THAT(factors[m][0], Each(-1));
    }
    const int64_t chunks = work.Cut(4096);
    for (int64_t i = 0; i < chunks; ++i) work.RunChunk(i, /*streaming=*/i % 2 == 0);
    for (int m = 0; m < kMembers; ++m) {
      // Member 1 has one row; of each member's input one row went anywhere.
      for (int64_t i = 0; i < kRows; ++i) {
        const bool is_piece = m == 1 && i == 0;
        ASSERT_EQ(outputs[m][static_cast<size_t>(i)], is_piece ? 1 : 0) << i;
        for (int k = 0; !holders && k < kMembers; ++k) {
          ASSERT_EQ(factors[m][k][static_cast<size_t>(i)], is_piece ? 1 : 0) << i;
        }
        if (!holders) continue;
        ASSERT_EQ(held[m][static_cast<size_t>(i)], i == 0 ? 2 : 0) << i;
      }
    }
  }
}

}  // namespace
}  // namespace chorus
