#include "core/backend/cuda/bounce_copier.h"

#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/backend/cuda/testing/fake_gpu.h"
#include "gtest/gtest.h"

namespace chorus {
namespace {

using cuda::Result;

// Three buffers, and a piece.
constexpr int64_t kBytes = (3 << 20) + 7;

class BounceCopierTest : public ::testing::Test {
 protected:
  BounceCopierTest() : stream_(gpu_.NewStream()), copier_(*BounceCopier::Create(gpu_.get())) {
    EXPECT_EQ(gpu_.api().MemAlloc(&device_, kBytes), Result::kSuccess);
    for (int64_t i = 0; i < kBytes; ++i) from_.push_back(static_cast<char>(i * 7));
    to_.resize(kBytes);
  }
  ~BounceCopierTest() override {
    copier_->Stop();
    gpu_.api().StreamSynchronize(stream_);
    gpu_.api().MemFree(device_);
  }

  std::future<std::pair<Result, std::string>> Add(bool from_host) {
    auto told = std::make_shared<std::promise<std::pair<Result, std::string>>>();
    auto future = told->get_future();
    BounceCopier::Copy copy;
    copy.stream = stream_;
    copy.from_host = from_host;
    copy.host = from_host ? from_.data() : to_.data();
    copy.device = device_;
    copy.bytes = kBytes;
    copy.done = [told](Result result, const char* call) { told->set_value({result, call}); };
    copier_->Add(std::move(copy));
    return future;
  }

  testing::FakeGpu gpu_;
  const cuda::Stream stream_;
  cuda::DevicePtr device_ = 0;
  std::vector<char> from_;
  std::vector<char> to_;
  std::unique_ptr<BounceCopier> copier_;
};

TEST_F(BounceCopierTest, BytesGoThereAndBack) {
  auto there = Add(/*from_host=*/true);
  auto back = Add(/*from_host=*/false);
  EXPECT_EQ(there.get().first, Result::kSuccess);
  EXPECT_EQ(back.get().first, Result::kSuccess);
  EXPECT_EQ(to_, from_);
}

TEST_F(BounceCopierTest, SaysWhichCallTheDriverRefusedAndGoesOn) {
  for (const auto& [call, from_host] : {std::pair<const char*, bool>{"cuMemcpyHtoDAsync", true},
                                        {"cuMemcpyDtoHAsync", false},
                                        {"cuEventRecord", true},
                                        {"cuEventSynchronize", false}}) {
    SCOPED_TRACE(call);
    gpu_.driver().FailNext(call, Result::kUnknown, /*skip=*/1);
    const std::pair<Result, std::string> told = Add(from_host).get();
    EXPECT_EQ(told.first, Result::kUnknown);
    EXPECT_EQ(told.second, call);
  }
  EXPECT_EQ(gpu_.driver().faults_left(), 0);
  EXPECT_EQ(Add(/*from_host=*/true).get().first, Result::kSuccess);
  EXPECT_EQ(Add(/*from_host=*/false).get().first, Result::kSuccess);
  EXPECT_EQ(to_, from_);
}

}  // namespace
}  // namespace chorus
