#include "core/backend/testing/backend_conformance.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/backend/testing/device_rig.h"
#include "core/base/error.h"
#include "core/base/mutex.h"
#include "core/ops/op.h"

namespace chorus {

uint64_t TestSeed() {
  static const uint64_t seed = [] {
    const char* given = std::getenv("CHORUS_TEST_SEED");
    const uint64_t s =
        given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device()();
    std::printf("CHORUS_TEST_SEED=%llu\n", static_cast<unsigned long long>(s));
    return s;
  }();
  return seed;
}

// --- Kernels ---

namespace {

class AffineKernel : public HostKernel {
 public:
  explicit AffineKernel(int64_t count) : HostKernel(count, 12) {}
  absl::Status Run(absl::Span<const void* const> inputs, absl::Span<void* const> outputs,
                   int64_t begin, int64_t end) const override {
    const auto* a = static_cast<const float*>(inputs[0]);
    const auto* b = static_cast<const float*>(inputs[1]);
    auto* out = static_cast<float*>(outputs[0]);
    for (int64_t i = begin; i < end; ++i) out[i] = 2 * a[i] + b[i];
    return absl::OkStatus();
  }
};

class FailingKernel : public HostKernel {
 public:
  FailingKernel() : HostKernel(1, 1) {}
  absl::Status Run(absl::Span<const void* const>, absl::Span<void* const>, int64_t,
                   int64_t) const override {
    return absl::AbortedError("test_fail fails");
  }
};

}  // namespace

absl::StatusOr<std::unique_ptr<HostKernel>> MakeTestKernel(const NodeView& node,
                                                           absl::Span<const TensorType> outputs) {
  if (node.op == "test_affine") {
    return std::unique_ptr<HostKernel>(std::make_unique<AffineKernel>(outputs[0].num_elements()));
  }
  if (node.op == "test_fail") return std::unique_ptr<HostKernel>(std::make_unique<FailingKernel>());
  return absl::InternalError(absl::StrCat("no kernel for ", node.op));
}

namespace {

using Kind = CollectiveKind;

constexpr Kind kKinds[] = {Kind::kAllReduce, Kind::kReduce,        Kind::kBroadcast,
                           Kind::kAllGather, Kind::kReduceScatter, Kind::kBarrier};

template <typename T>
constexpr DType DTypeOf() {
  return std::is_same<T, float>::value    ? DType::kF32
         : std::is_same<T, double>::value ? DType::kF64
                                          : DType::kI64;
}

// Whole numbers that differ by member, operand and element.
template <typename T>
T Value(int member, int operand, int64_t i) {
  return static_cast<T>((member * 31 + operand * 17 + i * 7 + i / 53) % 1009 - 500);
}

constexpr int kUntouched = 7777;

enum class Outputs {
  kOwn,      // each member its own
  kShared,   // one copy of an equal result
  kInPlace,  // each member's result in the place of its input
  kNone,     // order only
};

struct Case {
  Kind kind = Kind::kAllReduce;
  int size = 2;
  int64_t count = 1;
  int root = 0;
  std::vector<int32_t> present;  // empty: all
  Outputs outputs = Outputs::kOwn;

  bool IsPresent(int m) const {
    return present.empty() || std::find(present.begin(), present.end(), m) != present.end();
  }
  bool HasInput(int m) const {
    return kind != Kind::kBarrier && (kind != Kind::kBroadcast || m == root);
  }
  bool HasOutput(int m) const {
    return kind != Kind::kBarrier && (kind != Kind::kReduce || m == root);
  }
  int NumInputs() const { return kind == Kind::kReduceScatter ? size : 1; }
  int NumOutputs() const { return kind == Kind::kAllGather ? size : 1; }
  std::string ToString() const {
    std::string text =
        absl::StrCat("kind ", static_cast<int>(kind), " size ", size, " count ", count, " root ",
                     root, " outputs ", static_cast<int>(outputs), " present");
    for (const int32_t m : present) absl::StrAppend(&text, " ", m);
    return text;
  }
};

// What member m's output `operand` must hold: the definition, element by element.
template <typename T>
std::vector<T> Expected(const Case& c, int m, int operand) {
  std::vector<T> result(c.count, T{0});
  for (int64_t i = 0; i < c.count; ++i) {
    switch (c.kind) {
      case Kind::kAllReduce:
      case Kind::kReduce:
        for (int k = 0; k < c.size; ++k) {
          if (c.IsPresent(k)) result[i] += Value<T>(k, 0, i);
        }
        break;
      case Kind::kReduceScatter:
        for (int k = 0; k < c.size; ++k) {
          if (c.IsPresent(k)) result[i] += Value<T>(k, m, i);
        }
        break;
      case Kind::kBroadcast:
        if (c.IsPresent(c.root)) result[i] = Value<T>(c.root, 0, i);
        break;
      case Kind::kAllGather:
        if (c.IsPresent(operand)) result[i] = Value<T>(operand, 0, i);
        break;
      default:
        break;
    }
  }
  return result;
}

template <typename T>
class CaseRunner {
 public:
  CaseRunner(DeviceRig* rig, std::mt19937_64* random) : rig_(rig), random_(random) {}

