// Kernels that the host backend runs together, block by block of elements.
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/backend/host/host_backend.h"
#include "core/backend/testing/device_rig.h"
#include "core/base/mutex.h"
#include "core/ops/host_kernels.h"
#include "gtest/gtest.h"

namespace chorus {
namespace {

// What ran, in order: "add[0,2048)".
class Log {
 public:
  void Add(std::string entry) {
    MutexLock lock(&mutex_);
    entries_.push_back(std::move(entry));
  }
  std::string Take() {
    MutexLock lock(&mutex_);
    std::string all = absl::StrJoin(entries_, " ");
    entries_.clear();
    return all;
  }

 private:
  Mutex mutex_;
  std::vector<std::string> entries_ ABSL_GUARDED_BY(mutex_);
};

Log* TheLog() {
  static auto* const log = new Log;
  return log;
}

// "abs" wants a workspace, of which it makes nothing; all of "sqrt" costs more than a number holds.
class Logged : public HostKernel {
 public:
  Logged(absl::string_view op, std::unique_ptr<HostKernel> kernel)
      : HostKernel(kernel->units(), op == "sqrt" ? (int64_t{1} << 51) + 8 : kernel->cost_per_unit(),
                   op == "abs" ? 64 : 0),
        op_(op),
        kernel_(std::move(kernel)) {}
  absl::Status Run(const HostBuffers& buffers, int64_t begin, int64_t end) const override {
    TheLog()->Add(absl::StrCat(op_, "[", begin, ",", end, ")"));
    return kernel_->Run(buffers, begin, end);
  }

 private:
  const std::string op_;
  const std::unique_ptr<HostKernel> kernel_;
};

HostKernelOrError MakeLogged(const NodeView& node, absl::Span<const TensorType> outputs) {
  auto kernel = MakeHostKernel(node, outputs);
  if (!kernel.ok()) return kernel.status();
  return std::unique_ptr<HostKernel>(std::make_unique<Logged>(node.op, *std::move(kernel)));
}

class KernelChainTest : public ::testing::Test {
 protected:
  static constexpr int64_t kCount = 5000;
  const TensorType kX{DType::kF32, {kCount}};
  const TensorType kOne{DType::kF32, {}};

  KernelChainTest() : pool_(2), rig_(Open(&pool_)) {
    gate_ = rig_.OpenAll(1);
    workspace_ = rig_.Allocate(0, 64);
    TheLog()->Take();
  }

  static std::unique_ptr<Backend> Open(ThreadPool* pool) {
    HostBackendOptions options;
    options.devices = 2;
    options.pool = pool;
    options.make_kernel = &MakeLogged;
    return CreateHostBackend(options);
  }

  const Kernel* Make(const std::string& op, const std::vector<TensorType>& types,
                     const TensorType& output) {
    std::vector<const TensorType*> inputs;
    for (const TensorType& type : types) inputs.push_back(&type);
    NodeView node;
    node.op = op;
    node.inputs = inputs;
    auto kernel = rig_.backend()->device(0)->MakeKernel(node, {output});
    EXPECT_TRUE(kernel.ok()) << kernel.status();
    kernels_.push_back(*std::move(kernel));
    return kernels_.back().get();
  }

  void Launch(const Kernel* kernel, const std::vector<DeviceAddress>& inputs, DeviceAddress output,
              const std::atomic<bool>* unless = nullptr) {
    KernelCall call;
    call.kernel = kernel;
    call.inputs.assign(inputs.begin(), inputs.end());
    call.outputs = {output};
    if (kernel->workspace_bytes() > 0) call.workspace = workspace_;
    call.unless = unless;
    rig_.stream(0)->Launch(std::move(call));
  }

  // What is launched between the two waits, and then is all there to be looked at.
  void Shut() { Barrier(0); }
  void OpenGate() {
    Barrier(1);
    ASSERT_TRUE(rig_.Synchronize(0).ok());
  }

  DeviceAddress New(float value = 1) {
    return rig_.Upload(0, std::vector<float>(static_cast<size_t>(kCount), value));
  }

  ThreadPool pool_;
  DeviceRig rig_;
  std::vector<std::unique_ptr<Kernel>> kernels_;

