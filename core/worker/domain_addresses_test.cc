#include "core/worker/domain_addresses.h"

#include "gtest/gtest.h"

namespace chorus::worker {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

TEST(DomainAddressesTest, RangesAreTheDomainsAndGrowWithWhatThereIs) {
  DomainAddresses addresses(3);
  EXPECT_FALSE(addresses.Take(1).has_value());
  const MapMemory first = addresses.Grow(1);
  EXPECT_EQ(first.domain, 3);
  EXPECT_EQ(first.begin, FirstAddressOf(3));
  EXPECT_EQ(first.bytes, kMiB);
  const DeviceAddress one = *addresses.Take(kMiB);
  EXPECT_EQ(DomainOf(one), 3);
  EXPECT_FALSE(addresses.Take(1).has_value());
  EXPECT_EQ(addresses.Grow(1).bytes, kMiB);
  EXPECT_EQ(addresses.Grow(1).bytes, 2 * kMiB);
  EXPECT_EQ(addresses.Grow(300 * kMiB + 1).bytes, 300 * kMiB + 256);
  EXPECT_EQ(addresses.Grow(1).bytes, 256 * kMiB) << "not without end";
}

TEST(DomainAddressesTest, NoPieceLiesInTwoRanges) {
  DomainAddresses addresses(0);
  const MapMemory first = addresses.Grow(1);
  const MapMemory second = addresses.Grow(1);
  EXPECT_GT(second.begin, first.begin + static_cast<DeviceAddress>(first.bytes));
  EXPECT_FALSE(addresses.Take(2 * kMiB).has_value());
}

TEST(DomainAddressesTest, WhatIsLostIsNeverGivenOutAgain) {
  DomainAddresses addresses(0);
  addresses.Grow(1);
  const DeviceAddress before = *addresses.Take(100);
  addresses.Lose();
  addresses.GiveBack(before);
  EXPECT_FALSE(addresses.Take(1).has_value());
  const MapMemory range = addresses.Grow(1);
  EXPECT_GT(range.begin, before);
  EXPECT_EQ(range.bytes, kMiB) << "as at the start";
}

TEST(DomainAddressesTest, ARefusedRangeIsNotGivenOut) {
  DomainAddresses addresses(0);
  const MapMemory range = addresses.Grow(1);
  const DeviceAddress piece = *addresses.Take(100);
  addresses.Refuse(range.begin);
  addresses.Refuse(range.begin + 1);
  EXPECT_FALSE(addresses.Take(1).has_value());
  addresses.GiveBack(piece);
  EXPECT_FALSE(addresses.Take(1).has_value());
}

}  // namespace
}  // namespace chorus::worker