  void Run(const Case& c, std::vector<std::unique_ptr<Communicator>>* members) {
    SCOPED_TRACE(c.ToString());
    std::vector<CollectiveCall> calls(c.size);
    const std::vector<T> untouched(c.count, static_cast<T>(kUntouched));
    std::vector<DeviceAddress> shared(c.NumOutputs());
    if (c.outputs == Outputs::kShared) {
      for (DeviceAddress& address : shared) address = rig_->Upload(0, untouched);
    }
    for (int m = 0; m < c.size; ++m) {
      if (!c.IsPresent(m)) continue;
      CollectiveCall& call = calls[m];
      call.kind = c.kind;
      call.dtype = DTypeOf<T>();
      call.count = c.count;
      call.present = c.present;
      call.root = c.root;
      call.reduction = Reduction::kSum;
      if (c.HasInput(m)) {
        for (int j = 0; j < c.NumInputs(); ++j) {
          std::vector<T> data(c.count);
          for (int64_t i = 0; i < c.count; ++i) data[i] = Value<T>(m, j, i);
          call.inputs.push_back(rig_->Upload(m, data));
        }
      }
      if (c.HasOutput(m)) {
        for (int j = 0; j < c.NumOutputs(); ++j) {
          DeviceAddress address = 0;
          switch (c.outputs) {
            case Outputs::kOwn:
              address = rig_->Upload(m, untouched);
              break;
            case Outputs::kShared:
              address = shared[j];
              break;
            case Outputs::kInPlace: {
              // The operand of the same place.
              const int source = c.kind == Kind::kReduceScatter ? m : 0;
              const bool has = c.HasInput(m) && (c.kind != Kind::kAllGather || j == m);
              address = has ? call.inputs[source] : rig_->Upload(m, untouched);
              break;
            }
            case Outputs::kNone:
              break;
          }
          call.outputs.push_back(address);
        }
      }
    }
    std::vector<int> order(c.size);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), *random_);
    for (const int m : order) {
      if (!c.IsPresent(m)) continue;
      const absl::Status enqueued = (*members)[m]->Enqueue(calls[m], rig_->stream(m));
      ASSERT_TRUE(enqueued.ok()) << enqueued;
    }
    for (int m = 0; m < c.size; ++m) {
      if (!c.IsPresent(m)) continue;
      const absl::Status status = rig_->Synchronize(m);
      ASSERT_TRUE(status.ok()) << "member " << m << ": " << status;
    }
    for (int m = 0; m < c.size; ++m) {
      for (size_t j = 0; j < calls[m].outputs.size(); ++j) {
        if (calls[m].outputs[j] == 0) continue;
        const auto got = rig_->Download<T>(m, calls[m].outputs[j], c.count);
        ASSERT_EQ(got, Expected<T>(c, m, static_cast<int>(j))) << "member " << m << " output " << j;
      }
    }
    rig_->FreeAll();
  }

 private:
  DeviceRig* const rig_;
  std::mt19937_64* const random_;
};

// Results are shared where there is one address space and they are equal.
bool Sensible(const Case& c, const Backend& backend) {
  return c.outputs != Outputs::kShared ||
         (backend.host_addressable() && c.kind != Kind::kReduceScatter);
}

template <typename T>
void RunMatrix(const BackendConformanceParam& param, const std::vector<int>& sizes,
               const std::vector<int64_t>& counts, const std::vector<Outputs>& outputs) {
  std::mt19937_64 random(TestSeed());
  for (const int size : sizes) {
    DeviceRig rig(param.open(size, &MakeTestKernel));
    auto members = rig.OpenAll(1);
    CaseRunner<T> runner(&rig, &random);
    for (const Kind kind : kKinds) {
      for (const int64_t count : counts) {
        for (const Outputs o : outputs) {
          Case c;
          c.kind = kind;
          c.size = size;
          c.count = count;
          c.outputs = o;
          c.root = static_cast<int>(random() % size);
          if (!Sensible(c, *rig.backend())) continue;
          runner.Run(c, &members);
          if (testing::Test::HasFatalFailure()) return;
        }
      }
    }
  }
}

const std::vector<int>& Sizes() {
  static const auto* sizes = new std::vector<int>{1, 2, 3, 5, 8};
  return *sizes;
}

// 0, 1, primes, and one on each side of vectors, cache lines and 1 KiB.
const std::vector<int64_t>& SmallCounts() {
  static const auto* counts =
      new std::vector<int64_t>{0, 1, 2, 7, 15, 16, 17, 31, 63, 64, 65, 127, 128, 129, 257, 1021};
  return *counts;
}

TEST_P(BackendConformance, CollectivesOfF32EqualTheNaiveLoop) {
  RunMatrix<float>(GetParam(), Sizes(), SmallCounts(), {Outputs::kOwn, Outputs::kShared});
}

TEST_P(BackendConformance, CollectivesOfF64EqualTheNaiveLoop) {
  RunMatrix<double>(GetParam(), Sizes(), SmallCounts(), {Outputs::kOwn});
}

TEST_P(BackendConformance, CollectivesOfI64EqualTheNaiveLoop) {
  RunMatrix<int64_t>(GetParam(), Sizes(), SmallCounts(), {Outputs::kOwn});
}

TEST_P(BackendConformance, CollectivesMayWorkInPlaceOrOnlyOrder) {
  RunMatrix<float>(GetParam(), {2, 3, 8}, {0, 1, 17, 1021}, {Outputs::kInPlace, Outputs::kNone});
}

TEST_P(BackendConformance, LargeCollectivesEqualTheNaiveLoopAtChunkEdges) {
  RunMatrix<float>(GetParam(), {2, 5}, {65535, 65536, 65537, 200003},
                   {Outputs::kOwn, Outputs::kShared, Outputs::kInPlace});
}

