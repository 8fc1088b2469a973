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
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/types/optional.h"
#include "core/backend/testing/device_rig.h"
#include "core/backend/testing/naive_reduction.h"
#include "core/base/error.h"
#include "core/base/mutex.h"
#include "core/ops/op.h"
#include "gmock/gmock.h"

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
  absl::Status Run(const HostBuffers& buffers, int64_t begin, int64_t end) const override {
    const auto* a = static_cast<const float*>(buffers.inputs[0]);
    const auto* b = static_cast<const float*>(buffers.inputs[1]);
    auto* out = static_cast<float*>(buffers.outputs[0]);
    for (int64_t i = begin; i < end; ++i) out[i] = 2 * a[i] + b[i];
    return absl::OkStatus();
  }
};

class ScratchKernel : public HostKernel {
 public:
  explicit ScratchKernel(int64_t count) : HostKernel(count, 8, count * 4) {}
  absl::Status Run(const HostBuffers& buffers, int64_t begin, int64_t end) const override {
    const auto* a = static_cast<const float*>(buffers.inputs[0]);
    auto* scratch = reinterpret_cast<float*>(buffers.workspace.data());
    auto* out = static_cast<float*>(buffers.outputs[0]);
    for (int64_t i = begin; i < end; ++i) scratch[i] = a[i];
    for (int64_t i = begin; i < end; ++i) out[i] = scratch[i];
    return absl::OkStatus();
  }
};

class FailingKernel : public HostKernel {
 public:
  FailingKernel() : HostKernel(1, 1) {}
  absl::Status Run(const HostBuffers&, int64_t, int64_t) const override {
    return absl::AbortedError("test_fail fails");
  }
};

}  // namespace

HostKernelOrError MakeTestKernel(const NodeView& node, absl::Span<const TensorType> outputs) {
  if (node.op == "test_affine") {
    return std::unique_ptr<HostKernel>(std::make_unique<AffineKernel>(outputs[0].num_elements()));
  }
  if (node.op == "test_scratch") {
    return std::unique_ptr<HostKernel>(std::make_unique<ScratchKernel>(outputs[0].num_elements()));
  }
  if (node.op == "test_fail" || node.op == "neg") {
    return std::unique_ptr<HostKernel>(std::make_unique<FailingKernel>());
  }
  return absl::InternalError(absl::StrCat("no kernel for ", node.op));
}

namespace {

using Kind = CollectiveKind;

constexpr Kind kKinds[] = {Kind::kAllReduce, Kind::kReduce,        Kind::kBroadcast,
                           Kind::kAllGather, Kind::kReduceScatter, Kind::kGather,
                           Kind::kScatter,   Kind::kAllToAll,      Kind::kBarrier};

// test_affine of two tensors of this type.
absl::StatusOr<std::unique_ptr<Kernel>> MakeAffine(DeviceRig* rig, int device,
                                                   const TensorType& type) {
  const TensorType* inputs[] = {&type, &type};
  NodeView node;
  node.op = "test_affine";
  node.inputs = inputs;
  return rig->backend()->device(device)->MakeKernel(node, {type});
}

// Kinds of which each member gives, or gets, several pieces or one of its own size.
bool HasPieces(Kind kind) {
  return kind == Kind::kAllGather || kind == Kind::kGather || kind == Kind::kScatter ||
         kind == Kind::kReduceScatter || kind == Kind::kAllToAll;
}

bool Reduces(Kind kind) {
  return kind == Kind::kAllReduce || kind == Kind::kReduce || kind == Kind::kReduceScatter;
}

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
  Reduction reduction = Reduction::kSum;
  DType dtype = DType::kF32;
  int size = 2;
  int64_t count = 1;
  bool uneven = false;  // pieces of several sizes, none of some
  int root = 0;
  std::vector<int32_t> present;  // empty: all
  Outputs outputs = Outputs::kOwn;

  bool IsPresent(int m) const {
    return present.empty() || std::find(present.begin(), present.end(), m) != present.end();
  }
  int NumInputs(int m) const {
    switch (kind) {
      case Kind::kBarrier:
        return 0;
      case Kind::kBroadcast:
        return m == root ? 1 : 0;
      case Kind::kScatter:
        return m == root ? size : 0;
      case Kind::kReduceScatter:
      case Kind::kAllToAll:
        return size;
      default:
        return 1;
    }
  }
  int NumOutputs(int m) const {
    switch (kind) {
      case Kind::kBarrier:
        return 0;
      case Kind::kReduce:
        return m == root ? 1 : 0;
      case Kind::kGather:
        return m == root ? size : 0;
      case Kind::kAllGather:
      case Kind::kAllToAll:
        return size;
      default:
        return 1;
    }
  }
  // Elements of what `from` gives to `to`.
  int64_t CountOf(int from, int to) const {
    if (!uneven) return count;
    switch (kind) {
      case Kind::kAllGather:
      case Kind::kGather:
        return (count + 13 * from) % (count + 3);
      case Kind::kScatter:
      case Kind::kReduceScatter:
        return (count + 13 * to) % (count + 3);
      case Kind::kAllToAll:
        return (count + 7 * from + 13 * to) % (count + 3);
      default:
        return count;
    }
  }
  int64_t InputCount(int m, int operand) const { return CountOf(m, operand); }
  int64_t OutputCount(int m, int operand) const { return CountOf(operand, m); }
  // Which of m's inputs stands where its output `operand` may be written.
  int InPlace(int m, int operand) const {
    switch (kind) {
      case Kind::kReduceScatter:
      case Kind::kScatter:
        return m < NumInputs(m) ? m : -1;
      case Kind::kAllToAll:
        return operand == m ? m : -1;
      case Kind::kAllGather:
      case Kind::kGather:
        return operand == m ? 0 : -1;
      default:
        return NumInputs(m) > 0 ? 0 : -1;
    }
  }
  bool WantsHolders() const {
    return Reduces(kind) && IsFloating(dtype) &&
           (reduction == Reduction::kMin || reduction == Reduction::kMax);
  }
  bool WantsFactors(int m) const {
    return Reduces(kind) && reduction == Reduction::kProduct &&
           (kind != Kind::kReduce || m == root);
  }
  std::string ToString() const {
    std::string text =
        absl::StrCat(CollectiveKindName(kind), " ", ReductionName(reduction), " ", DTypeName(dtype),
                     " size ", size, " count ", count, " uneven ", uneven, " root ", root,
                     " outputs ", static_cast<int>(outputs), " present");
    for (const int32_t m : present) absl::StrAppend(&text, " ", m);
    return text;
  }
};

using Bytes = std::vector<uint8_t>;

// What goes in, and by the definition what must come out.
class Model {
 public:
  Model(const Case& c, std::mt19937_64* random) : c_(c), element_(DTypeBytes(c.dtype)) {
    for (int m = 0; m < c.size; ++m) {
      factors_.push_back(static_cast<float>(0.3 * (m + 1)));
      data_.emplace_back();
      for (int j = 0; j < c.NumInputs(m); ++j) {
        data_[m].push_back(RandomElements(c.dtype, c.InputCount(m, j), /*with_nan=*/true, random));
        if (Reduces(c.kind) && c.size > 1) MakeTies(m, j, random);
      }
    }
  }

  const Bytes& Input(int m, int operand) const { return data_[m][operand]; }
  double Factor(int m) const { return factors_[m]; }

