#include "core/backend/backends.h"

#include <algorithm>
#include <memory>
#include <string>

#include "core/base/error.h"
#include "core/base/thread_pool.h"
#include "core/ops/host_kernels.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace chorus {
namespace {

using ::testing::HasSubstr;

TEST(BackendsTest, EachOpensByItsName) {
  ThreadPool pool(1);
  ASSERT_FALSE(BackendNames().empty());
  EXPECT_TRUE(std::is_sorted(BackendNames().begin(), BackendNames().end()));
  for (const absl::string_view name : BackendNames()) {
    SCOPED_TRACE(std::string(name));
    BackendOptions options;
    options.devices = 3;
    options.pool = &pool;
    options.make_kernel = MakeHostKernel;
    options.seed = 1;
    const auto backend = OpenBackend(name, options);
    ASSERT_TRUE(backend.ok()) << backend.status();
    EXPECT_EQ((*backend)->name(), name);
    EXPECT_EQ((*backend)->device_count(), 3);
  }
}

TEST(BackendsTest, WhatIsNoneIsNamedBesideThoseThatAre) {
  const absl::Status status = OpenBackend("gpu\n", BackendOptions()).status();
  EXPECT_EQ(ErrorOf(status).reason, Reason::kMalformed) << status;
  for (const absl::string_view name : BackendNames()) {
    EXPECT_THAT(std::string(status.message()), HasSubstr(std::string(name)));
  }
  EXPECT_THAT(std::string(status.message()), HasSubstr("got \"gpu"));
  EXPECT_EQ(status.message().find('\n'), absl::string_view::npos);
}

TEST(BackendsTest, DevicesAreBounded) {
  for (const int devices : {0, -1, kMaxDevices + 1}) {
    BackendOptions options;
    options.devices = devices;
    const absl::Status status = OpenBackend(BackendNames()[0], options).status();
    EXPECT_EQ(ErrorOf(status).reason, Reason::kMalformed) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(std::to_string(devices)));
  }
}

}  // namespace
}  // namespace chorus