TEST_P(BackendConformance, MissingMembersGiveZeros) {
  std::mt19937_64 random(TestSeed());
  for (const int size : {2, 3, 5, 8}) {
    DeviceRig rig(GetParam().open(size, &MakeTestKernel));
    auto members = rig.OpenAll(1);
    CaseRunner<float> runner(&rig, &random);
    for (int round = 0; round < 30; ++round) {
      Case c;
      c.kind = kKinds[random() % 6];
      c.size = size;
      c.count = round % 3 == 0 ? 1021 : 3;
      c.root = static_cast<int>(random() % size);
      for (int m = 0; m < size; ++m) {
        if (random() % 2 == 0) c.present.push_back(m);
      }
      if (c.present.empty()) c.present.push_back(static_cast<int>(random() % size));
      c.outputs = Outputs::kShared;
      if (round % 2 == 0 || !Sensible(c, *rig.backend())) c.outputs = Outputs::kOwn;
      runner.Run(c, &members);
      if (HasFatalFailure()) return;
    }
  }
}

// Floats that round: the bits tell the order of the additions, which is that of the members for
// each element, whatever the count, the place and the run.
template <typename T>
void CheckBits(const BackendConformanceParam& param) {
  std::mt19937_64 random(TestSeed());
  std::uniform_real_distribution<T> uniform(-1, 1);
  constexpr int kSize = 5;
  constexpr int64_t kMost = 150001;
  std::vector<std::vector<T>> data(kSize, std::vector<T>(kMost));
  for (auto& row : data) {
    for (T& x : row) x = uniform(random) * std::pow(T{10}, static_cast<int>(random() % 7));
  }
  std::vector<T> expected = data[0];
  for (int m = 1; m < kSize; ++m) {
    for (int64_t i = 0; i < kMost; ++i) expected[i] = expected[i] + data[m][i];
  }
  DeviceRig rig(param.open(kSize, &MakeTestKernel));
  auto members = rig.OpenAll(1);
  for (const int64_t count : {int64_t{1}, int64_t{33}, int64_t{4099}, kMost, kMost}) {
    std::vector<DeviceAddress> results(kSize);
    for (int m = kSize - 1; m >= 0; --m) {
      results[m] = rig.Upload(m, std::vector<T>(count));
      CollectiveCall call;
      call.kind = Kind::kAllReduce;
      call.reduction = Reduction::kSum;
      call.dtype = DTypeOf<T>();
      call.count = count;
      call.inputs = {rig.Upload(m, std::vector<T>(data[m].begin(), data[m].begin() + count))};
      call.outputs = {results[m]};
      ASSERT_TRUE(members[m]->Enqueue(call, rig.stream(m)).ok());
    }
    for (int m = 0; m < kSize; ++m) {
      ASSERT_TRUE(rig.Synchronize(m).ok());
      const auto got = rig.Download<T>(m, results[m], count);
      ASSERT_EQ(std::memcmp(got.data(), expected.data(), count * sizeof(T)), 0)
          << "count " << count << " member " << m;
    }
    rig.FreeAll();
  }
}

TEST_P(BackendConformance, FloatSumsAreInMemberOrderBitForBit) {
  CheckBits<float>(GetParam());
  CheckBits<double>(GetParam());
}

TEST_P(BackendConformance, IntegersWrap) {
  DeviceRig rig(GetParam().open(2, &MakeTestKernel));
  auto members = rig.OpenAll(1);
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  for (const int64_t count : {1, 100}) {
    DeviceAddress result = 0;
    for (int m = 1; m >= 0; --m) {
      result = rig.Upload(m, std::vector<int64_t>(count));
      CollectiveCall call = rig.AllReduceCall(DType::kI64, count, 0, result);
      call.inputs = {rig.Upload(m, std::vector<int64_t>(count, m == 0 ? kMax : 2))};
      ASSERT_TRUE(members[m]->Enqueue(call, rig.stream(m)).ok());
    }
    ASSERT_TRUE(rig.Synchronize(0).ok());
    EXPECT_EQ(rig.Download<int64_t>(0, result, count),
              std::vector<int64_t>(count, std::numeric_limits<int64_t>::min() + 1));
  }
}

CollectiveCall PairCall(Kind kind, int peer, int64_t count, DeviceAddress memory) {
  CollectiveCall call;
  call.kind = kind;
  call.dtype = DType::kF32;
  call.count = count;
  call.root = peer;
  (kind == Kind::kSend ? call.inputs : call.outputs) = {memory};
  return call;
}

TEST_P(BackendConformance, SendAndRecvMeetInTheirPairWhateverOthersDo) {
  constexpr int kSize = 4;
  DeviceRig rig(GetParam().open(kSize, &MakeTestKernel));
  auto members = rig.OpenAll(1);
  // Every member sends to the next and receives from the one before; the last starts with the recv
  // and breaks the circle.
  std::vector<DeviceAddress> received(kSize);
  for (const int m : {2, 0, 3, 1}) {
    const DeviceAddress mine = rig.Upload(m, std::vector<float>(3, 10.0f * m));
    received[m] = rig.Upload(m, std::vector<float>(3, -1));
    const CollectiveCall send = PairCall(Kind::kSend, (m + 1) % kSize, 3, mine);
    const CollectiveCall recv = PairCall(Kind::kRecv, (m + kSize - 1) % kSize, 3, received[m]);
    ASSERT_TRUE(members[m]->Enqueue(m == 3 ? recv : send, rig.stream(m)).ok());
    ASSERT_TRUE(members[m]->Enqueue(m == 3 ? send : recv, rig.stream(m)).ok());
  }
  for (int m = 0; m < kSize; ++m) {
    ASSERT_TRUE(rig.Synchronize(m).ok());
    EXPECT_EQ(rig.Download<float>(m, received[m], 3),
              std::vector<float>(3, 10.0f * ((m + kSize - 1) % kSize)));
  }
}

