#include "core/node/domains.h"

#include <memory>
#include <vector>

#include "core/backend/sim/sim_backend.h"
#include "gtest/gtest.h"

namespace chorus::node {
namespace {

Domains Of(int devices, int devices_per_domain) {
  SimBackendOptions options;
  options.devices = devices;
  options.devices_per_domain = devices_per_domain;
  const std::unique_ptr<Backend> backend = CreateSimBackend(options);
  return Domains(DevicesOf(backend.get())->info());
}

TEST(DomainsTest, SomethingIsSharedWhereNotEachOfSeveralDevicesIsApart) {
  EXPECT_TRUE(Of(1, 1).any_shared());
  EXPECT_FALSE(Of(2, 1).any_shared());
  EXPECT_TRUE(Of(2, 2).any_shared());
  EXPECT_TRUE(Of(3, 2).any_shared());
}

TEST(DomainsTest, ItDependsOnTheDevicesWhereThereAreSeveralSharedDomains) {
  EXPECT_FALSE(Of(1, 1).mixed());
  EXPECT_FALSE(Of(2, 1).mixed());
  EXPECT_FALSE(Of(2, 2).mixed());
  EXPECT_TRUE(Of(3, 2).mixed());
  EXPECT_FALSE(Of(4, 64).mixed());
}

TEST(DomainsTest, AllOne) {
  const Domains domains = Of(5, 2);
  const auto all_one = [&](const std::vector<int>& devices) {
    std::vector<DeviceIndex> indices;
    for (const int device : devices) indices.push_back(DeviceIndex(device));
    return domains.AllOne(indices);
  };
  EXPECT_TRUE(all_one({}));
  EXPECT_TRUE(all_one({4}));
  EXPECT_TRUE(all_one({1, 0}));
  EXPECT_FALSE(all_one({1, 2}));
  EXPECT_FALSE(all_one({2, 3, 4}));
  EXPECT_EQ(domains.of(DeviceIndex(3)), 1);
}

}  // namespace
}  // namespace chorus::node