  // Of member m's output `operand`.
  Bytes Output(int m, int operand) const {
    const int64_t count = c_.OutputCount(m, operand);
    Bytes result(count * element_, 0);
    if (Reduces(c_.kind)) return Reduced(c_.kind == Kind::kReduceScatter ? m : 0);
    int from = operand;
    int index = 0;
    if (c_.kind == Kind::kBroadcast || c_.kind == Kind::kScatter) from = c_.root;
    if (c_.kind == Kind::kScatter || c_.kind == Kind::kAllToAll) index = m;
    return c_.IsPresent(from) ? data_[from][index] : result;
  }
  // Of member m's input `operand`.
  std::vector<float> Holders(int m, int operand) const {
    const Bytes result = Reduced(operand);
    std::vector<float> holders;
    for (size_t i = 0; i < result.size(); i += element_) {
      holders.push_back(NaiveHolders(c_.dtype, Operands(operand, i), result.data() + i, m));
    }
    return holders;
  }
  const Bytes& FactorOf(int m, int from) const {
    return data_[from][c_.kind == Kind::kReduceScatter ? m : 0];
  }

 private:
  void MakeTies(int m, int j, std::mt19937_64* random) {
    for (size_t i = 0; m > 0 && i < data_[m][j].size(); i += element_) {
      if ((*random)() % 3 != 0) continue;
      std::copy_n(data_[m - 1][j].begin() + i, element_, data_[m][j].begin() + i);
    }
  }
  std::vector<const uint8_t*> Operands(int operand, size_t i) const {
    std::vector<const uint8_t*> operands;
    for (int m = 0; m < c_.size; ++m) {
      operands.push_back(c_.IsPresent(m) ? data_[m][operand].data() + i : nullptr);
    }
    return operands;
  }
  Bytes Reduced(int operand) const {
    const Bytes* only = nullptr;
    int present = 0;
    for (int m = 0; m < c_.size; ++m) {
      if (!c_.IsPresent(m)) continue;
      only = &data_[m][operand];
      ++present;
    }
    const bool scaled = c_.reduction == Reduction::kAvg || c_.reduction == Reduction::kPremulSum;
    // A copy: a NaN keeps its payload.
    if (present == 1 && !scaled && c_.dtype != DType::kBool) return *only;
    Bytes result(only->size());
    for (size_t i = 0; i < result.size(); i += element_) {
      NaiveReduce(c_.reduction, c_.dtype, Operands(operand, i), factors_, c_.size,
                  result.data() + i);
    }
    return result;
  }

  const Case c_;
  const int64_t element_;
  std::vector<double> factors_;
  std::vector<std::vector<Bytes>> data_;  // [member][operand]
};

class CaseRunner {
 public:
  CaseRunner(DeviceRig* rig, std::mt19937_64* random) : rig_(rig), random_(random) {}