TEST_P(BackendConformance, AMemberMayRunAheadOfTheOthers) {
  constexpr int kSize = 3;
  constexpr int kCalls = 300;
  DeviceRig rig(GetParam().open(kSize, &MakeTestKernel));
  auto members = rig.OpenAll(1);
  std::vector<DeviceAddress> inputs(kSize);
  std::vector<DeviceAddress> outputs;
  for (int m = 0; m < kSize; ++m) {
    std::vector<float> data(kCalls);
    for (int i = 0; i < kCalls; ++i) data[i] = Value<float>(m, 0, i);
    inputs[m] = rig.Upload(m, data);
    outputs.push_back(rig.Upload(m, std::vector<float>(kCalls, kUntouched)));
  }
  std::mt19937_64 random(TestSeed());
  std::vector<int> called(kSize, 0);
  for (int left = kSize * kCalls; left > 0;) {
    const int m = static_cast<int>(random() % kSize);
    for (int burst = static_cast<int>(random() % 40); burst > 0 && called[m] < kCalls; --burst) {
      const int i = called[m]++;
      --left;
      CollectiveCall call = rig.AllReduceCall(DType::kF32, 1, inputs[m] + i * sizeof(float),
                                              outputs[m] + i * sizeof(float));
      ASSERT_TRUE(members[m]->Enqueue(call, rig.stream(m)).ok());
    }
  }
  for (int m = 0; m < kSize; ++m) {
    ASSERT_TRUE(rig.Synchronize(m).ok());
    const auto got = rig.Download<float>(m, outputs[m], kCalls);
    for (int i = 0; i < kCalls; ++i) {
      ASSERT_EQ(got[i], Value<float>(0, 0, i) + Value<float>(1, 0, i) + Value<float>(2, 0, i));
    }
  }
}

TEST_P(BackendConformance, SubsetsMeetIndependentlyOfEachOther) {
  DeviceRig rig(GetParam().open(3, &MakeTestKernel));
  auto members = rig.OpenAll(1);
  std::vector<DeviceAddress> in(3);
  for (int m = 0; m < 3; ++m) in[m] = rig.Upload(m, std::vector<float>{1.0f + m});
  const DeviceAddress first = rig.Upload(0, std::vector<float>{-1});
  const DeviceAddress second = rig.Upload(2, std::vector<float>{-1});
  // Results for one member of each pair; the other takes part without.
  const auto call = [&](int m, std::vector<int32_t> present, DeviceAddress out) {
    CollectiveCall c = rig.AllReduceCall(DType::kF32, 1, in[m], out);
    c.present = std::move(present);
    return members[m]->Enqueue(c, rig.stream(m));
  };
  // Member 2 is in the second call only, and comes first.
  ASSERT_TRUE(call(2, {1, 2}, second).ok());
  ASSERT_TRUE(call(1, {0, 1}, 0).ok());
  ASSERT_TRUE(call(1, {1, 2}, 0).ok());
  ASSERT_TRUE(call(0, {0, 1}, first).ok());
  for (int m = 0; m < 3; ++m) ASSERT_TRUE(rig.Synchronize(m).ok());
  EXPECT_EQ(rig.Download<float>(0, first, 1)[0], 3);
  EXPECT_EQ(rig.Download<float>(2, second, 1)[0], 5);
}

TEST_P(BackendConformance, MembersMayLiveOnThreadsOfTheirOwn) {
  constexpr int kSize = 4;
  constexpr int kCalls = 60;
  DeviceRig rig(GetParam().open(kSize, &MakeTestKernel));
  auto members = rig.OpenAll(1);
  // Small ones run where they are enqueued, large ones on the pool.
  const auto count_of = [](int i) { return i % 6 == 5 ? 70001 : 1 + i; };
  std::vector<std::vector<DeviceAddress>> out(kSize);
  std::vector<DeviceAddress> in(kSize);
  for (int m = 0; m < kSize; ++m) {
    in[m] = rig.Upload(m, std::vector<float>(70001, 1.0f + m));
    for (int i = 0; i < kCalls; ++i) {
      out[m].push_back(i % 6 == 5 ? 0 : rig.Upload(m, std::vector<float>(count_of(i))));
    }
  }
  std::vector<DeviceAddress> large(kSize);
  for (int m = 0; m < kSize; ++m) {
    large[m] = rig.backend()->host_addressable() && m > 0
                   ? large[0]
                   : rig.Upload(m, std::vector<float>(70001));
  }
  std::atomic<int> failures{0};
  std::vector<std::thread> threads;
  for (int m = 0; m < kSize; ++m) {
    threads.emplace_back([&, m] {
      for (int i = 0; i < kCalls; ++i) {
        const CollectiveCall call = rig.AllReduceCall(DType::kF32, count_of(i), in[m],
                                                      out[m][i] == 0 ? large[m] : out[m][i]);
        if (!members[m]->Enqueue(call, rig.stream(m)).ok()) ++failures;
        if (i % 10 == 9 && !rig.Synchronize(m).ok()) ++failures;
      }
      if (!rig.Synchronize(m).ok()) ++failures;
    });
  }
  for (std::thread& thread : threads) thread.join();
  ASSERT_EQ(failures, 0);
  for (int m = 0; m < kSize; ++m) {
    for (int i = 0; i < kCalls; ++i) {
      if (out[m][i] == 0) continue;
      ASSERT_EQ(rig.Download<float>(m, out[m][i], count_of(i)),
                std::vector<float>(count_of(i), 10.0f))
          << "member " << m << " call " << i;
    }
  }
  for (int m = 0; m < kSize; ++m) {
    EXPECT_EQ(rig.Download<float>(m, large[m], 70001), std::vector<float>(70001, 10.0f));
  }
}

