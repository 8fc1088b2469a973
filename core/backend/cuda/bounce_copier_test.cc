#include "core/backend/cuda/bounce_copier.h"

#include <algorithm>
#include <future>
#include <memory>
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

  std::future<BounceCopier::Answer> Add(bool from_host) {
    return AddTo(stream_, from_host, from_host ? &from_ : &to_, device_);
  }
  std::future<BounceCopier::Answer> AddTo(cuda::Stream stream, bool from_host,
                                          std::vector<char>* host, cuda::DevicePtr device) {
    auto told = std::make_shared<std::promise<BounceCopier::Answer>>();
    auto future = told->get_future();
    BounceCopier::Copy copy;
    copy.stream = stream;
    copy.from_host = from_host;
    copy.host = host->data();
    copy.device = device;
    copy.bytes = static_cast<int64_t>(host->size());
    copy.done = [told](const BounceCopier::Answer& answer) { told->set_value(answer); };
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
  EXPECT_EQ(there.get().result, Result::kSuccess);
  EXPECT_EQ(back.get().result, Result::kSuccess);
  EXPECT_EQ(to_, from_);
}

TEST_F(BounceCopierTest, SaysWhichCallTheDriverRefusedAndGoesOn) {
  for (const auto& [call, from_host] : {std::pair<const char*, bool>{"cuMemcpyHtoDAsync", true},
                                        {"cuMemcpyDtoHAsync", false},
                                        {"cuEventSynchronize", false}}) {
    SCOPED_TRACE(call);
    gpu_.driver().FailNext(call, Result::kUnknown, /*skip=*/1);
    const BounceCopier::Answer told = Add(from_host).get();
    EXPECT_EQ(told.result, Result::kUnknown);
    EXPECT_STREQ(told.call, call);
    EXPECT_FALSE(told.loses_order);
  }
  EXPECT_EQ(gpu_.driver().faults_left(), 0);
  EXPECT_EQ(Add(/*from_host=*/true).get().result, Result::kSuccess);
  EXPECT_EQ(Add(/*from_host=*/false).get().result, Result::kSuccess);
  EXPECT_EQ(to_, from_);
}

// One stream's bytes do not come into what another brings.
TEST_F(BounceCopierTest, ABufferWhoseUseIsNotRecordedIsNotUsedAgain) {
  constexpr size_t kPiece = 1009;
  const std::vector<char> secret(kPiece, 'A');
  std::vector<char> download(kPiece);
  std::vector<char> upload(kPiece, 'b');
  std::vector<char> found(kPiece);
  const cuda::Api& api = gpu_.api();
  const cuda::DevicePtr of_b = device_ + kPiece;
  api.MemcpyHtoDAsync(device_, secret.data(), kPiece, stream_);
  api.MemcpyHtoDAsync(of_b, found.data(), kPiece, stream_);
  EXPECT_EQ(api.StreamSynchronize(stream_), Result::kSuccess);

  std::promise<void> opens[2];
  cuda::Stream streams[2];
  for (int i = 0; i < 2; ++i) {
    streams[i] = gpu_.NewStream();
    cuda::FakeDriver::Enqueue(streams[i], "a gate", [&opens, i] { opens[i].get_future().wait(); });
  }
  gpu_.driver().FailNext("cuEventRecord", Result::kOutOfMemory);
  const auto of_a = AddTo(streams[0], /*from_host=*/false, &download, device_).get();
  const auto after = AddTo(streams[1], /*from_host=*/true, &upload, of_b).get();
  for (int i = 0; i < 2; ++i) {
    opens[i].set_value();
    EXPECT_EQ(api.StreamSynchronize(streams[i]), Result::kSuccess);
  }
  api.MemcpyDtoHAsync(found.data(), of_b, kPiece, stream_);
  EXPECT_EQ(api.StreamSynchronize(stream_), Result::kSuccess);
  EXPECT_EQ(std::count(found.begin(), found.end(), 'A'), 0);
  for (const BounceCopier::Answer& told : {of_a, after}) {
    EXPECT_EQ(told.result, Result::kOutOfMemory);
    EXPECT_STREQ(told.call, "cuEventRecord");
    EXPECT_TRUE(told.loses_order);
  }
}

}  // namespace
}  // namespace chorus