  void Run(const Case& c, std::vector<std::unique_ptr<Communicator>>* members) {
    SCOPED_TRACE(c.ToString());
    const Model model(c, random_);
    const int64_t element = DTypeBytes(c.dtype);
    std::vector<CollectiveCall> calls(c.size);
    const int most_outputs = c.NumOutputs(c.root);
    std::vector<DeviceAddress> shared(most_outputs);
    std::vector<DeviceAddress> shared_factors(c.size);
    if (c.outputs == Outputs::kShared) {
      for (int j = 0; j < most_outputs; ++j) {
        shared[j] = Untouched(0, c.OutputCount(c.root, j) * element);
      }
      if (c.WantsFactors(c.root)) {
        for (DeviceAddress& factor : shared_factors) factor = Untouched(0, c.count * element);
      }
    }
    for (int m = 0; m < c.size; ++m) {
      if (!c.IsPresent(m)) continue;
      CollectiveCall& call = calls[m];
      call.kind = c.kind;
      call.dtype = c.dtype;
      call.count = c.count;
      call.present = c.present;
      call.root = c.root;
      call.reduction = c.reduction;
      for (int j = 0; j < c.NumInputs(m); ++j) {
        call.inputs.push_back(rig_->Upload(m, model.Input(m, j)));
        call.input_counts.push_back(c.InputCount(m, j));
      }
      for (int j = 0; j < c.NumOutputs(m); ++j) {
        DeviceAddress address = 0;
        const int source = c.InPlace(m, j);
        if (c.outputs == Outputs::kShared) {
          address = shared[j];
        } else if (c.outputs == Outputs::kInPlace && source >= 0) {
          address = call.inputs[source];
        } else if (c.outputs != Outputs::kNone) {
          address = Untouched(m, c.OutputCount(m, j) * element);
        }
        call.outputs.push_back(address);
        call.output_counts.push_back(c.OutputCount(m, j));
      }
      // Members may state sizes one way or the other.
      const auto drop = [&](std::vector<int64_t>* counts) {
        const auto differs = [&](int64_t n) { return n != call.count; };
        if (std::none_of(counts->begin(), counts->end(), differs) && (*random_)() % 2 == 0) {
          counts->clear();
        }
      };
      if (c.uneven && !call.output_counts.empty() && (*random_)() % 2 == 0) {
        call.count = call.output_counts[0];
      }
      drop(&call.input_counts);
      drop(&call.output_counts);
      if (Reduces(c.kind) && c.reduction == Reduction::kPremulSum) {
        call.factor =
            c.dtype == DType::kF64
                ? rig_->Upload(m, std::vector<double>{model.Factor(m)})
                : rig_->Upload(m, std::vector<float>{static_cast<float>(model.Factor(m))});
      }
      // Not every member asks for everything.
      if (c.WantsHolders() && (m == c.root || (*random_)() % 4 != 0)) {
        for (int j = 0; j < c.NumInputs(m); ++j) {
          const bool wanted = j == m || (*random_)() % 4 != 0;
          call.holders.push_back(wanted ? Untouched(m, c.InputCount(m, j) * 4) : 0);
        }
      }
      if (c.WantsFactors(m) && (m == c.root || (*random_)() % 4 != 0)) {
        for (int k = 0; k < c.size; ++k) {
          DeviceAddress address = shared_factors[k];
          if (c.outputs == Outputs::kInPlace && k == m && c.kind == Kind::kReduceScatter) {
            address = 0;
          } else if (c.outputs != Outputs::kShared) {
            address = Untouched(m, c.OutputCount(m, 0) * element);
          }
          call.factors.push_back(address);
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
        const int operand = static_cast<int>(j);
        CheckMemory(m, calls[m].outputs[j], model.Output(m, operand), "output", operand);
      }
      for (size_t k = 0; k < calls[m].factors.size(); ++k) {
        const int from = static_cast<int>(k);
        CheckMemory(m, calls[m].factors[k], model.FactorOf(m, from), "factor", from);
      }
      for (size_t j = 0; j < calls[m].holders.size(); ++j) {
        if (calls[m].holders[j] == 0) continue;
        const std::vector<float> expected = model.Holders(m, static_cast<int>(j));
        const auto got =
            rig_->Download<float>(m, calls[m].holders[j], static_cast<int64_t>(expected.size()));
        ASSERT_EQ(got, expected) << "member " << m << " holders " << j;
      }
      if (testing::Test::HasFatalFailure()) return;
    }
    rig_->FreeAll();
    bordered_.clear();
  }

 private:
  static constexpr uint8_t kFill = 0x5d;
  static constexpr int64_t kBehind = 32;

  // Memory with a border behind it.
  DeviceAddress Untouched(int device, int64_t bytes) {
    const DeviceAddress address = rig_->Upload(device, Bytes(bytes + kBehind, kFill));
    bordered_.emplace_back(rig_->backend()->domain(device), address);
    return address;
  }
  void CheckMemory(int m, DeviceAddress address, Bytes expected, const char* what, int index) {
    if (address == 0) return;
    const std::pair<int, DeviceAddress> start(rig_->backend()->domain(m), address);
    const bool bordered = std::find(bordered_.begin(), bordered_.end(), start) != bordered_.end();
    if (bordered) expected.resize(expected.size() + kBehind, kFill);
    const auto got = rig_->Download<uint8_t>(m, address, static_cast<int64_t>(expected.size()));
    const auto differ = std::mismatch(got.begin(), got.end(), expected.begin());
    ASSERT_TRUE(got == expected) << "member " << m << " " << what << " " << index << " of "
                                 << expected.size() << " bytes, first wrong at byte "
                                 << differ.first - got.begin();
  }

  DeviceRig* const rig_;
  std::mt19937_64* const random_;
  std::vector<std::pair<int, DeviceAddress>> bordered_;  // domains, and addresses in them
};

// Results are shared where there is one domain and they are equal.
bool Sensible(const Case& c, const Backend& backend) {
  const bool equal =
      c.kind != Kind::kReduceScatter && c.kind != Kind::kScatter && c.kind != Kind::kAllToAll;
  return c.outputs != Outputs::kShared || (InOneDomain(backend) && equal);
}

struct Matrix {
  std::vector<int> sizes = {1, 2, 3, 5, 8};
  std::vector<int64_t> counts;
  std::vector<Outputs> outputs = {Outputs::kOwn};
  std::vector<bool> uneven = {false};
  std::vector<Kind> kinds = {std::begin(kKinds), std::end(kKinds)};
  std::vector<std::pair<Reduction, DType>> types = {{Reduction::kSum, DType::kF32}};
  // One of the counts and outputs for each combination of the others. With as many sizes as there
  // are counts, and as there are outputs, each kind, type and unevenness has all of them.
  bool in_turns = false;
};

void RunMatrix(const BackendConformanceParam& param, const Matrix& matrix) {
  std::mt19937_64 random(TestSeed());
  for (size_t s = 0; s < matrix.sizes.size(); ++s) {
    const int size = matrix.sizes[s];
    size_t turn = 0;
    DeviceRig rig(param.open(size, &MakeTestKernel));
    auto members = rig.OpenAll(1);
    CaseRunner runner(&rig, &random);
    for (const Kind kind : matrix.kinds) {
      for (const auto& type : matrix.types) {
        for (const bool uneven : matrix.uneven) {
          if (uneven && !HasPieces(kind)) continue;
          std::vector<Outputs> outputs = matrix.outputs;
          std::vector<int64_t> counts = matrix.counts;
          if (matrix.in_turns) {
            // From size to size another count and other outputs; the next combinations of the
            // others begin with another pair of them.
            outputs = {outputs[(turn / counts.size() + s) % outputs.size()]};
            counts = {counts[(turn + s) % counts.size()]};
            ++turn;
          }
          for (const Outputs o : outputs) {
            for (const int64_t count : counts) {
              Case c;
              c.kind = kind;
              c.reduction = type.first;
              c.dtype = type.second;
              c.size = size;
              c.count = count;
              c.uneven = uneven;
              c.outputs = o;
              c.root = static_cast<int>(random() % size);
              if (!Sensible(c, *rig.backend())) {
                if (!matrix.in_turns) continue;
                c.outputs = Outputs::kOwn;
              }
              runner.Run(c, &members);
              if (testing::Test::HasFatalFailure()) return;
            }
          }
        }
      }
    }
  }
}

// 0, 1, primes, and one on each side of vectors, cache lines and 1 KiB.
const std::vector<int64_t>& SmallCounts() {
  static const auto* counts =
      new std::vector<int64_t>{0, 1, 2, 7, 15, 16, 17, 31, 63, 64, 65, 127, 128, 129, 257, 1021};
  return *counts;
}

TEST_P(BackendConformance, CollectivesOfF32EqualTheNaiveLoop) {
  Matrix matrix;
  matrix.counts = SmallCounts();
  matrix.outputs = {Outputs::kOwn, Outputs::kShared};
  RunMatrix(GetParam(), matrix);
}

TEST_P(BackendConformance, PiecesMayDifferInSizeOrBeEmpty) {
  Matrix matrix;
  matrix.counts = {0, 1, 2, 12, 33, 257, 1021};
  matrix.uneven = {true};
  matrix.outputs = {Outputs::kOwn, Outputs::kShared, Outputs::kInPlace, Outputs::kNone};
  matrix.types = {{Reduction::kSum, DType::kF32}, {Reduction::kSum, DType::kI16}};
  RunMatrix(GetParam(), matrix);
}

TEST_P(BackendConformance, EveryReductionOfEveryDTypeEqualsTheNaiveLoop) {
  Matrix matrix;
  matrix.kinds = {Kind::kAllReduce, Kind::kReduce, Kind::kReduceScatter};
  matrix.types.clear();
  for (const DType dtype : ReducedDTypes()) {
    for (const Reduction reduction : ReductionsOf(dtype))
      matrix.types.push_back({reduction, dtype});
  }
  matrix.sizes = {1, 2, 3, 4, 7};
  matrix.counts = {1, 17, 65, 300, 2053};
  matrix.uneven = {false, true};
  matrix.outputs = {Outputs::kOwn, Outputs::kShared, Outputs::kInPlace};
  matrix.in_turns = true;
  RunMatrix(GetParam(), matrix);
}

TEST_P(BackendConformance, EveryDTypeMoves) {
  Matrix matrix;
  matrix.kinds = {Kind::kBroadcast, Kind::kAllGather, Kind::kGather, Kind::kScatter,
                  Kind::kAllToAll};
  matrix.types.clear();
  for (const DType dtype : ReducedDTypes()) matrix.types.push_back({Reduction::kNone, dtype});
  matrix.counts = {1, 17, 300};
  matrix.uneven = {false, true};
  matrix.in_turns = true;
  RunMatrix(GetParam(), matrix);
}

TEST_P(BackendConformance, CollectivesMayWorkInPlaceOrOnlyOrder) {
  Matrix matrix;
  matrix.sizes = {2, 3, 8};
  matrix.counts = {0, 1, 17, 1021};
  matrix.outputs = {Outputs::kInPlace, Outputs::kNone};
  RunMatrix(GetParam(), matrix);
}

TEST_P(BackendConformance, LargeCollectivesEqualTheNaiveLoopAtChunkEdges) {
  Matrix matrix;
  matrix.sizes = {2, 5};
  matrix.counts = {65536, 65537};
  matrix.outputs = {Outputs::kOwn, Outputs::kInPlace, Outputs::kShared};
  matrix.uneven = {false, true};
  matrix.in_turns = true;
  RunMatrix(GetParam(), matrix);
  matrix.kinds = {Kind::kAllReduce, Kind::kReduceScatter};
  matrix.counts = {70001};
  matrix.types = {{Reduction::kMax, DType::kBF16}, {Reduction::kProduct, DType::kF32}};
  RunMatrix(GetParam(), matrix);
}

TEST_P(BackendConformance, MissingMembersGiveZerosAndNothingToReductions) {
  std::mt19937_64 random(TestSeed());
  constexpr std::pair<Reduction, DType> kNeutral[] = {
      {Reduction::kSum, DType::kF32},       {Reduction::kAvg, DType::kF32},
      {Reduction::kPremulSum, DType::kF16}, {Reduction::kAvg, DType::kBF16},
      {Reduction::kBxor, DType::kI32},      {Reduction::kBor, DType::kBool}};
  for (const int size : {2, 3, 4, 5, 7, 8, 13}) {
    DeviceRig rig(GetParam().open(size, &MakeTestKernel));
    auto members = rig.OpenAll(1);
    CaseRunner runner(&rig, &random);
    for (int round = 0; round < 50; ++round) {
      Case c;
      c.kind = kKinds[random() % std::size(kKinds)];
      const auto& type = kNeutral[random() % std::size(kNeutral)];
      c.reduction = type.first;
      c.dtype = type.second;
      c.size = size;
      c.count = round % 3 == 0 ? 1021 : 3;
      c.uneven = random() % 2 == 0;
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

// The members that are there when none, each one and each two of `size` are absent; somebody is.
std::vector<std::vector<int32_t>> PresentSets(int size) {
  std::vector<std::vector<int32_t>> sets;
  for (int a = 0; a <= size; ++a) {
    for (int b = a == size ? size : a + 1; b <= size; ++b) {
      std::vector<int32_t> present;
      for (int m = 0; m < size; ++m) {
        if (m != a && m != b) present.push_back(m);
      }
      if (!present.empty()) sets.push_back(present);
    }
  }
  return sets;
}

TEST_P(BackendConformance, EveryFormAndDTypeIsTheTreeOverAllRanksWhoeverIsAbsent) {
  std::mt19937_64 random(TestSeed());
  constexpr DType kDTypes[] = {DType::kF32, DType::kBF16, DType::kF64, DType::kF16};
  size_t turn = 0;
  for (int size = 1; size <= 9; ++size) {
    DeviceRig rig(GetParam().open(size, &MakeTestKernel));
    auto members = rig.OpenAll(1);
    CaseRunner runner(&rig, &random);
    for (const std::vector<int32_t>& present : PresentSets(size)) {
      for (const Kind kind : {Kind::kAllReduce, Kind::kReduce, Kind::kReduceScatter}) {
        ++turn;
        Case c;
        c.kind = kind;
        c.reduction = turn % 2 == 0 ? Reduction::kSum : Reduction::kAvg;
        c.dtype = kDTypes[turn / 2 % std::size(kDTypes)];
        c.size = size;
        c.count = 65;
        c.uneven = HasPieces(kind) && turn % 5 == 0;
        c.root = static_cast<int>(random() % size);
        c.present = present;
        c.outputs = Outputs::kShared;
        if (turn % 7 < 4 || !Sensible(c, *rig.backend())) c.outputs = Outputs::kOwn;
        runner.Run(c, &members);
        if (HasFatalFailure()) return;
      }
    }
  }
}

// Floats that round: the bits tell how they were bracketed, for each element, whatever the count,
// the position and the run.
template <typename T>
class Bits {
 public:
  Bits(const BackendConformanceParam& param, int size)
      : size_(size),
        rig_(param.open(size, &MakeTestKernel)),
        members_(rig_.OpenAll(1)),
        data_(size, std::vector<T>(kMost)) {
    std::mt19937_64 random(TestSeed());
    std::uniform_real_distribution<T> uniform(-1, 1);
    for (auto& row : data_) {
      for (T& x : row) x = uniform(random) * std::pow(T{10}, static_cast<int>(random() % 7));
    }
  }

  static constexpr int64_t kMost = 150001;

  void Check(Reduction reduction, const std::vector<int32_t>& present, int64_t count) {
    const auto is_present = [&](int m) {
      return std::find(present.begin(), present.end(), m) != present.end();
    };
    const auto average = [&](T sum) {
      return reduction == Reduction::kAvg ? sum / static_cast<T>(size_) : sum;
    };
    std::vector<T> expected;
    bool differs = false;  // from what left to right gives
    for (int64_t i = 0; i < count; ++i) {
      const auto operand = [&](int m) {
        return is_present(m) ? absl::optional<T>(data_[m][i]) : absl::nullopt;
      };
      expected.push_back(average(
          *NaiveTree<T>(0, size_, operand, [](T a, T b) { return static_cast<T>(a + b); })));
      T chain = data_[present[0]][i];
      for (size_t k = 1; k < present.size(); ++k) chain = chain + data_[present[k]][i];
      differs = differs || expected.back() != average(chain);
    }
    if (count > 100) {
      EXPECT_EQ(differs, Bracket(present) != Chain(present));
    }

    std::vector<DeviceAddress> results(size_);
    for (int m = size_ - 1; m >= 0; --m) {
      if (!is_present(m)) continue;
      results[m] = rig_.Upload(m, std::vector<T>(count));
      CollectiveCall call;
      call.kind = Kind::kAllReduce;
      call.reduction = reduction;
      call.dtype = DTypeOf<T>();
      call.count = count;
      call.present = present;
      call.inputs = {rig_.Upload(m, std::vector<T>(data_[m].begin(), data_[m].begin() + count))};
      call.outputs = {results[m]};
      ASSERT_TRUE(members_[m]->Enqueue(call, rig_.stream(m)).ok());
    }
    for (const int m : present) {
      ASSERT_TRUE(rig_.Synchronize(m).ok());
      const auto got = rig_.template Download<T>(m, results[m], count);
      ASSERT_EQ(std::memcmp(got.data(), expected.data(), count * sizeof(T)), 0)
          << "count " << count << " member " << m << ", expected " << Bracket(present);
    }
    rig_.FreeAll();
  }

 private:
  std::string Bracket(const std::vector<int32_t>& present) const {
    const auto operand = [&](int m) -> absl::optional<std::string> {
      if (std::find(present.begin(), present.end(), m) == present.end()) return absl::nullopt;
      return absl::StrCat(m);
    };
    return *NaiveTree<std::string>(0, size_, operand, Join);
  }
  static std::string Chain(const std::vector<int32_t>& present) {
    std::string chain = absl::StrCat(present[0]);
    for (size_t k = 1; k < present.size(); ++k) chain = Join(chain, absl::StrCat(present[k]));
    return chain;
  }
  static std::string Join(const std::string& a, const std::string& b) {
    return absl::StrCat("(", a, " + ", b, ")");
  }

  const int size_;
  DeviceRig rig_;
  std::vector<std::unique_ptr<Communicator>> members_;
  std::vector<std::vector<T>> data_;
};

template <typename T>
void CheckBits(const BackendConformanceParam& param) {
  for (int size = 1; size <= 9; ++size) {
    SCOPED_TRACE(absl::StrCat(size, " members"));
    Bits<T> bits(param, size);
    for (const std::vector<int32_t>& present : PresentSets(size)) {
      bits.Check(Reduction::kSum, present, 333);
      bits.Check(Reduction::kAvg, present, 333);
      if (testing::Test::HasFailure()) return;
    }
    std::vector<int32_t> all(size);
    std::iota(all.begin(), all.end(), 0);
    const int64_t most = size == 9 ? Bits<T>::kMost : 4099;
    for (const int64_t count : {int64_t{1}, int64_t{33}, int64_t{4099}, most, most}) {
      bits.Check(Reduction::kSum, all, count);
      if (testing::Test::HasFailure()) return;
    }
  }
}

TEST_P(BackendConformance, FloatSumsAreOneTreeBitForBit) {
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

// A collective reads what its members' streams did before it, and what comes behind it on any of
// them finds its results; whichever members take part in it.
TEST_P(BackendConformance, ACollectiveIsInOrderWithTheWorkOfEachMember) {
  constexpr int kSize = 4;
  constexpr int64_t kCount = 300;
  constexpr int kRounds = 40;
  DeviceRig rig(GetParam().open(kSize, &MakeTestKernel));
  auto members = rig.OpenAll(1);
  const TensorType type(DType::kF32, {kCount});
  const auto kernel = *MakeAffine(&rig, 0, type);
  const auto affine = [&](Stream* stream, DeviceAddress a, DeviceAddress b, DeviceAddress out) {
    KernelCall call;
    call.kernel = kernel.get();
    call.inputs = {a, b};
    call.outputs = {out};
    stream->Launch(call);
  };
  // As plans have it: what computes is on one stream, collectives on another, with events between.
  std::vector<std::unique_ptr<Stream>> computing;
  std::vector<std::unique_ptr<Event>> computed;
  std::vector<std::unique_ptr<Event>> reduced;
  for (int m = 0; m < kSize; ++m) {
    Device* const device = rig.backend()->device(m);
    computing.push_back(device->CreateStream());
    computed.push_back(device->CreateEvent());
    reduced.push_back(device->CreateEvent());
  }
  std::mt19937_64 random(TestSeed());
  const std::vector<std::vector<int32_t>> sets = {{}, {1, 2}, {0, 3}, {2, 3}, {0, 1, 3}};
  std::vector<float> value(kSize);
  std::vector<float> sum(kSize, 0);
  std::vector<DeviceAddress> values;
  std::vector<DeviceAddress> sums;
  std::vector<DeviceAddress> terms;
  std::vector<DeviceAddress> zeros;
  for (int m = 0; m < kSize; ++m) {
    value[static_cast<size_t>(m)] = static_cast<float>(m + 1);
    values.push_back(rig.Upload(m, std::vector<float>(kCount, static_cast<float>(m + 1))));
    sums.push_back(rig.Upload(m, std::vector<float>(kCount, 0)));
    terms.push_back(rig.Upload(m, std::vector<float>(kCount, 0)));
    zeros.push_back(rig.Upload(m, std::vector<float>(kCount, 0)));
  }
  const auto reduce = [&](int m, const std::vector<int32_t>& present, DeviceAddress from) {
    const auto at = static_cast<size_t>(m);
    CollectiveCall call = DeviceRig::AllReduceCall(DType::kF32, kCount, from, sums[at]);
    call.present = present;
    EXPECT_TRUE(members[at]->Enqueue(call, rig.stream(m)).ok());
  };
  const auto members_of = [&](const std::vector<int32_t>& present) {
    std::vector<int> all(kSize);
    std::iota(all.begin(), all.end(), 0);
    return present.empty() ? all : std::vector<int>(present.begin(), present.end());
  };
  for (int round = 0; round < kRounds; ++round) {
    const std::vector<int32_t>& present = sets[random() % sets.size()];
    float total = 0;
    for (const int m : members_of(present)) {
      const auto at = static_cast<size_t>(m);
      const bool beside = random() % 2 == 0;
      Stream* const stream = beside ? computing[at].get() : rig.stream(m);
      if (beside) stream->Wait(reduced[at].get());
      affine(stream, values[at], zeros[at], terms[at]);
      if (beside) {
        stream->Record(computed[at].get());
        rig.stream(m)->Wait(computed[at].get());
      }
      total += 2 * value[at];
      reduce(m, present, terms[at]);
    }
    for (const int m : members_of(present)) sum[static_cast<size_t>(m)] = total;
    // Followed by others, with nothing in between.
    for (int more = static_cast<int>(random() % 3); more > 0; --more) {
      const std::vector<int32_t>& also = sets[random() % sets.size()];
      total = 0;
      for (const int m : members_of(also)) {
        total += sum[static_cast<size_t>(m)];
        reduce(m, also, sums[static_cast<size_t>(m)]);
      }
      for (const int m : members_of(also)) sum[static_cast<size_t>(m)] = total;
    }
    for (int m = 0; m < kSize; ++m) {
      const auto at = static_cast<size_t>(m);
      rig.stream(m)->Copy(terms[at], zeros[at], kCount * 4);  // nobody reads it any more
      rig.stream(m)->Copy(values[at], sums[at], kCount * 4);
      rig.stream(m)->Record(reduced[at].get());
      value[at] = sum[at];
    }
    // So that numbers stay exact.
    if (round + 1 < kRounds && *std::max_element(value.begin(), value.end()) < 1e4f) continue;
    for (int m = 0; m < kSize; ++m) {
      const auto at = static_cast<size_t>(m);
      ASSERT_TRUE(rig.Synchronize(m).ok());
      ASSERT_EQ(rig.Download<float>(m, values[at], kCount), std::vector<float>(kCount, value[at]))
          << "member " << m << " round " << round;
      value[at] = static_cast<float>(m + 1);
      values[at] = rig.Upload(m, std::vector<float>(kCount, value[at]));
    }
  }
}

// Between two collectives a member's stream has nothing but the wait for another one's work, which
// the second reads.
TEST_P(BackendConformance, AWaitBetweenCollectivesIsForTheSecond) {
  constexpr int kSize = 3;
  constexpr int64_t kCount = 2000;
  DeviceRig rig(GetParam().open(kSize, &MakeTestKernel));
  auto members = rig.OpenAll(1);
  std::vector<std::unique_ptr<Stream>> beside;
  std::vector<std::unique_ptr<Event>> events;
  std::vector<DeviceAddress> ones;
  for (int m = 0; m < kSize; ++m) {
    beside.push_back(rig.backend()->device(m)->CreateStream());
    events.push_back(rig.backend()->device(m)->CreateEvent());
    ones.push_back(rig.Upload(m, std::vector<float>(kCount, 1)));
  }
  for (int round = 0; round < 20; ++round) {
    std::vector<DeviceAddress> terms;
    std::vector<DeviceAddress> sums;
    for (int m = 0; m < kSize; ++m) {
      terms.push_back(rig.Upload(m, std::vector<float>(kCount, -1)));
      sums.push_back(rig.Upload(m, std::vector<float>(kCount, -1)));
    }
    for (int m = 0; m < kSize; ++m) {
      CollectiveCall barrier;
      barrier.kind = Kind::kBarrier;
      ASSERT_TRUE(members[static_cast<size_t>(m)]->Enqueue(barrier, rig.stream(m)).ok());
    }
    for (int m = 0; m < kSize; ++m) {
      const auto at = static_cast<size_t>(m);
      // One member's work is done long before that of the others.
      for (int i = 0; i < (m == round % kSize ? 1 : 8); ++i) {
        beside[at]->Copy(terms[at], ones[at], kCount * 4);
        if (i % 2 == 0) continue;
        beside[at]->Copy(terms[at], sums[at], kCount * 4);
        beside[at]->Copy(terms[at], ones[at], kCount * 4);
      }
      beside[at]->Record(events[at].get());
      rig.stream(m)->Wait(events[at].get());
      ASSERT_TRUE(
          members[at]
              ->Enqueue(rig.AllReduceCall(DType::kF32, kCount, terms[at], sums[at]), rig.stream(m))
              .ok());
    }
    for (int m = 0; m < kSize; ++m) {
      ASSERT_TRUE(rig.Synchronize(m).ok());
      ASSERT_EQ(rig.Download<float>(m, sums[static_cast<size_t>(m)], kCount),
                std::vector<float>(kCount, kSize))
          << m << " round " << round;
    }
  }
}

// A callback that was enqueued on another stream, in front of what this one waits for, has run when
// a kernel's turn comes that asks for what it says.
TEST_P(BackendConformance, WhatAKernelAsksForIsBehindTheCallbacksOfStreamsItWaitsFor) {
  DeviceRig rig(GetParam().open(2, &MakeTestKernel));
  auto members = rig.OpenAll(1);
  const TensorType type(DType::kF32, {1});
  const auto kernel = *MakeAffine(&rig, 0, type);
  const auto event = rig.backend()->device(1)->CreateEvent();
  for (int round = 0; round < 40; ++round) {
    std::atomic<bool> said{false};
    KernelCall call;
    call.kernel = kernel.get();
    call.inputs = {rig.Upload(0, std::vector<float>{1}), rig.Upload(0, std::vector<float>{2})};
    call.outputs = {rig.Upload(0, std::vector<float>{-1})};
    call.unless = &said;
    rig.stream(1)->Callback([&said](const absl::Status&) { said = true; });
    if (round % 2 == 0) {
      rig.stream(1)->Record(event.get());
      rig.stream(0)->Wait(event.get());
    } else {
      CollectiveCall barrier;
      barrier.kind = Kind::kBarrier;
      for (int m = 0; m < 2; ++m) {
        ASSERT_TRUE(members[static_cast<size_t>(m)]->Enqueue(barrier, rig.stream(m)).ok());
      }
    }
    rig.stream(0)->Launch(call);
    for (const int m : {0, 1}) ASSERT_TRUE(rig.Synchronize(m).ok());
    ASSERT_EQ(rig.Download<float>(0, call.outputs[0], 1)[0], -1) << round;
    rig.FreeAll();
  }
}

// Said when the kernel has been enqueued already, behind what has not happened yet.
TEST_P(BackendConformance, AKernelThatNobodyWantsAnyMoreIsLeftOut) {
  DeviceRig rig(GetParam().open(2, &MakeTestKernel));
  auto members = rig.OpenAll(1);
  const TensorType type(DType::kF32, {1});
  const auto kernel = *MakeAffine(&rig, 0, type);
  for (const bool wanted : {true, false}) {
    std::atomic<bool> unwanted{false};
    KernelCall call;
    call.kernel = kernel.get();
    call.inputs = {rig.Upload(0, std::vector<float>{1}), rig.Upload(0, std::vector<float>{2})};
    call.outputs = {rig.Upload(0, std::vector<float>{-1})};
    call.unwanted = &unwanted;
    CollectiveCall barrier;
    barrier.kind = Kind::kBarrier;
    ASSERT_TRUE(members[0]->Enqueue(barrier, rig.stream(0)).ok());
    rig.stream(0)->Launch(call);
    unwanted = !wanted;
    ASSERT_TRUE(members[1]->Enqueue(barrier, rig.stream(1)).ok());
    for (const int m : {0, 1}) ASSERT_TRUE(rig.Synchronize(m).ok());
    EXPECT_EQ(rig.Download<float>(0, call.outputs[0], 1)[0] == -1, !wanted) << wanted;
    rig.FreeAll();
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
    large[m] =
        InOneDomain(*rig.backend()) && m > 0 ? large[0] : rig.Upload(m, std::vector<float>(70001));
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
    auto kernel = MakeAffine(&rig, 1, type);
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

TEST_P(BackendConformance, AKernelHasTheWorkspaceThatItWants) {
  DeviceRig rig(GetParam().open(2, &MakeTestKernel));
  for (const int64_t count : {1, 100000}) {
    const TensorType type(DType::kF32, {count});
    const TensorType* inputs[] = {&type};
    NodeView node;
    node.op = "test_scratch";
    node.inputs = inputs;
    const auto bytes = rig.backend()->WorkspaceBytes(node, {type});
    ASSERT_TRUE(bytes.ok()) << bytes.status();
    EXPECT_EQ(*bytes, 4 * count);
    auto kernel = rig.backend()->device(1)->MakeKernel(node, {type});
    ASSERT_TRUE(kernel.ok()) << kernel.status();
    EXPECT_EQ((*kernel)->workspace_bytes(), *bytes);
    std::vector<float> a(count);
    for (int64_t i = 0; i < count; ++i) a[i] = Value<float>(0, 0, i);
    std::vector<float> b(count);
    for (int64_t i = 0; i < count; ++i) b[i] = Value<float>(1, 0, i);
    // One behind the other in the same scratch.
    KernelCall first;
    first.kernel = kernel->get();
    first.inputs = {rig.Upload(1, a)};
    first.outputs = {rig.Allocate(1, count * 4)};
    first.workspace = rig.Allocate(1, *bytes);
    KernelCall second = first;
    second.inputs = {rig.Upload(1, b)};
    second.outputs = {rig.Allocate(1, count * 4)};
    rig.stream(1)->Launch(first);
    rig.stream(1)->Launch(second);
    ASSERT_TRUE(rig.Synchronize(1).ok());
    EXPECT_EQ(rig.Download<float>(1, first.outputs[0], count), a);
    EXPECT_EQ(rig.Download<float>(1, second.outputs[0], count), b);
    first.workspace = 0;
    rig.stream(1)->Launch(first);
    const absl::Status status = rig.Synchronize(1);
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
    EXPECT_EQ(ErrorOf(status).message,
              absl::StrCat("test_scratch: a kernel that wants ", *bytes,
                           " bytes of workspace was launched without any"));
  }
  NodeView unknown;
  unknown.op = "no_such_op";
  EXPECT_EQ(rig.backend()->WorkspaceBytes(unknown, {}).status().code(),
            absl::StatusCode::kInternal);
}

// A call of `op`, of one number.
struct UnaryCall {
  UnaryCall(DeviceRig* rig, absl::string_view op, absl::string_view source) {
    const TensorType type(DType::kF32, {1});
    const TensorType* inputs[] = {&type};
    NodeView node;
    node.op = op;
    node.inputs = inputs;
    node.source = source;
    kernel = *rig->backend()->device(0)->MakeKernel(node, {type});
    call.kernel = kernel.get();
    call.inputs = {rig->Upload(0, std::vector<float>{1})};
    call.outputs = {rig->Upload(0, std::vector<float>{2})};
  }
  std::unique_ptr<Kernel> kernel;
  KernelCall call;
};

TEST_P(BackendConformance, ACallbackGetsTheFirstFailureSinceTheLastOne) {
  DeviceRig rig(GetParam().open(1, &MakeTestKernel));
  const UnaryCall fails(&rig, "test_fail", "");
  const DeviceAddress after = rig.Upload(0, std::vector<float>{3});
  rig.stream(0)->Launch(fails.call);
  rig.stream(0)->Copy(after, fails.call.inputs[0], 4);  // runs all the same
  EXPECT_EQ(rig.Synchronize(0).code(), absl::StatusCode::kAborted);
  EXPECT_TRUE(rig.Synchronize(0).ok());
  EXPECT_EQ(rig.Download<float>(0, after, 1)[0], 1);
}

// Nobody guards against a failure of an op that has none (OpDef::fallible).
TEST_P(BackendConformance, AKernelThatMustNotFailIsABugWhereItDoes) {
  DeviceRig rig(GetParam().open(1, &MakeTestKernel));
  const UnaryCall fails(&rig, "neg", "train.cc:12");
  rig.stream(0)->Launch(fails.call);
  const absl::Status status = rig.Synchronize(0);
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_EQ(ErrorOf(status).reason, Reason::kInternal);
  EXPECT_EQ(ErrorOf(status).op, "neg");
  EXPECT_EQ(ErrorOf(status).message,
            "neg: no kernel of this op may fail, this one did: test_fail fails (train.cc:12)");
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
  CaseRunner runner(&rig, &random);
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
        Case c;
        c.kind = kind;
        c.size = kSize;
        call.inputs.assign(c.NumInputs(m), memory);
        call.outputs.assign(c.NumOutputs(m), memory);
      }
      EXPECT_EQ(members[m]->Enqueue(call, rig.stream(m)).code(), absl::StatusCode::kAborted)
          << "member " << m << " kind " << static_cast<int>(kind);
    }
    members[m]->Abort(absl::AbortedError("again"));
  }
  // The streams are as good as new, and the devices meet again in another communicator.
  auto fresh = rig.OpenAll(2);
  for (int m = 0; m < kSize; ++m) ASSERT_TRUE(fresh[m]->Enqueue(barrier, rig.stream(m)).ok());
  for (int m = 0; m < kSize; ++m) EXPECT_TRUE(rig.Synchronize(m).ok());
}

// Asked when its turn comes, not before: what is in front of the call decides.
TEST_P(BackendConformance, AVetoEndsTheCallOnAllMembers) {
  struct Decision : Veto {
    absl::Status status() override {
      return refuse.load() ? absl::DataLossError("member 1 says no") : absl::OkStatus();
    }
    std::atomic<bool> refuse{false};
  };
  constexpr int kSize = 3;
  DeviceRig rig(GetParam().open(kSize, &MakeTestKernel));
  auto members = rig.OpenAll(1);
  Decision decisions[kSize];
  absl::Status enqueued[kSize];
  for (const bool refuse : {false, true}) {
    rig.stream(1)->Callback([&](const absl::Status&) { decisions[1].refuse = refuse; });
    for (int m = 0; m < kSize; ++m) {
      CollectiveCall barrier;
      barrier.kind = Kind::kBarrier;
      if (m != 2) barrier.veto = &decisions[m];
      enqueued[m] = members[m]->Enqueue(barrier, rig.stream(m));
    }
    for (int m = 0; m < kSize; ++m) {
      const absl::Status status = rig.Synchronize(m);
      if (!refuse) {
        EXPECT_TRUE(enqueued[m].ok() && status.ok()) << m;
      } else if (enqueued[m].ok()) {
        EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << m;
        EXPECT_EQ(status.message(), "member 1 says no");
      } else {  // too late for it: broken already
        EXPECT_EQ(m, 2);
        EXPECT_EQ(enqueued[m], decisions[1].status());
      }
    }
  }
  CollectiveCall later;
  later.kind = Kind::kBarrier;
  for (int m = 0; m < kSize; ++m) {
    EXPECT_EQ(members[m]->Enqueue(later, rig.stream(m)), decisions[1].status());
  }
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
  EXPECT_EQ(members[1]->Enqueue(pair, rig.stream(1)).code(), absl::StatusCode::kAborted);
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
  using Change = std::function<void(CollectiveCall*)>;
  const auto movement = [&](Kind kind, Change change) -> Change {
    return [=](CollectiveCall* call) {
      const DeviceAddress address = call->inputs[0];
      const int m = address == memory ? 0 : 1;
      Case c;
      c.kind = kind;
      c.size = 2;
      call->kind = kind;
      call->root = 0;
      call->inputs.assign(c.NumInputs(m), address);
      call->outputs.clear();
      for (int j = 0; j < c.NumOutputs(m); ++j) call->outputs.push_back(address + 16 + 16 * j);
      if (m == 1) change(call);
    };
  };
  const auto second = [&](Change change) -> Change {
    return [=](CollectiveCall* call) {
      if (call->inputs[0] == others) change(call);
    };
  };
  const std::vector<Change> variants = {
      second([](CollectiveCall* c) { c->count = 1; }),
      second([](CollectiveCall* c) { c->count = 1 << 20; }),
      second([](CollectiveCall* c) { c->output_counts = {1}; }),
      second([](CollectiveCall* c) { c->input_counts = {0}; }),
      second([](CollectiveCall* c) { c->dtype = DType::kF64; }),
      second([](CollectiveCall* c) { c->reduction = Reduction::kProduct; }),
      second([](CollectiveCall* c) { c->kind = Kind::kReduce, c->root = 0; }),
      movement(Kind::kGather, [](CollectiveCall* c) { c->root = 1, c->outputs.resize(2, 0); }),
      movement(Kind::kGather, [](CollectiveCall* c) { c->count = 3; }),
      movement(Kind::kGather, [](CollectiveCall* c) { c->input_counts = {0}; }),
      movement(Kind::kScatter, [](CollectiveCall* c) { c->count = 3; }),
      movement(Kind::kAllGather,
               [](CollectiveCall* c) {
                 c->output_counts = {1, 2};
               }),
      movement(Kind::kAllGather,
               [](CollectiveCall* c) {
                 c->outputs = {0, 0}, c->count = 1;
               }),
      movement(Kind::kBroadcast, [](CollectiveCall* c) { c->count = 1; }),
      movement(Kind::kReduceScatter,
               [](CollectiveCall* c) {
                 c->input_counts = {1, 2};
               }),
      movement(Kind::kReduceScatter, [](CollectiveCall* c) { c->output_counts = {0}; }),
      movement(Kind::kAllToAll,
               [](CollectiveCall* c) {
                 c->input_counts = {4, 2};
               }),
      movement(Kind::kAllToAll,
               [](CollectiveCall* c) {
                 c->output_counts = {1, 2};
               }),
      [&](CollectiveCall* c) {
        *c = PairCall(Kind::kSend, c->inputs[0] == memory ? 1 : 0, 1, c->inputs[0]);
      },
      [&](CollectiveCall* c) {
        *c = c->inputs[0] == memory ? PairCall(Kind::kSend, 1, 2, memory)
                                    : PairCall(Kind::kRecv, 0, 3, others);
      },
  };
  for (size_t variant = 0; variant < variants.size(); ++variant) {
    SCOPED_TRACE(variant);
    auto members = rig.OpenAll(10 + variant);
    CollectiveCall calls[] = {rig.AllReduceCall(DType::kF32, 2, memory, memory),
                              rig.AllReduceCall(DType::kF32, 2, others, others)};
    for (int m = 0; m < 2; ++m) {
      variants[variant](&calls[m]);
      const absl::Status enqueued = members[m]->Enqueue(calls[m], rig.stream(m));
      ASSERT_TRUE(enqueued.ok()) << enqueued;
    }
    for (int m = 0; m < 2; ++m) {
      EXPECT_EQ(rig.Synchronize(m).code(), absl::StatusCode::kInternal);
      EXPECT_EQ(members[m]->Enqueue(calls[m], rig.stream(m)).code(), absl::StatusCode::kInternal);
    }
  }
}

// Of calls in different orders none may wait for ever: neither those of other communicators, nor
// those with other members, nor those behind an event.
TEST_P(BackendConformance, CallsInDifferentOrdersFailOnAllMembers) {
  DeviceRig rig(GetParam().open(3, &MakeTestKernel));
  std::vector<DeviceAddress> memory;
  for (int d = 0; d < 3; ++d) memory.push_back(rig.Upload(d, std::vector<float>(4)));
  uint64_t id = 10;
  const auto open = [&](std::vector<int> devices) {
    std::vector<std::unique_ptr<Communicator>> members;
    ++id;
    for (size_t m = 0; m < devices.size(); ++m) {
      auto member = rig.backend()->OpenCommunicator(id, devices, static_cast<int>(m));
      EXPECT_TRUE(member.ok()) << member.status();
      members.push_back(*std::move(member));
    }
    return members;
  };
  const auto call = [&](Communicator* member, int device, Stream* stream = nullptr) {
    const DeviceAddress address = memory[static_cast<size_t>(device)];
    return member->Enqueue(rig.AllReduceCall(DType::kF32, 2, address, address),
                           stream != nullptr ? stream : rig.stream(device));
  };
  const auto expect = [&](std::vector<int> devices) {
    for (const int d : devices) {
      const absl::Status status = rig.Synchronize(d);
      EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << status;
      EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr("different orders")) << d;
    }
  };
  {
    SCOPED_TRACE("two communicators");
    auto a = open({0, 1});
    auto b = open({1, 0});
    ASSERT_TRUE(call(a[0].get(), 0).ok());
    ASSERT_TRUE(call(b[1].get(), 0).ok());
    ASSERT_TRUE(call(b[0].get(), 1).ok());
    ASSERT_TRUE(call(a[1].get(), 1).ok());
    expect({0, 1});
    EXPECT_EQ(call(a[0].get(), 0).code(), absl::StatusCode::kInternal);
    EXPECT_EQ(call(b[0].get(), 1).code(), absl::StatusCode::kInternal);
  }
  {
    SCOPED_TRACE("each waits for the next");
    std::vector<std::vector<std::unique_ptr<Communicator>>> pairs;
    for (int d = 0; d < 3; ++d) pairs.push_back(open({d, (d + 1) % 3}));
    for (int d = 0; d < 3; ++d) {
      ASSERT_TRUE(call(pairs[d][0].get(), d).ok());
      ASSERT_TRUE(call(pairs[(d + 2) % 3][1].get(), d).ok());
    }
    expect({0, 1, 2});
  }
  {
    SCOPED_TRACE("one communicator, and a member that has not called");
    auto all = open({0, 1, 2});
    ASSERT_TRUE(call(all[0].get(), 0).ok());
    ASSERT_TRUE(all[1]->Enqueue(PairCall(Kind::kSend, 0, 2, memory[1]), rig.stream(1)).ok());
    ASSERT_TRUE(all[0]->Enqueue(PairCall(Kind::kRecv, 1, 2, memory[0]), rig.stream(0)).ok());
    ASSERT_TRUE(call(all[1].get(), 1).ok());
    expect({0, 1});
    EXPECT_EQ(call(all[2].get(), 2).code(), absl::StatusCode::kInternal);
  }
  {
    SCOPED_TRACE("an event");
    auto a = open({0, 1});
    auto b = open({0, 1});
    const std::unique_ptr<Stream> beside = rig.backend()->device(0)->CreateStream();
    const std::unique_ptr<Event> event = rig.backend()->device(0)->CreateEvent();
    ASSERT_TRUE(call(a[0].get(), 0, beside.get()).ok());
    beside->Record(event.get());
    rig.stream(0)->Wait(event.get());
    ASSERT_TRUE(call(b[0].get(), 0).ok());
    ASSERT_TRUE(call(b[1].get(), 1).ok());
    ASSERT_TRUE(call(a[1].get(), 1).ok());
    expect({0, 1});
    EXPECT_EQ(rig.SynchronizeStream(beside.get()).code(), absl::StatusCode::kInternal);
  }
  {
    SCOPED_TRACE("one order");
    auto a = open({0, 1});
    auto b = open({1, 0});
    for (const int d : {0, 1}) {
      ASSERT_TRUE(call(a[d].get(), d).ok());
      ASSERT_TRUE(call(b[1 - d].get(), d).ok());
    }
    for (const int d : {0, 1}) EXPECT_TRUE(rig.Synchronize(d).ok());
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
  using Call = CollectiveCall;
  EXPECT_EQ(changed([](Call* c) { c->count = -1; }), kInvalid);
  EXPECT_EQ(changed([](Call* c) { c->count = std::numeric_limits<int64_t>::min(); }), kInvalid);
  EXPECT_EQ(changed([](Call* c) { c->count = std::numeric_limits<int64_t>::max(); }), kInvalid);
  EXPECT_EQ(changed([](Call* c) { c->count = int64_t{1} << 62; }), kInvalid);
  EXPECT_EQ(changed([](Call* c) { c->input_counts = {-1}; }), kInvalid);
  EXPECT_EQ(changed([](Call* c) { c->output_counts = {-1}; }), kInvalid);
  EXPECT_EQ(changed([](Call* c) { c->output_counts = {int64_t{1} << 61}; }), kInvalid);
  EXPECT_EQ(changed([](Call* c) { c->input_counts = {1, 1}; }), kInvalid);
  EXPECT_EQ(changed([](Call* c) { c->output_counts = {1, 1}; }), kInvalid);
  EXPECT_EQ(changed([](Call* c) { c->dtype = DType::kUnspecified; }), kInvalid);
  EXPECT_EQ(changed([](Call* c) { c->dtype = static_cast<DType>(99); }), kInvalid);
  EXPECT_EQ(changed([](Call* c) { c->dtype = DType::kComplex64; }), kUnimplemented);
  EXPECT_EQ(changed([](Call* c) { c->reduction = Reduction::kNone; }), kUnimplemented);
  EXPECT_EQ(changed([](Call* c) { c->reduction = static_cast<Reduction>(99); }), kUnimplemented);
  EXPECT_EQ(changed([](Call* c) { c->reduction = Reduction::kBxor; }), kInvalid);
  for (const DType dtype : {DType::kI32, DType::kU8, DType::kBool}) {
    EXPECT_EQ(changed([&](Call* c) { c->reduction = Reduction::kAvg, c->dtype = dtype; }),
              kInvalid);
    EXPECT_EQ(changed([&](Call* c) {
                c->reduction = Reduction::kPremulSum, c->dtype = dtype, c->factor = memory;
              }),
              kInvalid);
  }
  EXPECT_EQ(changed([](Call* c) { c->kind = Kind::kUnspecified; }), kUnimplemented);
  EXPECT_EQ(changed([](Call* c) { c->kind = static_cast<Kind>(99); }), kUnimplemented);
  EXPECT_EQ(changed([](Call* c) { c->inputs.clear(); }), kInvalid);
  EXPECT_EQ(changed([](Call* c) { c->inputs = {0}; }), kInvalid);
  EXPECT_EQ(changed([](Call* c) { c->outputs.push_back(8); }), kInvalid);
  for (const Kind kind : {Kind::kAllGather, Kind::kReduceScatter, Kind::kAllToAll}) {
    EXPECT_EQ(changed([&](Call* c) { c->kind = kind; }), kInvalid);
  }
  for (const Kind kind : {Kind::kGather, Kind::kScatter}) {
    EXPECT_EQ(changed([&](Call* c) { c->kind = kind, c->root = 0; }), kInvalid);
    EXPECT_EQ(changed([&](Call* c) { c->kind = kind, c->root = 2; }), kInvalid);
  }
  EXPECT_EQ(changed([](Call* c) { c->kind = Kind::kBroadcast; }), kInvalid);  // no root
  EXPECT_EQ(changed([](Call* c) { c->kind = Kind::kReduce, c->root = 2; }), kInvalid);
  EXPECT_EQ(changed([](Call* c) { c->present = {1}; }), kInvalid);
  EXPECT_EQ(changed([](Call* c) { c->present = {1, 0}; }), kInvalid);
  EXPECT_EQ(changed([](Call* c) { c->present = {0, 2}; }), kInvalid);
  for (const Reduction reduction : {Reduction::kProduct, Reduction::kMin, Reduction::kMax}) {
    EXPECT_EQ(changed([&](Call* c) { c->present = {0}, c->reduction = reduction; }), kInvalid);
  }
  EXPECT_EQ(changed([&](Call* c) { c->factor = memory; }), kInvalid);
  EXPECT_EQ(changed([](Call* c) { c->reduction = Reduction::kPremulSum; }), kInvalid);
  EXPECT_EQ(changed([](Call* c) { c->holders = {0}; }), kInvalid);
  EXPECT_EQ(changed([](Call* c) {
              c->reduction = Reduction::kMax, c->holders = {0, 0};
            }),
            kInvalid);
  EXPECT_EQ(changed([](Call* c) {
              c->reduction = Reduction::kMax, c->holders = {0}, c->dtype = DType::kI32;
            }),
            kInvalid);
  EXPECT_EQ(changed([](Call* c) { c->factors = {0, 0}; }), kInvalid);
  EXPECT_EQ(changed([](Call* c) { c->reduction = Reduction::kProduct, c->factors = {0}; }),
            kInvalid);
  EXPECT_EQ(changed([](Call* c) {
              c->reduction = Reduction::kProduct, c->factors = {0, 0};
              c->kind = Kind::kReduce, c->root = 1;
            }),
            kInvalid);
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