TEST_P(BackendConformance, AStreamRunsInOrder) {
  DeviceRig rig(GetParam().open(1, &MakeTestKernel));
  constexpr int64_t kCount = 100003;
  std::vector<float> data(kCount);
  for (int64_t i = 0; i < kCount; ++i) data[i] = Value<float>(0, 0, i);
  const DeviceAddress a = rig.Allocate(0, kCount * 4);
  const DeviceAddress b = rig.Allocate(0, kCount * 4);
  std::vector<float> back(kCount);
  Stream* stream = rig.stream(0);
  std::vector<int> order;
  stream->CopyFromHost(a, data.data(), kCount * 4);
  stream->Callback([&](absl::Status) { order.push_back(1); });
  stream->Copy(b, a, kCount * 4);
  stream->CopyFromHost(a, back.data(), kCount * 4);  // zeros: what was copied must not change
  stream->Callback([&](absl::Status) { order.push_back(2); });
  stream->CopyToHost(back.data(), b, kCount * 4);
  stream->Copy(b, a, 0);
  ASSERT_TRUE(rig.Synchronize(0).ok());
  EXPECT_EQ(back, data);
  EXPECT_EQ(order, (std::vector<int>{1, 2}));
}

TEST_P(BackendConformance, EventsOrderStreams) {
  constexpr int kStreams = 4;
  constexpr int kRounds = 50;
  DeviceRig rig(GetParam().open(1, &MakeTestKernel));
  Device* device = rig.backend()->device(0);
  // A value goes round the streams of a device; each step may start only when the one before has
  // ended. Every third hop is large enough for the pool.
  const int64_t count = 40000;
  std::vector<DeviceAddress> memory;
  std::vector<std::unique_ptr<Stream>> streams;
  std::vector<std::unique_ptr<Event>> events;
  for (int s = 0; s < kStreams; ++s) {
    memory.push_back(rig.Upload(0, std::vector<float>(count, s == 0 ? 5.0f : -1.0f)));
    streams.push_back(device->CreateStream());
    events.push_back(device->CreateEvent());
  }
  std::vector<float> zeros(count, 0.0f);
  for (int round = 0; round < kRounds; ++round) {
    const int from = round % kStreams;
    const int to = (round + 1) % kStreams;
    const int64_t bytes = 4 * (round % 3 == 0 ? count : 1);
    streams[to]->Wait(events[from].get());
    streams[to]->Copy(memory[to], memory[from], bytes);
    streams[to]->Record(events[to].get());
    // Once it has been taken, the source is overwritten.
    streams[from]->Wait(events[to].get());
    streams[from]->CopyFromHost(memory[from], zeros.data(), 4);
    streams[from]->Record(events[from].get());
  }
  for (const auto& stream : streams) ASSERT_TRUE(rig.SynchronizeStream(stream.get()).ok());
  EXPECT_EQ(rig.Download<float>(0, memory[kRounds % kStreams], 1)[0], 5.0f);
}

TEST_P(BackendConformance, AnEventMeansItsRecordAtTheTimeOfTheWait) {
  DeviceRig rig(GetParam().open(3, &MakeTestKernel));
  auto members = rig.OpenAll(1);
  auto event = rig.backend()->device(0)->CreateEvent();
  rig.stream(2)->Wait(event.get());  // never recorded: passes at once
  ASSERT_TRUE(rig.Synchronize(2).ok());

  // Stream 0 stands at a barrier of {0, 1} that member 1 has not called.
  CollectiveCall barrier;
  barrier.kind = Kind::kBarrier;
  barrier.present = {0, 1};
  ASSERT_TRUE(members[0]->Enqueue(barrier, rig.stream(0)).ok());
  rig.stream(0)->Record(event.get());
  std::atomic<bool> passed{false};
  rig.stream(2)->Wait(event.get());
  rig.stream(2)->Callback([&](absl::Status) { passed = true; });
  // Recorded anew on an idle stream, the event has passed, but that is not what stream 2 waits for.
  rig.stream(1)->Record(event.get());
  auto other = rig.backend()->device(0)->CreateStream();
  other->Wait(event.get());
  ASSERT_TRUE(rig.SynchronizeStream(other.get()).ok());
  EXPECT_FALSE(passed);
  ASSERT_TRUE(members[1]->Enqueue(barrier, rig.stream(1)).ok());
  ASSERT_TRUE(rig.Synchronize(2).ok());
  EXPECT_TRUE(passed);
}

TEST_P(BackendConformance, KernelsComputeSmallAndLarge) {
  DeviceRig rig(GetParam().open(2, &MakeTestKernel));
  for (const int64_t count : {0, 1, 1000, 300007}) {
    const TensorType type(DType::kF32, {count});
    const TensorType* inputs[] = {&type, &type};
    NodeView node;
    node.op = "test_affine";
    node.inputs = inputs;
    auto kernel = rig.backend()->device(1)->MakeKernel(node, {type});
    ASSERT_TRUE(kernel.ok()) << kernel.status();
    std::vector<float> a(count);
    std::vector<float> b(count);
    std::vector<float> expected(count);
    for (int64_t i = 0; i < count; ++i) {
      a[i] = Value<float>(0, 0, i);
      b[i] = Value<float>(1, 0, i);
      expected[i] = 2 * a[i] + b[i];
    }
    KernelCall call;
    call.kernel = kernel->get();
    call.inputs = {rig.Upload(1, a), rig.Upload(1, b)};
    call.outputs = {rig.Allocate(1, count * 4)};
    rig.stream(1)->Launch(call);
    ASSERT_TRUE(rig.Synchronize(1).ok());
    EXPECT_EQ(rig.Download<float>(1, call.outputs[0], count), expected) << count;
  }
  NodeView unknown;
  unknown.op = "no_such_op";
  EXPECT_EQ(rig.backend()->device(0)->MakeKernel(unknown, {}).status().code(),
            absl::StatusCode::kInternal);
}