 private:
  void Barrier(int member) {
    CollectiveCall call;
    call.kind = CollectiveKind::kBarrier;
    ASSERT_TRUE(gate_[static_cast<size_t>(member)]->Enqueue(call, rig_.stream(member)).ok());
  }
  std::vector<std::unique_ptr<Communicator>> gate_;
  DeviceAddress workspace_ = 0;
};

TEST_F(KernelChainTest, RunsBlockByBlock) {
  const Kernel* add = Make("add", {kX, kX}, kX);
  const Kernel* mul = Make("mul", {kX, kOne}, kX);
  const DeviceAddress x = New(2), y = New(3), factor = New(4), t = New(), z = New();
  Shut();
  Launch(add, {x, y}, t);
  Launch(mul, {t, factor}, z);
  Launch(add, {z, t}, z);  // in its place
  OpenGate();
  EXPECT_EQ(TheLog()->Take(),
            "add[0,2048) mul[0,2048) add[0,2048) add[2048,4096) mul[2048,4096) add[2048,4096) "
            "add[4096,5000) mul[4096,5000) add[4096,5000)");
  EXPECT_EQ(rig_.Download<float>(0, z, kCount), std::vector<float>(kCount, 25));
}

TEST_F(KernelChainTest, EndsWhereKernelsHaveMoreInCommonThanElements) {
  const Kernel* neg = Make("neg", {kX}, kX);
  const Kernel* abs = Make("abs", {kX}, kX);
  const TensorType less(DType::kF32, {kCount - 8});
  const Kernel* small = Make("neg", {less}, less);
  const Kernel* mul = Make("mul", {kX, kOne}, kX);
  const TensorType bytes(DType::kI8, {kCount}), flags(DType::kBool, {kCount});
  const Kernel* eq = Make("eq", {bytes, bytes}, flags);
  const Kernel* where = Make("where", {flags, bytes, bytes}, bytes);
  const DeviceAddress x = New(), y = New(), z = New(), w = New();
  const DeviceAddress long_one = rig_.Upload(0, std::vector<float>(2 * kCount, 1));
  const struct {
    const char* what;
    std::function<void()> first, second;
  } cases[] = {
      {"reads it shifted", [&] { Launch(neg, {x}, long_one + 32); },
       [&] { Launch(neg, {long_one}, z); }},
      {"writes it shifted", [&] { Launch(neg, {x}, long_one + 32); },
       [&] { Launch(neg, {y}, long_one); }},
      {"writes what was read, shifted", [&] { Launch(neg, {long_one + 32}, x); },
       [&] { Launch(neg, {y}, long_one); }},
      {"reads one element for all", [&] { Launch(neg, {x}, y); },
       [&] {
         Launch(mul, {z, y}, w);
       }},
      {"writes the element for all",
       [&] {
         Launch(mul, {x, y}, z);
       },
       [&] { Launch(neg, {w}, y); }},
      {"reads it as another type",
       [&] {
         Launch(eq, {x, x}, y);
       },
       [&] {
         Launch(where, {y, z, z}, w);
       }},
      {"has the first one's workspace", [&] { Launch(abs, {x}, y); }, [&] { Launch(abs, {z}, w); }},
      {"other sizes", [&] { Launch(neg, {x}, y); }, [&] { Launch(small, {z}, w); }},
  };
  for (const auto& c : cases) {
    Shut();
    c.first();
    c.second();
    OpenGate();
    const std::string ran = TheLog()->Take();
    EXPECT_EQ(ran.find("2048"), std::string::npos) << c.what << ": " << ran;
  }
}

// Each operand would be compared with all others while nobody else has the devices.
TEST_F(KernelChainTest, HasFewOperands) {
  const std::vector<TensorType> many(200, kX);
  const Kernel* product = Make("product", many, kX);
  const Kernel* neg = Make("neg", {kX}, kX);
  const DeviceAddress x = New(), y = New(), z = New();
  const std::vector<DeviceAddress> operands(many.size(), x);
  for (const bool is_first : {true, false}) {
    Shut();
    if (is_first) Launch(product, operands, y);
    Launch(neg, {x}, z);
    if (!is_first) Launch(product, operands, y);
    OpenGate();
    const std::string ran = TheLog()->Take();
    EXPECT_NE(ran.find("neg[0,5000)"), std::string::npos) << ran;
  }
}

TEST_F(KernelChainTest, EndsWhateverItCosts) {
  const Kernel* sqrt = Make("sqrt", {kX}, kX);
  const DeviceAddress x = New(9), y = New();
  Launch(sqrt, {x}, y);
  ASSERT_TRUE(rig_.Synchronize(0).ok());
  EXPECT_EQ(rig_.Download<float>(0, y, kCount), std::vector<float>(kCount, 3));
}

TEST_F(KernelChainTest, LeavesOutWhatIsNotToRun) {
  const Kernel* neg = Make("neg", {kX}, kX);
  const DeviceAddress x = New(2), y = New(3), z = New(4);
  const std::atomic<bool> unless{true};
  Shut();
  Launch(neg, {x}, y);
  Launch(neg, {y}, z, &unless);
  Launch(neg, {x}, x);
  OpenGate();
  EXPECT_EQ(TheLog()->Take(), "neg[0,5000) neg[0,5000)");
  EXPECT_EQ(rig_.Download<float>(0, z, 1)[0], 4);
  EXPECT_EQ(rig_.Download<float>(0, x, 1)[0], -2);
}

TEST_F(KernelChainTest, KeepsNobodyWaitingWhoWaitsForAKernel) {
  const Kernel* neg = Make("neg", {kX}, kX);
  const Kernel* sin = Make("sin", {kX}, kX);
  const DeviceAddress x = New(), y = New(), z = New();
  const std::unique_ptr<Event> event = rig_.backend()->device(0)->CreateEvent();
  const std::unique_ptr<Stream> other = rig_.backend()->device(0)->CreateStream();
  Shut();
  Launch(neg, {x}, y);
  rig_.stream(0)->Record(event.get());
  Launch(neg, {y}, z);
  Launch(sin, {z}, z);
  other->Wait(event.get());
  OpenGate();
  EXPECT_EQ(TheLog()->Take().substr(0, 24), "neg[0,5000) neg[0,2048) ");
}

// Programs of kernels on a few slots of memory, of which some overlap.
TEST_F(KernelChainTest, GivesWhatTheKernelsGiveOneByOne) {
  std::random_device entropy;
  const uint32_t seed = entropy();
  SCOPED_TRACE(absl::StrCat("seed ", seed));
  std::mt19937 random(seed);
  const auto draw = [&](int n) { return static_cast<int>(random() % static_cast<uint32_t>(n)); };
  constexpr int kSlots = 8;
  for (int program = 0; program < 60; ++program) {
    // Most take one block and some; some are cut over the pool.
    const int64_t count = program % 6 == 0 ? 70000 : 4096 + draw(3000);
    const TensorType type(DType::kI32, {count});
    const Kernel* const neg = Make("neg", {type}, type);
    const Kernel* const add = Make("add", {type, type}, type);
    const Kernel* const mul = Make("mul", {type, TensorType(DType::kI32, {})}, type);
    std::vector<uint32_t> memory(static_cast<size_t>(count * kSlots));
    for (uint32_t& value : memory) value = static_cast<uint32_t>(random());
    const DeviceAddress base = rig_.Upload(0, memory);
    // Slots stand side by side; every other program has some that are shifted.
    const auto slot = [&] {
      const int64_t at = draw(kSlots - 1) * count;
      return program % 2 == 0 || draw(4) > 0 ? at : at + 1 + draw(static_cast<int>(count) - 1);
    };
    const auto overlaps = [&](int64_t a, int64_t b) { return a < b + count && b < a + count; };
    Shut();
    for (int k = 0; k < 20; ++k) {
      const int kind = draw(3);
      const int64_t a = slot();
      const int64_t b = kind == 2 ? slot() + draw(10) : slot();
      int64_t out = slot();
      // A kernel's own output is in an input's place or away from it.
      while ((overlaps(out, a) && out != a) || (kind == 1 && overlaps(out, b) && out != b) ||
             (kind == 2 && b >= out && b < out + count)) {
        out = slot();
      }
      const auto address = [&](int64_t at) {
        return base + static_cast<DeviceAddress>(at) * sizeof(uint32_t);
      };
      if (kind == 0) Launch(neg, {address(a)}, address(out));
      if (kind == 1) Launch(add, {address(a), address(b)}, address(out));
      if (kind == 2) Launch(mul, {address(a), address(b)}, address(out));
      for (int64_t i = 0; i < count; ++i) {
        const uint32_t x = memory[static_cast<size_t>(a + i)];
        const uint32_t y = memory[static_cast<size_t>(kind == 1 ? b + i : b)];
        memory[static_cast<size_t>(out + i)] = kind == 0 ? 0 - x : kind == 1 ? x + y : x * y;
      }
    }
    OpenGate();
    ASSERT_EQ(rig_.Download<uint32_t>(0, base, count * kSlots), memory) << program;
  }
  EXPECT_NE(TheLog()->Take().find("[2048,4096)"), std::string::npos) << "nothing ran together";
}

}  // namespace
}  // namespace chorus