TEST_P(BackendConformance, ACallbackGetsTheFirstFailureSinceTheLastOne) {
  DeviceRig rig(GetParam().open(1, &MakeTestKernel));
  const TensorType type(DType::kF32, {1});
  const TensorType* inputs[] = {&type};
  NodeView node;
  node.op = "test_fail";
  node.inputs = inputs;
  auto kernel = rig.backend()->device(0)->MakeKernel(node, {type});
  ASSERT_TRUE(kernel.ok());
  KernelCall call;
  call.kernel = kernel->get();
  call.inputs = {rig.Upload(0, std::vector<float>{1})};
  call.outputs = {rig.Upload(0, std::vector<float>{2})};
  const DeviceAddress after = rig.Upload(0, std::vector<float>{3});
  rig.stream(0)->Launch(call);
  rig.stream(0)->Copy(after, call.inputs[0], 4);  // runs all the same
  EXPECT_EQ(rig.Synchronize(0).code(), absl::StatusCode::kAborted);
  EXPECT_TRUE(rig.Synchronize(0).ok());
  EXPECT_EQ(rig.Download<float>(0, after, 1)[0], 1);
}

// A callback that enqueues the next, on a stream of its own.
struct Chain {
  std::vector<std::unique_ptr<Stream>> streams;
  std::vector<std::unique_ptr<Communicator>>* members = nullptr;
  DeviceRig* rig = nullptr;
  size_t step = 0;
  Mutex mutex;
  CondVar changed;
  bool done ABSL_GUARDED_BY(mutex) = false;

  void Step() {
    const size_t i = step++;
    if (i == streams.size()) {
      MutexLock lock(&mutex);
      done = true;
      changed.SignalAll();
      return;
    }
    CollectiveCall barrier;
    barrier.kind = Kind::kBarrier;
    for (int m = 0; m < 2 && i % 4 == 0; ++m) {
      if (!(*members)[m]->Enqueue(barrier, rig->stream(m)).ok()) return;
    }
    streams[i]->Callback([this](absl::Status) { Step(); });
  }
};

TEST_P(BackendConformance, CallbacksMayEnqueueWithoutEnd) {
  DeviceRig rig(GetParam().open(2, &MakeTestKernel));
  auto members = rig.OpenAll(1);
  Chain chain;
  chain.rig = &rig;
  chain.members = &members;
  // So deep a stack would overflow if each of them used some of it.
  for (int i = 0; i < 40000; ++i) {
    chain.streams.push_back(rig.backend()->device(0)->CreateStream());
  }
  chain.Step();
  MutexLock lock(&chain.mutex);
  for (int i = 0; i < 600 && !chain.done; ++i) {
    chain.changed.WaitFor(&chain.mutex, absl::Milliseconds(100));
  }
  ASSERT_TRUE(chain.done) << "stopped after " << chain.step << " steps";
}

TEST_P(BackendConformance, DevicesMayOutnumberCores) {
  constexpr int kSize = 64;
  DeviceRig rig(GetParam().open(kSize, &MakeTestKernel));
  auto members = rig.OpenAll(1);
  std::mt19937_64 random(TestSeed());
  CaseRunner<float> runner(&rig, &random);
  for (const Kind kind : {Kind::kAllReduce, Kind::kBarrier, Kind::kAllGather}) {
    Case c;
    c.kind = kind;
    c.size = kSize;
    c.count = 33;
    c.outputs = Outputs::kShared;
    if (!Sensible(c, *rig.backend())) c.outputs = Outputs::kOwn;
    runner.Run(c, &members);
  }
}

TEST_P(BackendConformance, AbortEndsWhatWaitsForAPeerAndBreaksTheCommunicator) {
  constexpr int kSize = 3;
  DeviceRig rig(GetParam().open(kSize, &MakeTestKernel));
  auto members = rig.OpenAll(1);
  CollectiveCall barrier;
  barrier.kind = Kind::kBarrier;
  for (int m = 0; m < kSize; ++m) ASSERT_TRUE(members[m]->Enqueue(barrier, rig.stream(m)).ok());
  for (int m = 0; m < kSize; ++m) ASSERT_TRUE(rig.Synchronize(m).ok());
  // Member 2 does not come. Member 0 waits in one call, with another behind it.
  ASSERT_TRUE(members[0]->Enqueue(barrier, rig.stream(0)).ok());
  ASSERT_TRUE(members[0]->Enqueue(barrier, rig.stream(0)).ok());
  ASSERT_TRUE(members[1]->Enqueue(barrier, rig.stream(1)).ok());
  auto event = rig.backend()->device(0)->CreateEvent();
  rig.stream(0)->Record(event.get());
  rig.stream(2)->Wait(event.get());
  std::thread([&] { members[1]->Abort(absl::AbortedError("rank 2 died")); }).join();
  for (const int m : {0, 1}) {
    const absl::Status status = rig.Synchronize(m);
    EXPECT_EQ(status.code(), absl::StatusCode::kAborted) << status;
    EXPECT_EQ(status.message(), "rank 2 died");
  }
  EXPECT_TRUE(rig.Synchronize(2).ok()) << "an event behind an aborted call passes";
  const DeviceAddress memory = rig.Upload(0, std::vector<float>{1, 2, 3, 4, 5, 6});
  for (int m = 0; m < kSize; ++m) {
    for (const Kind kind : kKinds) {
      CollectiveCall call;
      call.kind = kind;
      call.reduction = Reduction::kSum;
      call.dtype = DType::kF32;
      call.count = 1;
      call.root = 0;
      if (kind != Kind::kBarrier) {
        call.inputs.assign(kind == Kind::kReduceScatter ? kSize : 1, memory);
        call.outputs.assign(kind == Kind::kAllGather ? kSize : 1, memory);
      }
      EXPECT_EQ(members[m]->Enqueue(call, rig.stream(m)).code(),
                absl::StatusCode::kFailedPrecondition)
          << "member " << m << " kind " << static_cast<int>(kind);
    }
    members[m]->Abort(absl::AbortedError("again"));
  }
  // The streams are as good as new, and the devices meet again in another communicator.
  auto fresh = rig.OpenAll(2);
  for (int m = 0; m < kSize; ++m) ASSERT_TRUE(fresh[m]->Enqueue(barrier, rig.stream(m)).ok());
  for (int m = 0; m < kSize; ++m) EXPECT_TRUE(rig.Synchronize(m).ok());
}

TEST_P(BackendConformance, AbortReachesCallsBehindOtherWork) {
  DeviceRig rig(GetParam().open(2, &MakeTestKernel));
  auto members = rig.OpenAll(1);
  auto others = rig.OpenAll(2);
  CollectiveCall barrier;
  barrier.kind = Kind::kBarrier;
  // Member 0's stream stands at communicator 2, its call of communicator 1 is behind that.
  ASSERT_TRUE(others[0]->Enqueue(barrier, rig.stream(0)).ok());
  ASSERT_TRUE(members[0]->Enqueue(barrier, rig.stream(0)).ok());
  ASSERT_TRUE(members[1]->Enqueue(barrier, rig.stream(1)).ok());
  members[0]->Abort(absl::AbortedError("gone"));
  EXPECT_EQ(rig.Synchronize(1).code(), absl::StatusCode::kAborted);
  ASSERT_TRUE(others[1]->Enqueue(barrier, rig.stream(1)).ok());
  EXPECT_EQ(rig.Synchronize(0).code(), absl::StatusCode::kAborted);
  EXPECT_TRUE(rig.Synchronize(1).ok());
}

TEST_P(BackendConformance, ClosingAMemberEndsTheCallsThatWaitForIt) {
  DeviceRig rig(GetParam().open(3, &MakeTestKernel));
  auto members = rig.OpenAll(1);
  CollectiveCall barrier;
  barrier.kind = Kind::kBarrier;
  ASSERT_TRUE(members[0]->Enqueue(barrier, rig.stream(0)).ok());
  CollectiveCall pair = barrier;
  pair.present = {0, 1};
  members[2].reset();
  EXPECT_EQ(rig.Synchronize(0).code(), absl::StatusCode::kAborted);
  EXPECT_EQ(members[1]->Enqueue(pair, rig.stream(1)).code(), absl::StatusCode::kFailedPrecondition);
  members.clear();
  // All gone: the id may be used again, by other devices.
  auto again = rig.backend()->OpenCommunicator(1, {2}, 0);
  ASSERT_TRUE(again.ok()) << again.status();
  ASSERT_TRUE((*again)->Enqueue(barrier, rig.stream(2)).ok());
  EXPECT_TRUE(rig.Synchronize(2).ok());
}

TEST_P(BackendConformance, CallsThatDisagreeFailOnAllMembers) {
  DeviceRig rig(GetParam().open(2, &MakeTestKernel));
  const DeviceAddress memory = rig.Upload(0, std::vector<double>(8));
  const DeviceAddress others = rig.Upload(1, std::vector<double>(8));
  for (int variant = 0; variant < 4; ++variant) {
    auto members = rig.OpenAll(10 + variant);
    CollectiveCall first = rig.AllReduceCall(DType::kF32, 2, memory, memory);
    CollectiveCall second = rig.AllReduceCall(DType::kF32, 2, others, others);
    if (variant == 0) second.count = 1;
    if (variant == 1) second.dtype = DType::kF64;
    if (variant == 2) second.kind = Kind::kReduce, second.root = 0;
    if (variant == 3) {
      first = PairCall(Kind::kSend, 1, 1, memory);
      second = PairCall(Kind::kSend, 0, 1, others);
    }
    ASSERT_TRUE(members[0]->Enqueue(first, rig.stream(0)).ok());
    ASSERT_TRUE(members[1]->Enqueue(second, rig.stream(1)).ok());
    for (int m = 0; m < 2; ++m) {
      EXPECT_EQ(rig.Synchronize(m).code(), absl::StatusCode::kInternal) << "variant " << variant;
      EXPECT_EQ(members[m]->Enqueue(m == 0 ? first : second, rig.stream(m)).code(),
                absl::StatusCode::kFailedPrecondition);
    }
  }
}

TEST_P(BackendConformance, BadCallsAreRefusedAndLeaveTheCommunicatorUsable) {
  DeviceRig rig(GetParam().open(2, &MakeTestKernel));
  auto members = rig.OpenAll(1);
  const DeviceAddress memory = rig.Upload(0, std::vector<float>(8, 1.0f));
  const CollectiveCall good = rig.AllReduceCall(DType::kF32, 1, memory, memory);
  const auto code = [&](const CollectiveCall& call) {
    return members[0]->Enqueue(call, rig.stream(0)).code();
  };
  const auto changed = [&](const std::function<void(CollectiveCall*)>& change) {
    CollectiveCall call = good;
    change(&call);
    return code(call);
  };
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  constexpr auto kUnimplemented = absl::StatusCode::kUnimplemented;
  EXPECT_EQ(changed([](CollectiveCall* c) { c->count = -1; }), kInvalid);
  EXPECT_EQ(changed([](CollectiveCall* c) { c->dtype = DType::kBool; }), kUnimplemented);
  EXPECT_EQ(changed([](CollectiveCall* c) { c->reduction = Reduction::kBxor; }), kUnimplemented);
  EXPECT_EQ(changed([](CollectiveCall* c) { c->kind = Kind::kUnspecified; }), kUnimplemented);
  EXPECT_EQ(changed([](CollectiveCall* c) { c->inputs.clear(); }), kInvalid);
  EXPECT_EQ(changed([](CollectiveCall* c) { c->inputs = {0}; }), kInvalid);
  EXPECT_EQ(changed([](CollectiveCall* c) { c->outputs.push_back(8); }), kInvalid);
  EXPECT_EQ(changed([](CollectiveCall* c) { c->kind = Kind::kAllGather; }), kInvalid);
  EXPECT_EQ(changed([](CollectiveCall* c) { c->kind = Kind::kReduceScatter; }), kInvalid);
  EXPECT_EQ(changed([](CollectiveCall* c) { c->kind = Kind::kBroadcast; }), kInvalid);  // no root
  EXPECT_EQ(changed([](CollectiveCall* c) { c->kind = Kind::kReduce, c->root = 2; }), kInvalid);
  EXPECT_EQ(changed([](CollectiveCall* c) { c->present = {1}; }), kInvalid);
  EXPECT_EQ(changed([](CollectiveCall* c) { c->present = {1, 0}; }), kInvalid);
  EXPECT_EQ(changed([](CollectiveCall* c) { c->present = {0, 2}; }), kInvalid);
  EXPECT_EQ(code(PairCall(Kind::kSend, 0, 1, memory)), kInvalid);
  EXPECT_EQ(code(PairCall(Kind::kRecv, 2, 1, memory)), kInvalid);
  const DeviceAddress others = rig.Upload(1, std::vector<float>(8, 1.0f));
  ASSERT_TRUE(members[0]->Enqueue(good, rig.stream(0)).ok());
  ASSERT_TRUE(
      members[1]->Enqueue(rig.AllReduceCall(DType::kF32, 1, others, 0), rig.stream(1)).ok());
  EXPECT_TRUE(rig.Synchronize(0).ok());
  EXPECT_EQ(rig.Download<float>(0, memory, 1)[0], 2);
}

TEST_P(BackendConformance, OpeningACommunicatorChecksItsMembers) {
  DeviceRig rig(GetParam().open(3, &MakeTestKernel));
  Backend* backend = rig.backend();
  auto first = backend->OpenCommunicator(1, {0, 2}, 0);
  ASSERT_TRUE(first.ok());
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  EXPECT_EQ(backend->OpenCommunicator(1, {0, 2}, 0).status().code(), kInvalid);
  EXPECT_EQ(backend->OpenCommunicator(1, {0, 1}, 1).status().code(), kInvalid);
  EXPECT_EQ(backend->OpenCommunicator(1, {0, 2}, 2).status().code(), kInvalid);
  EXPECT_EQ(backend->OpenCommunicator(1, {0, 2}, -1).status().code(), kInvalid);
  EXPECT_EQ(backend->OpenCommunicator(2, {0, 3}, 0).status().code(), kInvalid);
  EXPECT_TRUE(backend->OpenCommunicator(1, {0, 2}, 1).ok());
}

TEST_P(BackendConformance, MemoryRunsOutCleanly) {
  DeviceRig rig(GetParam().open(2, &MakeTestKernel));
  Device* device = rig.backend()->device(1);
  const auto refused = device->Allocate(kConformanceMemoryBytes + 1);
  ASSERT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ErrorOf(refused.status()).reason, Reason::kOutOfMemory);
  EXPECT_NE(refused.status().message().find(absl::StrCat(kConformanceMemoryBytes + 1)),
            absl::string_view::npos)
      << refused.status();
  EXPECT_EQ(device->Allocate(-1).status().code(), absl::StatusCode::kInvalidArgument);
  // What is freed may be had again, as often as one likes.
  for (int i = 0; i < 20; ++i) {
    const auto half = device->Allocate(kConformanceMemoryBytes / 2);
    ASSERT_TRUE(half.ok()) << half.status();
    EXPECT_EQ(*half % 64, 0u);
    EXPECT_FALSE(device->Allocate(kConformanceMemoryBytes / 2 + 64).ok());
    device->Free(*half);
  }
  const auto empty = device->Allocate(0);
  ASSERT_TRUE(empty.ok());
  device->Free(*empty);
}

TEST_P(BackendConformance, AStreamMayGoWhileItsWorkIsUnderWay) {
  DeviceRig rig(GetParam().open(2, &MakeTestKernel));
  auto members = rig.OpenAll(1);
  CollectiveCall barrier;
  barrier.kind = Kind::kBarrier;
  std::atomic<bool> ran{false};
  auto stream = rig.backend()->device(0)->CreateStream();
  auto event = rig.backend()->device(0)->CreateEvent();
  ASSERT_TRUE(members[0]->Enqueue(barrier, stream.get()).ok());
  stream->Callback([&](absl::Status) { ran = true; });
  stream->Record(event.get());
  stream.reset();
  rig.stream(1)->Wait(event.get());
  auto another = rig.backend()->device(1)->CreateStream();
  ASSERT_TRUE(members[1]->Enqueue(barrier, another.get()).ok());
  ASSERT_TRUE(rig.Synchronize(1).ok());
  EXPECT_TRUE(ran);
}

}  // namespace
}  // namespace chorus
