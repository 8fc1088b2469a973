// Every kernel for GPUs against the naive evaluator, on the stand-in driver or, with
// CHORUS_TEST_GPU=driver, on this machine's GPU.

#include "core/ops/cuda_kernels.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/cuda/cublaslt_api.h"
#include "core/cuda/cudnn_api.h"
#include "core/cuda/testing/fake_blas.h"
#include "core/cuda/testing/fake_dnn.h"
#include "core/cuda/testing/fake_driver.h"
#include "core/cuda/testing/test_driver.h"
#include "core/ops/compare/compare.h"
#include "core/ops/cuda_kernel_bodies.h"
#include "core/ops/elementwise/elementwise.h"
#include "core/ops/host_kernels.h"
#include "core/ops/long_sums.h"
#include "core/ops/registry.h"
#include "core/ops/testing/evaluator.h"
#include "core/ops/testing/kernel_cases.h"
#include "core/ops/testing/near.h"
#include "core/ops/testing/value.h"
#include "gtest/gtest.h"

namespace chorus {
namespace {

using testing::KernelCase;
using testing::Value;
using Ints = std::vector<int64_t>;

constexpr uint64_t kSeed = 7;

// Elements of which each thread of the stand-in takes a few several times.
constexpr int64_t kMoreThanThreads = 200003;

std::vector<cuda::FakeKernel> Kernels() {
  using namespace cuda;  // the lists name their types without it
  return {
#define CHORUS_FAMILY(Name) CHORUS_KERNELS_OF_##Name(CHORUS_FAKE_KERNEL)
      CHORUS_CUDA_KERNEL_BODIES(CHORUS_FAMILY)
#undef CHORUS_FAMILY
  };
}

// The stand-in's driver, or this machine's.
class Driver {
 public:
  Driver() {
    if (TestsRunOnADriver()) {
      auto loaded = cuda::LoadApi({});
      if (!loaded.ok()) {
        std::fprintf(stderr, "%s\n", std::string(loaded.status().message()).c_str());
        std::exit(3);
      }
      api_ = *loaded;
      images_ = CudaKernelImages();
      return;
    }
    cuda::FakeDriverOptions options;
    options.seed = kSeed;
    options.order = cuda::FakeOrder::kEager;  // one stream has one order
    options.kernels = Kernels();
    fake_ = std::make_unique<cuda::FakeDriver>(std::move(options));
    api_ = cuda::FakeDriver::api();
    static constexpr char kImage[] = "of a stand-in";
    images_ = {{kImage, sizeof(kImage)}};
  }
  const cuda::Api& api() const { return api_; }
  const std::vector<KernelImage>& images() const { return images_; }

 private:
  std::unique_ptr<cuda::FakeDriver> fake_;
  cuda::Api api_;
  std::vector<KernelImage> images_;
};

// A GPU, and one stream.
class CudaKernelsTest : public ::testing::Test {
 protected:
  explicit CudaKernelsTest(CudaLibraries libraries = {}) : api_(driver_.api()) {
    auto gpu = CudaGpu::Open(&api_, 0, driver_.images(), std::move(libraries));
    EXPECT_TRUE(gpu.ok()) << gpu.status();
    gpu_ = *std::move(gpu);
    gpu_->Enter();
    EXPECT_EQ(api_.StreamCreateWithPriority(&stream_, cuda::kStreamNonBlocking, 0),
              cuda::Result::kSuccess);
  }
  ~CudaKernelsTest() override {
    api_.StreamSynchronize(stream_);
    api_.StreamDestroy(stream_);
  }

  // Memory of the GPU with exactly these bytes in it, behind `beside` others.
  cuda::DevicePtr Upload(const std::string& bytes, size_t beside = 0) {
    cuda::DevicePtr memory = 0;
    if (bytes.empty()) return 0;
    EXPECT_EQ(api_.MemAlloc(&memory, bytes.size() + beside), cuda::Result::kSuccess);
    allocated_.push_back(memory);
    EXPECT_EQ(api_.MemcpyHtoDAsync(memory + beside, bytes.data(), bytes.size(), stream_),
              cuda::Result::kSuccess);
    return memory + beside;
  }

  struct Made {
    std::unique_ptr<CudaKernel> kernel;
    std::vector<TensorType> outputs;
  };
  absl::StatusOr<Made> Make(const std::string& op, const std::vector<const TensorType*>& inputs,
                            const Attributes& attributes) {
    NodeView node;
    node.op = op;
    node.attributes = attributes;
    node.inputs = inputs;
    Made made;
    CHORUS_ASSIGN_OR_RETURN(made.outputs, InferTypes(node));
    CHORUS_ASSIGN_OR_RETURN(made.kernel, MakeCudaKernel(*gpu_, node, made.outputs));
    return made;
  }

  struct Outcome {
    absl::Status status;
    Value value;
  };
  // Where operands lie.
  struct Places {
    size_t beside = 0;   // so many elements beside where they would
    int displaced = -1;  // only this one; outputs are counted behind the inputs
    int in_place = -1;   // the input in whose place the output is
  };
  // What the op's first output is.
  Outcome Run(const std::string& op, const std::vector<Value>& inputs, const Attributes& attributes,
              size_t beside = 0) {
    Places places;
    places.beside = beside;
    return Run(op, inputs, attributes, places);
  }
  Outcome Run(const std::string& op, const std::vector<Value>& inputs, const Attributes& attributes,
              const Places& places) {
    std::vector<const TensorType*> types;
    for (const Value& input : inputs) types.push_back(&input.type);
    const absl::StatusOr<Made> made = Make(op, types, attributes);
    if (!made.ok()) return {made.status(), {}};
    workspace_bytes_ = made->kernel->workspace_bytes();
    parts_ = made->kernel->parts();
    KernelCall call;
    call.kernel = made->kernel.get();
    const auto upload = [&](const std::string& bytes, DType dtype) {
      const size_t operand = call.inputs.size() + call.outputs.size();
      const bool moves = places.displaced < 0 || static_cast<size_t>(places.displaced) == operand;
      return Upload(bytes, (moves ? places.beside : 0) * static_cast<size_t>(DTypeBytes(dtype)));
    };
    for (const Value& input : inputs) {
      call.inputs.push_back(upload(input.bytes, input.type.dtype));
    }
    std::vector<std::string> results;
    for (const TensorType& type : made->outputs) {
      results.emplace_back(static_cast<size_t>(type.num_bytes()), '\xff');
      call.outputs.push_back(places.in_place >= 0
                                 ? call.inputs[static_cast<size_t>(places.in_place)]
                                 : upload(results.back(), type.dtype));
    }
    // Aligned to no more than is promised.
    constexpr size_t kAlignment = 64;
    call.workspace = Upload(std::string(static_cast<size_t>(workspace_bytes_), '\xff'), kAlignment);
    const cuda::DevicePtr word = Upload(std::string(sizeof(uint64_t), '\xff'));
    constexpr uint64_t kFirst = 1000;
    absl::Status status;
    for (int64_t part = 0; status.ok() && part < parts_; ++part) {
      status = made->kernel->Enqueue(part, call, {word, kFirst}, *gpu_, stream_);
    }
    uint64_t told = 0;
    api_.MemcpyDtoHAsync(&told, word, sizeof(told), stream_);
    for (size_t i = 0; i < results.size(); ++i) {
      if (results[i].empty()) continue;
      api_.MemcpyDtoHAsync(&results[i][0], call.outputs[i], results[i].size(), stream_);
    }
    EXPECT_EQ(api_.StreamSynchronize(stream_), cuda::Result::kSuccess);
    for (const cuda::DevicePtr memory : allocated_) api_.MemFree(memory);
    allocated_.clear();
    if (told != ~uint64_t{0}) {
      EXPECT_TRUE(made->kernel->reports());
      EXPECT_GE(told, kFirst);
      const auto read = [&](size_t input, int64_t offset, int64_t bytes, void* to) {
        if (inputs_change_) {
          std::memset(to, 0, static_cast<size_t>(bytes));
        } else {
          std::memcpy(to, &inputs[input].bytes[static_cast<size_t>(offset)],
                      static_cast<size_t>(bytes));
        }
        return absl::OkStatus();
      };
      status.Update(made->kernel->Failure(told - kFirst, read));
    }
    return {status, Value{made->outputs[0], results[0]}};
  }

  static Value Expected(const std::string& op, const std::vector<Value>& inputs,
                        const Attributes& attributes) {
    std::vector<const TensorType*> types;
    std::vector<const Value*> values;
    for (const Value& input : inputs) {
      types.push_back(&input.type);
      values.push_back(&input);
    }
    NodeView node;
    node.op = op;
    node.attributes = attributes;
    node.inputs = types;
    const auto outputs = InferTypes(node);
    EXPECT_TRUE(outputs.ok()) << outputs.status();
    const auto expected = testing::EvaluateLocal(node, values, *outputs);
    EXPECT_TRUE(expected.ok()) << expected.status();
    return (*expected)[0];
  }

  const Driver driver_;
  const cuda::Api api_;
  std::unique_ptr<CudaGpu> gpu_;
  cuda::Stream stream_ = nullptr;
  std::vector<cuda::DevicePtr> allocated_;
  bool inputs_change_ = false;   // before a failure is told
  int64_t workspace_bytes_ = 0;  // of the last kernel
  int64_t parts_ = 0;            // its
};

TEST_F(CudaKernelsTest, EqualTheNaiveEvaluatorWhereverOperandsLie) {
  SCOPED_TRACE(kSeed);
  std::mt19937_64 random(kSeed);
  std::set<std::string> taken;
  for (const DType dtype : testing::AllDTypes()) {
    for (const KernelCase& c : testing::KernelCases()) {
      if (!HasCudaKernel(c.op) || !testing::Takes(c, dtype)) continue;
      taken.insert(c.op);
      std::string what = c.op + " " + std::string(DTypeName(dtype));
      const std::vector<Value> inputs = testing::InputsOf(c, dtype, &random);
      for (const Value& input : inputs) what += " " + input.type.ToString();
      const Outcome outcome = Run(c.op, inputs, c.attributes);
      ASSERT_TRUE(outcome.status.ok()) << what << ": " << outcome.status;
      testing::ExpectNear(outcome.value, Expected(c.op, inputs, c.attributes), what);
      const Outcome displaced = Run(c.op, inputs, c.attributes, 1);
      ASSERT_TRUE(displaced.status.ok()) << what << ": " << displaced.status;
      EXPECT_EQ(displaced.value, outcome.value) << what;
    }
  }
  std::string text;
  for (const std::string& op : taken) text += op + " ";
  std::printf("ops: %s\n", text.c_str());
}

// Whether one operand alone is displaced, or the output is an input's own memory.
TEST_F(CudaKernelsTest, ElementwiseOpsRunWhereverEachOperandLies) {
  std::mt19937_64 random(kSeed);
  for (const DType dtype : testing::AllDTypes()) {
    for (const KernelCase& c : testing::KernelCases()) {
      if (!HasCudaKernel(c.op) || !FindOp(c.op)->elementwise || !testing::Takes(c, dtype)) continue;
      const std::vector<Value> inputs = testing::InputsOf(c, dtype, &random);
      const Outcome expected = Run(c.op, inputs, c.attributes);
      ASSERT_TRUE(expected.status.ok()) << expected.status;
      const std::string what = c.op + " " + expected.value.type.ToString();
      for (size_t operand = 0; operand <= inputs.size(); ++operand) {
        Places places;
        places.beside = 1;
        places.displaced = static_cast<int>(operand);
        EXPECT_EQ(Run(c.op, inputs, c.attributes, places).value, expected.value)
            << what << " with operand " << operand << " displaced";
        if (operand == inputs.size() || inputs[operand].type != expected.value.type) continue;
        places = Places();
        places.in_place = static_cast<int>(operand);
        EXPECT_EQ(Run(c.op, inputs, c.attributes, places).value, expected.value)
            << what << " in place of input " << operand;
      }
    }
  }
}

TEST_F(CudaKernelsTest, ElementwiseOpsOfMoreElementsThanThreads) {
  std::vector<uint8_t> numbers(kMoreThanThreads);
  for (size_t i = 0; i < numbers.size(); ++i) numbers[i] = static_cast<uint8_t>(i * i >> 7);
  const Value x = testing::MakeValue<uint8_t>({kMoreThanThreads}, numbers);
  for (uint8_t& number : numbers) number = static_cast<uint8_t>(2 * number);
  const Value twice = testing::MakeValue<uint8_t>({kMoreThanThreads}, numbers);
  for (const size_t beside : {0, 1}) {
    // Not EXPECT_EQ, which would print them.
    EXPECT_TRUE(Run("add", {x, x}, {}, beside).value == twice) << beside;
  }
}

// NaN, infinities, zeros with a sign, ties, and the ends of every dtype's range.
TEST_F(CudaKernelsTest, ElementwiseOpsOfNumbersAtTheEdges) {
  const double inf = std::numeric_limits<double>::infinity();
  const std::vector<double> reals = {0,
                                     -0.0,
                                     1,
                                     -1,
                                     0.5,
                                     -0.5,
                                     1.5,
                                     2.5,
                                     inf,
                                     -inf,
                                     88,
                                     -88,
                                     std::nan(""),
                                     127.5,
                                     128,
                                     -128.5,
                                     -129,
                                     255,
                                     256,
                                     32768,
                                     -32769,
                                     65504,
                                     65519,
                                     65519.9999999999,
                                     65520,
                                     1e5,
                                     0x1p31,
                                     0x1p63,
                                     -0x1p63,
                                     0x1p64,
                                     1e30,
                                     -1e300,
                                     3.3961e38,
                                     0x1p-25,
                                     1e-8,
                                     1e-320,
                                     1 + 0x1p-24,
                                     1 + 0x1p-11,
                                     1e-7,
                                     0x1.0000000001p-25,
                                     1 + 0x1p-11 + 0x1p-40};
  const std::vector<int64_t> integers = {0,
                                         1,
                                         -1,
                                         2,
                                         7,
                                         127,
                                         -128,
                                         255,
                                         32767,
                                         -32768,
                                         65519,
                                         65520,
                                         0x1010001,
                                         std::numeric_limits<int32_t>::max(),
                                         std::numeric_limits<int32_t>::min(),
                                         (int64_t{1} << 53) + 1,
                                         (int64_t{1} << 60) + (int64_t{1} << 52) + 1,
                                         std::numeric_limits<int64_t>::max(),
                                         std::numeric_limits<int64_t>::min()};
  std::set<std::string> ops;
  for (const OpDef* def : ElementwiseOps()) ops.emplace(def->name);
  for (const OpDef* def : CompareOps()) ops.emplace(def->name);
  for (const DType dtype : testing::AllDTypes()) {
    // All pairs.
    const size_t n = IsFloating(dtype) ? reals.size() : integers.size();
    const auto square = static_cast<int64_t>(n * n);
    Value a;
    Value b;
    if (IsFloating(dtype)) {
      std::vector<double> first;
      std::vector<double> second;
      for (const double x : reals) {
        first.insert(first.end(), n, x);
        second.insert(second.end(), reals.begin(), reals.end());
      }
      a = testing::FromDoubles(testing::WithDType(dtype, {square}), first);
      b = testing::FromDoubles(testing::WithDType(dtype, {square}), second);
    } else {
      // Of bool too: its bytes are any.
      const size_t bytes = static_cast<size_t>(DTypeBytes(dtype));
      a.type = b.type = testing::WithDType(dtype, {square});
      for (const int64_t x : integers) {
        for (const int64_t y : integers) {
          a.bytes.append(reinterpret_cast<const char*>(&x), bytes);
          b.bytes.append(reinterpret_cast<const char*>(&y), bytes);
        }
      }
    }
    std::set<std::string> done;
    for (const KernelCase& c : testing::KernelCases()) {
      if (ops.count(c.op) == 0 || !testing::Takes(c, dtype)) continue;
      if (c.op == "div" && !IsFloating(dtype)) continue;
      // Their slopes, times an infinite gradient, are 0 sooner in f32 than in the evaluator.
      if (c.op == "sigmoid_grad" || c.op == "tanh_grad") continue;
      std::string what = c.op;
      if (c.op == "cast") what += " to " + absl::get<std::string>(c.attributes[0].value);
      if (c.inputs.size() > 2 || !done.insert(what).second) continue;
      const std::vector<Value> inputs =
          c.inputs.size() == 2 ? std::vector<Value>{a, b} : std::vector<Value>{a};
      const Outcome outcome = Run(c.op, inputs, c.attributes);
      ASSERT_TRUE(outcome.status.ok()) << outcome.status;
      const Value expected = Expected(c.op, inputs, c.attributes);
      testing::ExpectNear(outcome.value, expected, what + " of " + std::string(DTypeName(dtype)));
    }
  }
}

TEST_F(CudaKernelsTest, IntegersAreNotDividedByZero) {
  const int64_t least = std::numeric_limits<int64_t>::min();
  const Value a = testing::MakeValue<int64_t>(Ints{4}, {7, -7, least, 5});
  const Outcome div = Run("div", {a, testing::MakeValue<int64_t>(Ints{4}, {2, 2, -1, -2})}, {});
  ASSERT_TRUE(div.status.ok()) << div.status;
  EXPECT_EQ(testing::Elements<int64_t>(div.value), (Ints{3, -3, least, -2}));
  for (const DType dtype : {DType::kI8, DType::kU8, DType::kI16, DType::kI32, DType::kI64}) {
    // More than one is 0, of one thread and of several, and the first of all is told.
    for (const int64_t size : {int64_t{4}, int64_t{1000}, kMoreThanThreads}) {
      std::vector<double> divisors(static_cast<size_t>(size), 1);
      for (size_t i = 2; i < divisors.size(); i += 2) divisors[i] = 0;
      const TensorType type = testing::WithDType(dtype, {size});
      const Value x = testing::FromDoubles(type, std::vector<double>(divisors.size(), 6));
      const absl::Status status = Run("div", {x, testing::FromDoubles(type, divisors)}, {}).status;
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
      const Error error = ErrorOf(status);
      EXPECT_EQ(error.reason, Reason::kBadType);
      EXPECT_EQ(error.op, "div");
      EXPECT_EQ(error.expected, "divisors other than 0");
      EXPECT_EQ(error.got, "0 as element 2");
      EXPECT_EQ(error.message, "div: element 2 of " + type.ToString() +
                                   " is an integer divided by 0, expected divisors other than 0");
    }
    const TensorType scalar = testing::WithDType(dtype, {});
    const Value zero = testing::FromDoubles(scalar, {0});
    const Value one = testing::FromDoubles(scalar, {1});
    EXPECT_EQ(ErrorOf(Run("div", {one, zero}, {}).status).got, "0 as element 0");
    // Nothing is divided.
    const Value nothing = testing::Zeros(testing::WithDType(dtype, {0}));
    EXPECT_TRUE(Run("div", {nothing, zero}, {}).status.ok());
    EXPECT_TRUE(Run("div", {zero, one}, {}).status.ok());
  }
}

TEST_F(CudaKernelsTest, SelectionsAreOperandsBitByBit) {
  const double inf = std::numeric_limits<double>::infinity();
  const double nan = std::nan("");
  const std::vector<int64_t> five = {5};
  const Value a = testing::MakeValue<double>(five, {1, nan, 2, nan, 0.0});
  const Value b = testing::MakeValue<double>(five, {2, 1, nan, nan, -0.0});
  EXPECT_EQ(Run("maximum", {a, b}, {}).value,
            testing::MakeValue<double>(five, {2, nan, nan, nan, 0.0}));
  EXPECT_EQ(Run("minimum", {b, a}, {}).value,
            testing::MakeValue<double>(five, {1, nan, nan, nan, -0.0}));
  const Value x = testing::MakeValue<double>(five, {1, 0, -1, nan, inf});
  const Value g = testing::MakeValue<double>(five, {inf, inf, nan, 3, 4});
  EXPECT_EQ(Run("relu_grad", {x, g}, {}).value,
            testing::MakeValue<double>(five, {inf, 0, 0, 0, 4}));
  EXPECT_EQ(Run("relu", {x}, {}).value, testing::MakeValue<double>(five, {1, 0, 0, 0, inf}));
  // Any byte but 0 is true, and what is written is 1.
  const TensorType bools = testing::WithDType(DType::kBool, {5});
  const Value c = testing::MakeValue<uint8_t>(bools, {0, 1, 7, 0, 128});
  const Value d = testing::MakeValue<uint8_t>(bools, {0, 2, 1, 3, 0});
  const auto bytes = [&](const std::string& op, const std::vector<Value>& inputs) {
    return testing::Elements<uint8_t>(Run(op, inputs, {{"dtype", std::string("bool")}}).value);
  };
  const auto logic = [&](const std::string& op) {
    return testing::Elements<uint8_t>(Run(op, {c, d}, {}).value);
  };
  using Bytes = std::vector<uint8_t>;
  EXPECT_EQ(logic("eq"), (Bytes{1, 1, 1, 0, 0}));
  EXPECT_EQ(logic("lt"), (Bytes{0, 0, 0, 1, 0}));
  EXPECT_EQ(logic("ge"), (Bytes{1, 1, 1, 0, 1}));
  EXPECT_EQ(logic("logical_and"), (Bytes{0, 1, 1, 0, 0}));
  EXPECT_EQ(logic("logical_or"), (Bytes{0, 1, 1, 1, 1}));
  EXPECT_EQ(logic("logical_xor"), (Bytes{0, 0, 0, 1, 1}));
  EXPECT_EQ(bytes("cast", {c}), (Bytes{0, 1, 1, 0, 1}));
  EXPECT_EQ(testing::Elements<uint8_t>(Run("logical_not", {c}, {}).value), (Bytes{1, 0, 0, 1, 0}));
  EXPECT_EQ(Run("where", {c, a, b}, {}).value,
            testing::MakeValue<double>(five, {2, nan, 2, nan, 0.0}));
}

// By NVIDIA's libraries, or their stand-ins, and by our own kernels.
enum class Way { kCudnn, kCublasLt, kOwn };  // the first has cuBLASLt too
class CudaLibrariesTest : public CudaKernelsTest, public ::testing::WithParamInterface<Way> {
 protected:
  CudaLibrariesTest() : CudaKernelsTest(Libraries()) {}
  void SetUp() override {
    if (!TestsRunOnADriver()) return;
    if (HasBlas() && !cuda::LoadBlasApi({}).ok()) GTEST_SKIP() << cuda::LoadBlasApi({}).status();
    if (HasDnn() && !cuda::LoadDnnApi({}).ok()) GTEST_SKIP() << cuda::LoadDnnApi({}).status();
  }
  static bool HasDnn() { return GetParam() == Way::kCudnn; }
  static bool HasBlas() { return GetParam() != Way::kOwn; }
  static CudaLibraries Libraries() {
    CudaLibraries libraries;
    if (HasBlas()) libraries.blas = cuda::FakeBlasApi;
    if (HasDnn()) libraries.dnn = cuda::FakeDnnApi;
    if (!TestsRunOnADriver()) return libraries;
    if (HasBlas()) libraries.blas = [] { return cuda::LoadBlasApi({}); };
    if (HasDnn()) libraries.dnn = [] { return cuda::LoadDnnApi({}); };
    return libraries;
  }
};
std::string NameOf(const ::testing::TestParamInfo<Way>& info) {
  return info.param == Way::kCudnn      ? "ByCudnn"
         : info.param == Way::kCublasLt ? "ByCublasLt"
                                        : "ByOurOwn";
}
INSTANTIATE_TEST_SUITE_P(EachWay, CudaLibrariesTest,
                         ::testing::Values(Way::kCudnn, Way::kCublasLt, Way::kOwn), NameOf);

// Products are not cuDNN's.
class CudaProductsTest : public CudaLibrariesTest {};
INSTANTIATE_TEST_SUITE_P(EachWay, CudaProductsTest, ::testing::Values(Way::kCublasLt, Way::kOwn),
                         NameOf);

// So that the other tests do not pass by way of our own kernels.
TEST_P(CudaProductsTest, DoesProductsOfEachTypeByCublasLtWhereItIs) {
  for (const auto type :
       {cuda::BlasType::kF16, cuda::BlasType::kBF16, cuda::BlasType::kF32, cuda::BlasType::kF64}) {
    for (const int64_t side : {1, 3, 16, 256, 1000}) {
      for (const int64_t batch : {1, 5}) {
        for (int flags = 0; flags < 4; ++flags) {
          BlasProblem problem;
          problem.type = type;
          problem.batch = batch;
          problem.rows = side + 1;
          problem.columns = side;
          problem.depth = 2 * side;
          problem.transpose_a = (flags & 1) != 0;
          problem.transpose_b = (flags & 2) != 0;
          const auto product = gpu_->MakeProduct(problem);
          EXPECT_EQ(product != nullptr, HasBlas()) << problem.Text();
          const auto again = gpu_->MakeProduct(problem);
          if (product == nullptr || again == nullptr) continue;
          EXPECT_EQ(product->workspace_bytes(), again->workspace_bytes()) << problem.Text();
        }
      }
    }
  }
}

// Also with each operand alone where only its elements are aligned: the bits are the same.
TEST_P(CudaProductsTest, EqualsTheNaiveEvaluatorWhereverEachOperandLies) {
  SCOPED_TRACE(kSeed);
  std::mt19937_64 random(kSeed);
  std::vector<KernelCase> cases;
  for (const KernelCase& c : testing::KernelCases()) {
    if (c.op == "matmul") cases.push_back(c);
  }
  // Rows of whole multiples of 16 bytes, of 8, and mixed ones.
  for (const Ints& mnk : {Ints{16, 32, 64}, Ints{64, 64, 8}, Ints{8, 16, 12}, Ints{12, 20, 16},
                          Ints{24, 9, 40}, Ints{9, 24, 40}, Ints{1, 64, 128}, Ints{64, 1, 128}}) {
    for (const Ints& batch : {Ints{}, Ints{3}}) {
      for (int flags = 0; flags < 4; ++flags) {
        Ints a = batch;
        Ints b = batch;
        const auto append = [](int64_t rows, int64_t columns, bool transposed, Ints* sizes) {
          sizes->push_back(transposed ? columns : rows);
          sizes->push_back(transposed ? rows : columns);
        };
        append(mnk[0], mnk[2], (flags & 1) != 0, &a);
        append(mnk[2], mnk[1], (flags & 2) != 0, &b);
        cases.push_back(
            {"matmul",
             {a, b},
             {{"transpose_a", int64_t{flags & 1}}, {"transpose_b", int64_t{flags >> 1}}}});
      }
    }
  }
  const int64_t before = cuda::CountsOfFakeBlas().products;
  for (const DType dtype : testing::AllDTypes()) {
    for (const KernelCase& c : cases) {
      if (!testing::Takes(c, dtype)) continue;
      const std::vector<Value> inputs = testing::InputsOf(c, dtype, &random);
      std::string what = c.op + " " + std::string(DTypeName(dtype));
      for (const Value& input : inputs) what += " " + input.type.ToString();
      const Outcome outcome = Run(c.op, inputs, c.attributes);
      ASSERT_TRUE(outcome.status.ok()) << what << ": " << outcome.status;
      testing::ExpectNear(outcome.value, Expected(c.op, inputs, c.attributes), what);
      const int64_t workspace_bytes = workspace_bytes_;
      for (const int displaced : {-1, 0, 1, 2}) {
        Places places;
        places.beside = 1;
        places.displaced = displaced;
        const Outcome elsewhere = Run(c.op, inputs, c.attributes, places);
        ASSERT_TRUE(elsewhere.status.ok()) << what << ": " << elsewhere.status;
        EXPECT_EQ(elsewhere.value, outcome.value) << what << " with operand " << displaced;
        EXPECT_EQ(workspace_bytes_, workspace_bytes) << what;
      }
    }
  }
  const bool by_stand_in = HasBlas() && !TestsRunOnADriver();
  EXPECT_EQ(cuda::CountsOfFakeBlas().products > before, by_stand_in);
}

// More than a grid has blocks in its third dimension.
TEST_P(CudaProductsTest, AsManyMatricesAsThereAre) {
  constexpr int64_t kMany = 70001;
  std::vector<float> left(kMany * 2);
  std::vector<float> expected(kMany);
  for (size_t i = 0; i < kMany; ++i) {
    left[2 * i] = static_cast<float>(i % 251);
    left[2 * i + 1] = static_cast<float>(i % 7);
    expected[i] = left[2 * i] * 3 - left[2 * i + 1];
  }
  std::vector<float> right(kMany * 2);
  for (size_t i = 0; i < kMany; ++i) {
    right[2 * i] = 3;
    right[2 * i + 1] = -1;
  }
  const Outcome outcome = Run("matmul",
                              {testing::MakeValue<float>({kMany, 1, 2}, left),
                               testing::MakeValue<float>({kMany, 2, 1}, right)},
                              {});
  ASSERT_TRUE(outcome.status.ok()) << outcome.status;
  // Not EXPECT_EQ, which would print them.
  EXPECT_TRUE(outcome.value == testing::MakeValue<float>({kMany, 1, 1}, expected));
}

// TF32 would drop their last 13 bits.
TEST_P(CudaProductsTest, KeepsAllDigitsOfF32) {
  std::mt19937_64 random(kSeed);
  constexpr int64_t kSide = 128;
  std::vector<float> one(kSide * kSide, 0);
  for (size_t i = 0; i < kSide; ++i) one[i * kSide + i] = 1;
  const Value identity = testing::MakeValue<float>({kSide, kSide}, one);
  const Value x = testing::RandomNormal(TensorType(DType::kF32, {kSide, kSide}), &random);
  for (const auto& factors : {std::vector<Value>{x, identity}, std::vector<Value>{identity, x}}) {
    const Outcome outcome = Run("matmul", factors, {});
    ASSERT_TRUE(outcome.status.ok()) << outcome.status;
    EXPECT_TRUE(outcome.value == x);
  }
}

// Half types are added up as floats, and integers wrap; our own kernel's sums have the order of
// their products.
TEST_P(CudaProductsTest, RoundsOnceWrapsAndKeepsItsOrder) {
  std::vector<double> terms(600, 0);
  terms[0] = terms[599] = 0.25;
  terms[300] = 512;
  for (const DType dtype : {DType::kF16, DType::kBF16}) {
    const Value row = testing::FromDoubles(TensorType(dtype, {1, 600}), terms);
    const Value ones =
        testing::FromDoubles(TensorType(dtype, {600, 1}), std::vector<double>(600, 1));
    const Outcome outcome = Run("matmul", {row, ones}, {});
    ASSERT_TRUE(outcome.status.ok()) << outcome.status;
    // In f16 a quarter more than 512 is 512; in bf16 so is a half.
    EXPECT_EQ(testing::ToDoubles(outcome.value)[0], dtype == DType::kF16 ? 512.5 : 512);
  }
  const int64_t large = (int64_t{1} << 62) + 3;
  const Outcome wrapped = Run("matmul",
                              {testing::MakeValue<int64_t>({1, 3}, {large, -5, large}),
                               testing::MakeValue<int64_t>({3, 1}, {4, large, 3})},
                              {});
  const auto u = static_cast<uint64_t>(large);
  EXPECT_EQ(testing::Elements<int64_t>(wrapped.value),
            (std::vector<int64_t>{static_cast<int64_t>(u * 4 - u * 5 + u * 3)}));
  if (HasBlas()) return;
  const Outcome ordered = Run("matmul",
                              {testing::MakeValue<float>({1, 4}, {1, 3e8f, -3e8f, 1}),
                               testing::MakeValue<float>({4, 1}, {1, 1, 1, 1})},
                              {});
  EXPECT_EQ(testing::Elements<float>(ordered.value), (std::vector<float>{1}));
}

// Rows and columns that a tile has beyond the matrix are others, computed again: what they hold
// reaches nothing.
TEST_P(CudaProductsTest, KeepsNanInItsRowAndColumn) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  constexpr int64_t kSize = 6;
  for (int flags = 0; flags < 4; ++flags) {
    const Attributes attributes = {{"transpose_a", int64_t{flags & 1}},
                                   {"transpose_b", int64_t{flags >> 1}}};
    std::vector<double> a(kSize * kSize, 1);
    a[kSize * kSize - 1] = nan;
    const Value left = testing::MakeValue<double>({kSize, kSize}, a);
    const Value right =
        testing::MakeValue<double>({kSize, kSize}, std::vector<double>(kSize * kSize, 2));
    const Outcome outcome = Run("matmul", {left, right}, attributes);
    const std::vector<double> c = testing::Elements<double>(outcome.value);
    for (size_t i = 0; i < c.size(); ++i) {
      if (i / kSize == kSize - 1) {
        EXPECT_TRUE(std::isnan(c[i])) << flags << " " << i;
      } else {
        EXPECT_EQ(c[i], 2 * kSize) << flags << " " << i;
      }
    }
  }
}

// What the host's kernel makes of it.
Value OnHost(const std::string& op, const std::vector<Value>& inputs,
             const Attributes& attributes) {
  std::vector<const TensorType*> types;
  std::vector<const void*> pointers;
  for (const Value& input : inputs) {
    types.push_back(&input.type);
    pointers.push_back(input.bytes.data());
  }
  NodeView node;
  node.op = op;
  node.attributes = attributes;
  node.inputs = types;
  const auto outputs = InferTypes(node);
  EXPECT_TRUE(outputs.ok()) << outputs.status();
  const auto kernel = MakeHostKernel(node, *outputs);
  EXPECT_TRUE(kernel.ok()) << kernel.status();
  Value out = testing::Zeros((*outputs)[0]);
  std::string workspace(static_cast<size_t>((*kernel)->workspace_bytes() + 64), '\0');
  const auto beside = reinterpret_cast<uintptr_t>(workspace.data()) % 64;
  const absl::Span<char> aligned(&workspace[64 - beside],
                                 static_cast<size_t>((*kernel)->workspace_bytes()));
  EXPECT_TRUE((*kernel)->RunAll({pointers, {&out.bytes[0]}, aligned}).ok());
  return out;
}

// An x and weights of these types, the y that they give, and what the three ops say of them.
struct Convolutions {
  std::vector<std::string> ops = {"convolution", "convolution_data_grad",
                                  "convolution_weight_grad"};
  TensorType x;
  TensorType w;
  Attributes attributes;

  // Those of an op: it has two, and the size of its result.
  std::vector<TensorType> InputsOf(const std::string& op, const TensorType& y) const {
    if (op == ops[0]) return {x, w};
    if (op == ops[1]) return {y, w};
    return {x, y};
  }
  Attributes AttributesOf(const std::string& op) const {
    Attributes all = attributes;
    const TensorType& like = op == ops[1] ? x : w;
    if (op != ops[0]) {
      all.insert(all.end() - 1,
                 {"size", std::vector<int64_t>{like.dims[2].size, like.dims[3].size}});
    }
    return all;
  }
  // None where they do not fit.
  absl::StatusOr<TensorType> Y() const {
    const TensorType* const types[] = {&x, &w};
    NodeView node;
    node.op = ops[0];
    node.inputs = types;
    node.attributes = attributes;
    const auto outputs = InferTypes(node);
    if (!outputs.ok()) return outputs.status();
    return (*outputs)[0];
  }
};
Convolutions ConvolutionsOf(const std::vector<int64_t>& x, const std::vector<int64_t>& w,
                            const std::vector<int64_t>& stride, const std::vector<int64_t>& padding,
                            const std::vector<int64_t>& dilation, int64_t groups) {
  Convolutions c;
  c.x = TensorType(DType::kF64, {x[0], x[1], x[2], x[3]});
  c.w = TensorType(DType::kF64, {w[0], w[1], w[2], w[3]});
  c.attributes = {
      {"dilation", dilation}, {"groups", groups}, {"padding", padding}, {"stride", stride}};
  return c;
}

// The adjoint in x takes places apart by what strides and dilations have in common.
TEST_P(CudaLibrariesTest, ConvolutionsOfAnyStrideAndDilation) {
  SCOPED_TRACE(kSeed);
  std::mt19937_64 random(kSeed);
  const auto upto = [&](int64_t least, int64_t most) {
    return std::uniform_int_distribution<int64_t>(least, most)(random);
  };
  int fit = 0;
  for (int n = 0; n < 400; ++n) {
    const int64_t groups = upto(1, 3);
    const int64_t in = upto(1, 3), out = upto(1, 6);
    const Convolutions c =
        ConvolutionsOf({upto(1, 3), groups * in, upto(1, 20), upto(1, 20)},
                       {groups * out, in, upto(1, 4), upto(1, 4)}, {upto(1, 12), upto(1, 12)},
                       {upto(0, 6), upto(0, 6)}, {upto(1, 9), upto(1, 9)}, groups);
    const auto y = c.Y();
    if (!y.ok()) continue;
    ++fit;
    for (const std::string& op : c.ops) {
      std::vector<Value> inputs;
      std::string what = op;
      for (const TensorType& type : c.InputsOf(op, *y)) {
        inputs.push_back(testing::RandomNormal(type, &random));
        what += " " + type.ToString();
      }
      for (const char* name : {"dilation", "padding", "stride"}) {
        for (const int64_t number : IntsAttribute(c.attributes, name)) {
          what += " " + std::to_string(number);
        }
      }
      const Outcome outcome = Run(op, inputs, c.AttributesOf(op));
      ASSERT_TRUE(outcome.status.ok()) << what << ": " << outcome.status;
      testing::ExpectNear(outcome.value, Expected(op, inputs, c.AttributesOf(op)), what);
    }
  }
  EXPECT_GT(fit, 200);
}

// Of so many products of elements that they are left to cuBLASLt where there is no cuDNN, with all
// that unfolding has to get right: borders, strides, dilations, samples that go in several slabs,
// the last of fewer.
TEST_P(CudaLibrariesTest, LargeConvolutionsWhereverEachOperandLies) {
  SCOPED_TRACE(kSeed);
  std::mt19937_64 random(kSeed);
  struct Case {
    DType dtype;
    Convolutions c;
    int64_t slabs[3];     // of each op
    bool unfolds = true;  // else it is cuBLASLt's also where there is cuDNN
  };
  const Case cases[] = {
      {DType::kF32,
       ConvolutionsOf({4, 32, 24, 26}, {24, 32, 3, 3}, {1, 1}, {1, 1}, {1, 1}, 1),
       {1, 1, 1}},
      {DType::kF64,
       ConvolutionsOf({8, 16, 40, 40}, {40, 16, 3, 5}, {2, 3}, {3, 0}, {2, 1}, 1),
       {1, 1, 1}},
      {DType::kF32,
       ConvolutionsOf({5, 64, 20, 20}, {160, 64, 1, 1}, {1, 1}, {0, 0}, {1, 1}, 1),
       {1, 1, 1},
       /*unfolds=*/false},
      {DType::kF32,
       ConvolutionsOf({4, 64, 41, 41}, {160, 64, 1, 1}, {2, 2}, {0, 0}, {1, 1}, 1),
       {1, 1, 1}},
      {DType::kF32,
       ConvolutionsOf({7, 16, 128, 128}, {2, 16, 3, 3}, {1, 1}, {1, 1}, {1, 1}, 1),
       {3, 3, 3}},
      {DType::kF32,
       ConvolutionsOf({3, 1024, 2, 2}, {2100, 1024, 2, 2}, {1, 1}, {0, 0}, {1, 1}, 1),
       {1, 1, 3}},
      // Of padding alone: none of them.
      {DType::kF32,
       ConvolutionsOf({1, 64, 0, 64}, {16, 64, 3, 3}, {1, 1}, {2, 2}, {1, 1}, 1),
       {0, 0, 0},
       /*unfolds=*/false},
      {DType::kF32,
       ConvolutionsOf({1, 64, 64, 0}, {16, 64, 3, 3}, {1, 1}, {2, 2}, {1, 1}, 1),
       {0, 0, 0},
       /*unfolds=*/false},
  };
  for (const Case& large : cases) {
    const Convolutions& c = large.c;
    const auto y = c.Y();
    ASSERT_TRUE(y.ok()) << y.status();
    for (size_t o = 0; o < c.ops.size(); ++o) {
      const std::string& op = c.ops[o];
      std::string what = op;
      std::vector<Value> inputs;
      for (TensorType type : c.InputsOf(op, *y)) {
        type.dtype = large.dtype;
        inputs.push_back(testing::RandomNormal(type, &random));
        what += " " + type.ToString();
      }
      const int64_t products = cuda::CountsOfFakeBlas().products;
      const int64_t convolutions = cuda::CountsOfFakeDnn().convolutions;
      const Outcome outcome = Run(op, inputs, c.AttributesOf(op));
      ASSERT_TRUE(outcome.status.ok()) << what << ": " << outcome.status;
      if (!TestsRunOnADriver()) {
        const bool by_dnn = HasDnn() && large.unfolds;
        EXPECT_EQ(cuda::CountsOfFakeDnn().convolutions - convolutions, by_dnn ? 1 : 0) << what;
        EXPECT_EQ(cuda::CountsOfFakeBlas().products - products,
                  HasBlas() && !by_dnn ? large.slabs[o] : 0)
            << what;
        if (HasBlas() && !by_dnn) {
          EXPECT_GE(parts_, large.slabs[o]) << what;
        }
      }
      testing::ExpectNear(outcome.value, OnHost(op, inputs, c.AttributesOf(op)), what);
      for (const int displaced : {0, 1, 2}) {
        Places places;
        places.beside = 1;
        places.displaced = displaced;
        const Outcome elsewhere = Run(op, inputs, c.AttributesOf(op), places);
        ASSERT_TRUE(elsewhere.status.ok()) << what << ": " << elsewhere.status;
        EXPECT_EQ(elsewhere.value, outcome.value) << what << " with operand " << displaced;
      }
    }
  }
}

// A NaN or an infinity reaches what it is a part of and nothing else: padding is nothing that could
// be multiplied by it. (Not so by cuBLASLt, convolution_cuda.h.)
TEST_F(CudaKernelsTest, ConvolutionsKeepNanWhereItBelongs) {
  for (const int64_t channels : {1, 3, 6}) {
    const Convolutions c =
        ConvolutionsOf({2, channels, 6, 6}, {channels, channels, 3, 3}, {1, 1}, {1, 1}, {1, 1}, 1);
    for (const std::string& op : c.ops) {
      const std::vector<TensorType> types = c.InputsOf(op, *c.Y());
      for (const double value :
           {std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()}) {
        // In either operand: in a corner, within, and at the end.
        for (size_t poisoned = 0; poisoned < 2; ++poisoned) {
          const auto count = static_cast<size_t>(types[poisoned].num_elements());
          for (const size_t at : {size_t{0}, size_t{8}, size_t{14}, count - 1}) {
            if (at >= count) continue;
            std::vector<Value> inputs;
            for (size_t i = 0; i < 2; ++i) {
              std::vector<double> elements(static_cast<size_t>(types[i].num_elements()), 0.5);
              if (i == poisoned) elements[at] = value;
              inputs.push_back(testing::MakeValue<double>(types[i], elements));
            }
            const Outcome outcome = Run(op, inputs, c.AttributesOf(op));
            ASSERT_TRUE(outcome.status.ok()) << outcome.status;
            testing::ExpectNear(outcome.value, Expected(op, inputs, c.AttributesOf(op)), op);
          }
        }
      }
    }
  }
}

// Each to so much of itself, or of `scale` if it is less.
void ExpectWithin(const Value& got, const Value& expected, double relative, double scale,
                  const std::string& what) {
  ASSERT_EQ(got.type, expected.type) << what;
  const std::vector<double> x = testing::ToDoubles(got);
  const std::vector<double> y = testing::ToDoubles(expected);
  for (size_t i = 0; i < x.size(); ++i) {
    ASSERT_TRUE(testing::IsNear(x[i], y[i], relative * std::max(scale, std::abs(y[i]))))
        << what << " at " << i;
  }
}

Attributes AxisIs(int64_t axis) { return {{"axis", axis}}; }

// Rows of so many parts that these are taken together twice and three times.
TEST_F(CudaKernelsTest, LongRowsAreThoseOfTheHost) {
  SCOPED_TRACE(kSeed);
  std::mt19937_64 random(kSeed);
  const struct {
    Ints sizes;
    int64_t axis;
  } cases[] = {{{5000}, 0}, {{2, 20000}, 1}, {{20000, 2}, 0}, {{2, 2000, 3}, 1}};
  for (const DType dtype : {DType::kBF16, DType::kF32, DType::kF64}) {
    const double relative = dtype == DType::kBF16 ? 1e-2 : dtype == DType::kF32 ? 1e-5 : 1e-12;
    for (const auto& c : cases) {
      const TensorType type = testing::WithDType(dtype, c.sizes);
      const std::string what = type.ToString();
      const Value x = testing::RandomNormal(type, &random);
      const Value w = testing::RandomNormal(type, &random);
      for (const char* op : {"softmax", "log_softmax"}) {
        const Outcome outcome = Run(op, {x}, AxisIs(c.axis));
        ASSERT_TRUE(outcome.status.ok()) << outcome.status;
        ExpectWithin(outcome.value, OnHost(op, {x}, AxisIs(c.axis)), relative, 0,
                     std::string(op) + what);
      }
      // Of sums of so many numbers that are around 0 little is left.
      const double largest = 1000;
      for (const char* op : {"center", "center_grad", "softmax_grad"}) {
        const Outcome outcome = Run(op, {w, x}, AxisIs(c.axis));
        ASSERT_TRUE(outcome.status.ok()) << outcome.status;
        ExpectWithin(outcome.value, OnHost(op, {w, x}, AxisIs(c.axis)), relative, largest,
                     std::string(op) + what);
      }
      for (const char* op : {"arg_max", "arg_min"}) {
        const Outcome outcome = Run(op, {x}, AxisIs(c.axis));
        EXPECT_EQ(outcome.value, OnHost(op, {x}, AxisIs(c.axis))) << op << what;
      }
      if (c.axis + 1 != static_cast<int64_t>(c.sizes.size())) continue;
      const Ints rows(c.sizes.begin(), c.sizes.end() - 1);
      const Value labels =
          testing::RandomWhole(testing::WithDType(DType::kI32, rows), 0, 1999, &random);
      const Value g = testing::RandomNormal(testing::WithDType(dtype, rows), &random);
      const Outcome loss = Run("cross_entropy", {x, labels}, {});
      ExpectWithin(loss.value, OnHost("cross_entropy", {x, labels}, {}), relative, 0, what);
      const Outcome grad = Run("cross_entropy_grad", {x, labels, g}, {});
      ExpectWithin(grad.value, OnHost("cross_entropy_grad", {x, labels, g}, {}), relative, 0, what);
    }
  }
}

// In rows of one part and of several: what is out of the ordinary may be in any of these.
TEST_F(CudaKernelsTest, SoftmaxOfInfinitiesAndNan) {
  const double inf = std::numeric_limits<double>::infinity();
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const int64_t size : {2, 100, 3000}) {
    for (const auto& marks : {std::pair<double, double>{1000, 1000},
                              {-inf, -inf},
                              {nan, 1},
                              {1, nan},
                              {inf, 1},
                              {inf, inf},
                              {inf, -inf},
                              {nan, -inf},
                              {5, -inf}}) {
      for (const double rest : {-inf, 0.0}) {
        std::vector<double> x(static_cast<size_t>(size), rest);
        x.front() = marks.first;
        x.back() = marks.second;
        const Value row = testing::MakeValue<double>(Ints{size}, x);
        const std::string what =
            testing::ToString(testing::MakeValue<double>(Ints{3}, {x[0], rest, x.back()}));
        for (const char* op : {"softmax", "log_softmax"}) {
          ExpectWithin(Run(op, {row}, AxisIs(0)).value, OnHost(op, {row}, AxisIs(0)), 1e-12, 0,
                       std::string(op) + what);
        }
        for (const int64_t label : {int64_t{0}, size / 2, size - 1}) {
          const Value labels = testing::MakeValue<int64_t>(Ints{}, {label});
          const Value g = testing::MakeValue<double>(Ints{}, {2});
          ExpectWithin(Run("cross_entropy", {row, labels}, {}).value,
                       OnHost("cross_entropy", {row, labels}, {}), 1e-12, 0, what);
          ExpectWithin(Run("cross_entropy_grad", {row, labels, g}, {}).value,
                       OnHost("cross_entropy_grad", {row, labels, g}, {}), 1e-12, 0, what);
        }
      }
    }
  }
}

// Where a class is all but certain: what stands beside 1 keeps its digits, in whatever part.
TEST_F(CudaKernelsTest, SoftmaxKeepsWhatIsSmall) {
  for (const size_t certain : {0, 7, 1999}) {
    std::vector<double> x(2000, -30);
    x[certain] = 30;
    const Value row = testing::MakeValue<double>(Ints{2000}, x);
    const Value labels = testing::MakeValue<int64_t>(Ints{}, {static_cast<int64_t>(certain)});
    const Value g = testing::MakeValue<double>(Ints{}, {1});
    for (const char* op : {"softmax", "log_softmax"}) {
      ExpectWithin(Run(op, {row}, AxisIs(0)).value, OnHost(op, {row}, AxisIs(0)), 1e-12, 0, op);
    }
    ExpectWithin(Run("cross_entropy", {row, labels}, {}).value,
                 OnHost("cross_entropy", {row, labels}, {}), 1e-12, 0, "cross_entropy");
    ExpectWithin(Run("cross_entropy_grad", {row, labels, g}, {}).value,
                 OnHost("cross_entropy_grad", {row, labels, g}, {}), 1e-12, 0, "gradient");
    const Value p = Run("softmax", {row}, AxisIs(0)).value;
    for (const char* op : {"center", "center_grad", "softmax_grad"}) {
      ExpectWithin(Run(op, {p, row}, AxisIs(0)).value, OnHost(op, {p, row}, AxisIs(0)), 1e-12, 0,
                   op);
    }
  }
}

TEST_F(CudaKernelsTest, IgnoredRowsTakeNoPart) {
  const double inf = std::numeric_limits<double>::infinity();
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const Value logits =
      testing::MakeValue<double>(Ints{4, 2}, {1000, 0, 0, 1000, nan, inf, -inf, 3});
  const Value labels = testing::MakeValue<int64_t>(Ints{4}, {0, 0, -1, 0});
  const Value g = testing::MakeValue<double>(Ints{4}, {2, 2, nan, 1});
  const Attributes ignoring = {{"ignore_index", int64_t{-1}}};
  const Outcome losses = Run("cross_entropy", {logits, labels}, ignoring);
  ASSERT_TRUE(losses.status.ok()) << losses.status;
  EXPECT_EQ(testing::Elements<double>(losses.value), (std::vector<double>{0, 1000, 0, inf}));
  const Outcome grad = Run("cross_entropy_grad", {logits, labels, g}, ignoring);
  ASSERT_TRUE(grad.status.ok()) << grad.status;
  EXPECT_EQ(testing::Elements<double>(grad.value), (std::vector<double>{0, 0, -2, 2, 0, 0, -1, 1}));
  const Attributes all = {
      {"depth", int64_t{2}}, {"dtype", std::string("u8")}, {"ignore_index", int64_t{-1}}};
  const Outcome ones = Run("one_hot", {labels}, all);
  ASSERT_TRUE(ones.status.ok()) << ones.status;
  EXPECT_EQ(testing::Elements<uint8_t>(ones.value), (std::vector<uint8_t>{1, 0, 1, 0, 0, 0, 1, 0}));
}

// Equal ones and NaN in different parts of a row, and zeros of both signs.
TEST_F(CudaKernelsTest, ArgMaxPrefersTheFirstAndNan) {
  const double inf = std::numeric_limits<double>::infinity();
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const size_t size : {4, 700}) {
    const size_t third = size - 2;
    const size_t last = size - 1;
    for (const auto& marks : {std::vector<double>{3, 3, 1},
                              {nan, inf, nan},
                              {-nan, -inf, nan},
                              {-inf, inf, inf},
                              {-0.0, 0.0, -0.0},
                              {0.0, -0.0, 0.0},
                              {-1, -0.0, 0.0},
                              {-1, -1, -2},
                              {1, 2, 2}}) {
      std::vector<double> x(size, 0);
      x[1] = marks[0];
      x[third] = marks[1];
      x[last] = marks[2];
      for (const DType dtype : {DType::kF16, DType::kBF16, DType::kF32, DType::kF64}) {
        const Value row =
            testing::FromDoubles(testing::WithDType(dtype, {static_cast<int64_t>(size)}), x);
        for (const char* op : {"arg_max", "arg_min"}) {
          EXPECT_EQ(Run(op, {row}, AxisIs(0)).value, OnHost(op, {row}, AxisIs(0)))
              << op << " " << marks[0] << " " << marks[1] << " " << marks[2];
        }
      }
    }
    // Beyond what a double tells apart, and the ends of the range.
    const int64_t large = std::numeric_limits<int64_t>::max();
    for (const Ints& marks : {Ints{large - 1, large, large}, Ints{-large, -large - 1, 0}}) {
      std::vector<int64_t> x(size, 0);
      x[0] = marks[0];
      x[third] = marks[1];
      x[last] = marks[2];
      const Value row = testing::MakeValue<int64_t>(Ints{static_cast<int64_t>(size)}, x);
      for (const char* op : {"arg_max", "arg_min"}) {
        EXPECT_EQ(Run(op, {row}, AxisIs(0)).value, OnHost(op, {row}, AxisIs(0))) << op;
      }
    }
  }
}

// So many that sorted blocks are merged several times, with few different indices and with many.
// Sums that are not of the host's order have not its bits.
TEST_F(CudaKernelsTest, ScatterAddHasTheHostsBits) {
  SCOPED_TRACE(kSeed);
  std::mt19937_64 random(kSeed);
  for (const DType dtype : {DType::kF16, DType::kBF16, DType::kF32, DType::kF64, DType::kI16}) {
    for (const int64_t count : {255, 257, 512, 513, 3000}) {
      for (const int64_t size : {1, 3, 700}) {
        for (const Ints& others : {Ints{1, 1}, Ints{2, 9}}) {
          const std::string what = absl::StrCat(DTypeName(dtype), " ", count, " to ", size);
          const Attributes attributes = {{"axis", int64_t{1}}, {"size", size}};
          const TensorType type = testing::WithDType(dtype, {others[0], count, others[1]});
          const Value updates = IsFloating(dtype)
                                    ? testing::RandomNormal(type, &random)
                                    : testing::RandomWhole(type, -32768, 32767, &random);
          const auto indices = [&](const Ints& sizes) {
            return testing::RandomWhole(testing::WithDType(DType::kI16, sizes), 0, size - 1,
                                        &random);
          };
          const Value shared = indices({count});
          EXPECT_EQ(Run("scatter_add", {updates, shared}, attributes).value,
                    OnHost("scatter_add", {updates, shared}, attributes))
              << what;
          const Value own = indices({others[0], count, others[1]});
          EXPECT_EQ(Run("scatter_add_along", {updates, own}, attributes).value,
                    OnHost("scatter_add_along", {updates, own}, attributes))
              << what << " along";
        }
      }
    }
  }
}

TEST_F(CudaKernelsTest, RandomNumbersHaveTheHostsBits) {
  for (const int64_t seed : {int64_t{0}, int64_t{-3}, int64_t{0x299f31d0a4093822}}) {
    for (const int64_t offset : {int64_t{0}, int64_t{0x0370734413198a2e}}) {
      const std::vector<Value> inputs = {testing::MakeValue<int64_t>(Ints{}, {seed}),
                                         testing::MakeValue<int64_t>(Ints{}, {offset})};
      for (const DType dtype : testing::AllDTypes()) {
        if (dtype == DType::kBool) continue;
        for (const char* op : {"random_bits", "random_normal", "random_uniform"}) {
          if (IsFloating(dtype) == (op[7] == 'b')) continue;
          const Attributes attributes = TypeAttributes(testing::WithDType(dtype, {20011}));
          EXPECT_EQ(Run(op, inputs, attributes).value, OnHost(op, inputs, attributes))
              << op << " " << DTypeName(dtype) << " " << seed << " " << offset;
        }
      }
    }
  }
}

TEST_F(CudaKernelsTest, IndicesAreChecked) {
  const auto text = [&](const std::string& op, const std::vector<Value>& inputs,
                        const Attributes& attributes) {
    const absl::Status status = Run(op, inputs, attributes).status;
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << op;
    EXPECT_EQ(ErrorOf(status).reason, Reason::kBadType) << op;
    EXPECT_EQ(ErrorOf(status).op, op);
    return ErrorOf(status).message;
  };
  const auto floats = [](const Ints& sizes) {
    return testing::Zeros(testing::WithDType(DType::kF32, sizes));
  };
  const Value bad = testing::MakeValue<int32_t>(Ints{2, 2}, {0, 2, 3, -1});
  EXPECT_EQ(text("take", {floats({3, 5}), bad}, AxisIs(0)),
            "take: input 1, i32[2,2], holds 3 at [1,0], expected from 0 to 2");
  EXPECT_EQ(text("take_along", {floats({4, 2}), bad}, AxisIs(0)),
            "take_along: input 1, i32[2,2], holds -1 at [1,1], expected from "
            "0 to 3");
  EXPECT_EQ(text("take", {floats({0, 5}), bad}, AxisIs(0)),
            "take: input 1, i32[2,2], holds 0 at [0,0], expected none, for "
            "there is nothing to choose from");
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kI8}) {
    EXPECT_EQ(text("scatter_add", {testing::Zeros(testing::WithDType(dtype, {2, 2, 5})), bad},
                   {{"axis", int64_t{0}}, {"size", int64_t{4}}}),
              "scatter_add: input 1, i32[2,2], holds -1 at [1,1], expected "
              "from 0 to 3");
    EXPECT_EQ(text("scatter_add_along", {testing::Zeros(testing::WithDType(dtype, {2, 2})), bad},
                   {{"axis", int64_t{1}}, {"size", int64_t{3}}}),
              "scatter_add_along: input 1, i32[2,2], holds 3 at [1,0], "
              "expected from 0 to 2");
    EXPECT_EQ(text("scatter_add", {testing::Zeros(testing::WithDType(dtype, {2, 2, 5})), bad},
                   {{"axis", int64_t{0}}, {"size", int64_t{0}}}),
              "scatter_add: input 1, i32[2,2], holds 0 at [0,0], expected "
              "none, for there is nothing to choose from");
  }
  EXPECT_EQ(text("one_hot", {bad}, {{"depth", int64_t{3}}, {"dtype", std::string("f32")}}),
            "one_hot: input 0, i32[2,2], holds 3 at [1,0], expected from 0 "
            "to 2");
  EXPECT_EQ(text("cross_entropy", {floats({2, 2, 3}), bad}, {}),
            "cross_entropy: input 1, i32[2,2], holds 3 at [1,0], expected "
            "from 0 to 2");
  EXPECT_EQ(text("cross_entropy", {floats({2, 2, 3}), bad}, {{"ignore_index", int64_t{3}}}),
            "cross_entropy: input 1, i32[2,2], holds -1 at [1,1], expected "
            "from 0 to 2, or 3, which is ignored");
  EXPECT_EQ(text("cross_entropy_grad", {floats({2, 2, 3}), bad, floats({2, 2})}, {}),
            "cross_entropy_grad: input 1, i32[2,2], holds 3 at [1,0], "
            "expected from 0 to 2");
  // Nothing is read where there is no class.
  EXPECT_EQ(text("cross_entropy", {floats({2, 2, 0}), bad}, {}),
            "cross_entropy: input 1, i32[2,2], holds 0 at [0,0], expected "
            "none, for there is nothing to choose from");
  // Every dtype is read as what it is.
  const std::string at_0 = " at [0], expected from 0 to ";
  EXPECT_EQ(text("take", {floats({255}), testing::MakeValue<uint8_t>(Ints{1}, {255})}, AxisIs(0)),
            "take: input 1, u8[1], holds 255" + at_0 + "254");
  EXPECT_EQ(text("take", {floats({300}), testing::MakeValue<int8_t>(Ints{1}, {-1})}, AxisIs(0)),
            "take: input 1, i8[1], holds -1" + at_0 + "299");
  EXPECT_EQ(text("take", {floats({2}), testing::MakeValue<int64_t>(Ints{1}, {int64_t{1} << 32})},
                 AxisIs(0)),
            "take: input 1, i64[1], holds 4294967296" + at_0 + "1");
  // Where something else stands there by now, its value is not said.
  inputs_change_ = true;
  EXPECT_EQ(text("take", {floats({3, 5}), bad}, AxisIs(0)),
            "take: input 1, i32[2,2], holds an integer out of range at [1,0], expected from 0 to "
            "2");
  inputs_change_ = false;
  std::vector<float> count(300);
  for (size_t i = 0; i < count.size(); ++i) count[i] = static_cast<float>(i);
  const Value numbers = testing::MakeValue<float>(Ints{300}, count);
  const auto taken = [&](const Value& index) {
    return testing::ToDoubles(Run("take", {numbers, index}, AxisIs(0)).value);
  };
  EXPECT_EQ(taken(testing::MakeValue<int8_t>(Ints{}, {127}))[0], 127);
  EXPECT_EQ(taken(testing::MakeValue<uint8_t>(Ints{}, {255}))[0], 255);
  EXPECT_EQ(taken(testing::MakeValue<int16_t>(Ints{}, {299}))[0], 299);
}

// Where nothing of the result depends on indices, they are not looked at, as on the host.
TEST_F(CudaKernelsTest, IndicesOfNothingAreNotChecked) {
  const Value bad = testing::MakeValue<int32_t>(Ints{2}, {7, -1});
  const Value nothing = testing::Zeros(testing::WithDType(DType::kF32, {2, 0}));
  const Attributes five = {{"axis", int64_t{0}}, {"size", int64_t{5}}};
  EXPECT_TRUE(Run("take", {nothing, bad}, AxisIs(0)).status.ok());
  EXPECT_TRUE(Run("scatter_add", {nothing, bad}, five).status.ok());
  EXPECT_TRUE(
      Run("one_hot", {bad}, {{"depth", int64_t{0}}, {"dtype", std::string("f32")}}).status.ok());
  EXPECT_TRUE(Run("cross_entropy_grad",
                  {nothing, bad, testing::Zeros(testing::WithDType(DType::kF32, {2}))}, {})
                  .status.ok());
}

// In which order `x` is, by a sort that is not ours.
Ints OrderOf(const std::vector<double>& x, bool descending) {
  Ints order(x.size());
  for (size_t i = 0; i < x.size(); ++i) order[i] = static_cast<int64_t>(i);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    if (descending) std::swap(a, b);
    return x[a] < x[b] || (x[a] == x[a] && x[b] != x[b]);
  });
  return order;
}

// Of all sizes about those at which there is one more merge, or one more thread to it.
TEST_F(CudaKernelsTest, ArgSortMergesRunsOfWhicheverSize) {
  SCOPED_TRACE(kSeed);
  std::mt19937_64 random(kSeed);
  for (const DType dtype : {DType::kI8, DType::kF32, DType::kF64, DType::kI64}) {
    for (const int64_t size : {15, 16, 17, 32, 33, 511, 512, 513, 1025, 2049, 3000}) {
      for (const int64_t stride : {1, 3}) {
        const Value x =
            testing::RandomWhole(testing::WithDType(dtype, {2, size, stride}), -99, 99, &random);
        const std::vector<double> elements = testing::ToDoubles(x);
        for (const int64_t descending : {0, 1}) {
          for (const int64_t k : {int64_t{1}, int64_t{9}, int64_t{50}, size / 2, size}) {
            if (k > size) continue;
            const Outcome outcome =
                Run("arg_sort", {x}, {{"axis", int64_t{1}}, {"descending", descending}, {"k", k}});
            ASSERT_TRUE(outcome.status.ok()) << outcome.status;
            const Ints got = testing::Elements<int64_t>(outcome.value);
            for (int64_t row = 0; row < 2 * stride; ++row) {
              const int64_t first = row / stride * stride;
              std::vector<double> of_row;
              for (int64_t i = 0; i < size; ++i) {
                of_row.push_back(elements[first * size + row % stride + i * stride]);
              }
              const Ints order = OrderOf(of_row, descending == 1);
              for (int64_t i = 0; i < k; ++i) {
                ASSERT_EQ(got[first * k + row % stride + i * stride], order[i])
                    << x.type.ToString() << " k " << k << " row " << row << " at " << i;
              }
            }
          }
        }
      }
    }
  }
}

// NaN of either sign is above all else, -0 is 0, infinities are numbers; every half there is.
TEST_F(CudaKernelsTest, ArgSortOrdersWhatIsNoOrdinaryNumber) {
  const double inf = std::numeric_limits<double>::infinity();
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const std::vector<double> x = {0.0, nan, -inf, 2, -nan, -0.0, inf, 2, -2, 0.0, -0.25, 0.25};
  const auto expect = [&](const Value& value, const std::vector<double>& elements) {
    for (const int64_t descending : {0, 1}) {
      const Outcome outcome =
          Run("arg_sort", {value}, {{"axis", int64_t{0}}, {"descending", descending}});
      EXPECT_EQ(testing::Elements<int64_t>(outcome.value), OrderOf(elements, descending == 1))
          << value.type.ToString() << " " << descending;
    }
  };
  for (const DType dtype : {DType::kF16, DType::kBF16, DType::kF32, DType::kF64}) {
    expect(testing::FromDoubles(testing::WithDType(dtype, {12}), x), x);
  }
  for (const DType dtype : {DType::kF16, DType::kBF16}) {
    std::string bytes;
    for (int bits = 0; bits < 0x10000; ++bits) {
      bytes.push_back(static_cast<char>(bits & 0xff));
      bytes.push_back(static_cast<char>(bits >> 8));
    }
    const Value halves{testing::WithDType(dtype, {0x10000}), bytes};
    expect(halves, testing::ToDoubles(halves));
  }
  // A bool is true whatever is in its byte, as long as there is something.
  expect(Value{testing::WithDType(DType::kBool, {4}), std::string("\2\0\1\xff", 4)}, {1, 0, 1, 1});
}

// By all their bits, beyond what a double tells apart.
TEST_F(CudaKernelsTest, ArgSortTellsEveryIntegerFromTheNext) {
  const int64_t least = std::numeric_limits<int64_t>::min();
  const int64_t most = std::numeric_limits<int64_t>::max();
  const auto expect = [&](const Value& x, const Ints& ascending) {
    for (const int64_t descending : {0, 1}) {
      const Outcome outcome =
          Run("arg_sort", {x}, {{"axis", int64_t{0}}, {"descending", descending}});
      EXPECT_EQ(testing::Elements<int64_t>(outcome.value),
                descending == 1 ? Ints(ascending.rbegin(), ascending.rend()) : ascending)
          << testing::ToString(x);
    }
  };
  expect(testing::MakeValue<int64_t>(Ints{6}, {most, 0, most - 1, least + 1, -1, least}),
         {5, 3, 4, 1, 2, 0});
  expect(testing::MakeValue<int32_t>(Ints{4}, {0x7fffffff, -1, 0, -0x7fffffff - 1}), {3, 1, 2, 0});
  expect(testing::MakeValue<int16_t>(Ints{4}, {32767, -1, 0, -32768}), {3, 1, 2, 0});
  expect(testing::MakeValue<int8_t>(Ints{4}, {127, -1, 0, -128}), {3, 1, 2, 0});
  expect(testing::MakeValue<uint8_t>(Ints{4}, {127, 255, 0, 128}), {2, 0, 3, 1});
}

// What a sort of all, of the first few and of the first half need beside the result.
TEST_F(CudaKernelsTest, ArgSortNeedsEightBytesForEachElement) {
  const TensorType x = testing::WithDType(DType::kF32, {2, 1 << 16});
  const auto workspace = [&](int64_t k) {
    return Make("arg_sort", {&x}, {{"axis", int64_t{1}}, {"k", k}})->kernel->workspace_bytes();
  };
  const int64_t elements = x.num_elements();
  EXPECT_EQ(workspace(1 << 16), 8 * elements);
  EXPECT_LE(workspace(1 << 15), 16 * elements);
  EXPECT_EQ(workspace(2), elements + elements / 2);  // of runs of 16, and of 32
  EXPECT_EQ(workspace(0), 0);
}

// Where an index takes the room of the key, of the dtypes for which that may be.
TEST_F(CudaKernelsTest, ArgSortHasKernelsForRowsOfAnyLength) {
  for (const DType dtype : {DType::kI32, DType::kF32}) {
    for (const int64_t size : {(int64_t{1} << 32) - 1, int64_t{1} << 32}) {
      const TensorType x = testing::WithDType(dtype, {size});
      const auto made = Make("arg_sort", {&x}, {{"axis", int64_t{0}}});
      EXPECT_TRUE(made.ok()) << made.status();
    }
  }
}

// Windows large enough, and results few enough, that threads have parts of windows.
TEST_F(CudaKernelsTest, PoolsOfLargeWindowsAreTakenInParts) {
  SCOPED_TRACE(kSeed);
  std::mt19937_64 random(kSeed);
  struct Sizes {
    Ints x, kernel, padding, dilation;
  };
  for (const Sizes& s : {Sizes{{2, 3, 40, 50}, {40, 50}, {0, 0}, {1, 1}},
                         Sizes{{1, 2, 1, 3000}, {1, 2990}, {0, 7}, {1, 1}},
                         Sizes{{1, 1, 3000, 2}, {2990, 1}, {9, 0}, {1, 1}},
                         Sizes{{2, 1, 70, 9}, {64, 8}, {32, 4}, {1, 1}},
                         Sizes{{1, 2, 60, 40}, {30, 12}, {3, 1}, {2, 3}}}) {
    for (const DType dtype : {DType::kI8, DType::kI64, DType::kF16, DType::kF32, DType::kF64}) {
      // Few different ones: of equals the first counts.
      const Value x = testing::RandomWhole(testing::WithDType(dtype, s.x), -3, 3, &random);
      const Attributes attributes = {{"kernel", s.kernel}, {"padding", s.padding}};
      Attributes dilated = attributes;
      dilated.insert(dilated.begin(), {"dilation", s.dilation});
      EXPECT_EQ(Run("max_pool_index", {x}, dilated).value, Expected("max_pool_index", {x}, dilated))
          << x.type.ToString();
      if (s.dilation != Ints{1, 1} || dtype == DType::kI8 || dtype == DType::kI64) continue;
      for (const int64_t count_padding : {0, 1}) {
        Attributes counting = attributes;
        counting.insert(counting.begin(), {"count_padding", count_padding});
        testing::ExpectNear(Run("avg_pool", {x}, counting).value,
                            Expected("avg_pool", {x}, counting), "avg_pool " + x.type.ToString());
      }
    }
  }
}

TEST_F(CudaKernelsTest, MaxPoolIndexPrefersTheFirstAndNanToAllButPadding) {
  const double inf = std::numeric_limits<double>::infinity();
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const Value x = testing::MakeValue<double>(Ints{1, 1, 4, 4}, {1, 3, 3, 1,            //
                                                                3, 3, nan, inf,        //
                                                                -inf, -inf, nan, nan,  //
                                                                -inf, -inf, -1, nan});
  const Attributes two = {{"kernel", Ints{2, 2}}, {"stride", Ints{2, 2}}};
  EXPECT_EQ(testing::Elements<int32_t>(Run("max_pool_index", {x}, two).value),
            (std::vector<int32_t>{1, 6, 8, 10}));
  const Attributes padded = {
      {"kernel", Ints{2, 2}}, {"padding", Ints{1, 1}}, {"stride", Ints{4, 4}}};
  EXPECT_EQ(testing::Elements<int32_t>(Run("max_pool_index", {x}, padded).value),
            (std::vector<int32_t>{0, 3, 12, 15}));
  // In parts: the first NaN among many, the first of equals, what is less than nothing.
  const auto in_parts = [&](const std::vector<double>& elements) {
    const Value many =
        testing::FromDoubles(testing::WithDType(DType::kF32, {1, 1, 20, 50}), elements);
    const Outcome outcome = Run("max_pool_index", {many}, {{"kernel", Ints{20, 50}}});
    return testing::Elements<int32_t>(outcome.value)[0];
  };
  std::vector<double> elements(1000, -inf);
  EXPECT_EQ(in_parts(elements), 0);
  for (const int at : {413, 607, 958}) elements[at] = -0.0;
  elements[700] = 0.0;
  EXPECT_EQ(in_parts(elements), 413);
  elements[601] = inf;
  EXPECT_EQ(in_parts(elements), 601);
  for (const int at : {333, 990, 330, 349}) elements[at] = nan;
  EXPECT_EQ(in_parts(elements), 330);
  // Beyond what a double tells apart.
  const int64_t large = int64_t{1} << 62;
  const Value integers = testing::MakeValue<int64_t>(Ints{1, 1, 1, 2}, {large, large + 1});
  EXPECT_EQ(
      testing::Elements<int32_t>(Run("max_pool_index", {integers}, {{"kernel", Ints{1, 2}}}).value),
      (std::vector<int32_t>{1}));
}

// Half types are added up in f32.
TEST_F(CudaKernelsTest, AvgPoolOfHalfTypesRoundsOnce) {
  const Value x =
      testing::FromDoubles(testing::WithDType(DType::kF16, {1, 1, 1, 4}), {1, 2048, 1, 2});
  EXPECT_EQ(testing::ToDoubles(Run("avg_pool", {x}, {{"kernel", Ints{1, 4}}}).value)[0], 513);
  // Of parts each sum would be infinite.
  const Value in_parts = testing::FromDoubles(testing::WithDType(DType::kF16, {1, 1, 1, 1024}),
                                              std::vector<double>(1024, 2048));
  EXPECT_EQ(testing::ToDoubles(Run("avg_pool", {in_parts}, {{"kernel", Ints{1, 1024}}}).value)[0],
            2048);
}

// 4,096 of these have an exact sum in f32, the 8,192 that a thread adds up have none.
TEST_F(CudaKernelsTest, AvgPoolOfLargeWindowsKeepsItsDigits) {
  const double element = 4095.0 / 4096;
  const Value x = testing::FromDoubles(testing::WithDType(DType::kF32, {1, 1, 2048, 1024}),
                                       std::vector<double>(2048 * 1024, element));
  const Value mean = Run("avg_pool", {x}, {{"kernel", Ints{2048, 1024}}}).value;
  EXPECT_NEAR(testing::ToDoubles(mean)[0], element, 1e-6);
}

// So many elements that their parts are combined once, twice and three times.
TEST_F(CudaKernelsTest, NormsOfLongRowsAreAddedUpInParts) {
  SCOPED_TRACE(kSeed);
  std::mt19937_64 random(kSeed);
  struct Sizes {
    Ints x, rows, weights;
  };
  for (const DType dtype : {DType::kF32, DType::kF64}) {
    for (const Sizes& s : {Sizes{{2, 5000}, {0, 1}, {1, 2}}, Sizes{{5000, 2}, {1, 2}, {1, 2}},
                           Sizes{{90, 2, 80}, {1, 2}, {1, 2}}, Sizes{{300, 3, 20}, {1, 2}, {1, 2}},
                           Sizes{{70001}, {0, 0}, {0, 0}}, Sizes{{3, 70001}, {0, 1}, {0, 1}}}) {
      for (const int64_t center : {0, 1}) {
        const Value x = testing::RandomNormal(testing::WithDType(dtype, s.x), &random);
        const Value g = testing::RandomNormal(x.type, &random);
        const Ints sizes(s.x.begin() + s.weights[0], s.x.begin() + s.weights[1]);
        const Value weight = testing::RandomNormal(testing::WithDType(dtype, sizes), &random);
        const Attributes of_moments = {{"center", center}, {"rows", s.rows}};
        const Value moments = Expected("moments", {x}, of_moments);
        const Attributes attributes = {
            {"center", center}, {"epsilon", 0.25}, {"rows", s.rows}, {"weights", s.weights}};
        const auto expect = [&](const char* op, const std::vector<Value>& inputs,
                                const Attributes& with) {
          const Outcome outcome = Run(op, inputs, with);
          ASSERT_TRUE(outcome.status.ok()) << outcome.status;
          testing::ExpectNear(outcome.value, Expected(op, inputs, with), op + x.type.ToString());
        };
        expect("moments", {x}, of_moments);
        expect("normalize_grad", {x, moments, weight, g}, attributes);
        expect("normalize_weight_grad", {x, moments, g}, attributes);
      }
    }
  }
}

// A sum of many numbers in f32, or of squares less the square of sums, would lose their digits.
TEST_F(CudaKernelsTest, MomentsOfLongRowsKeepTheirDigits) {
  const int64_t size = 1 << 20;
  const auto moments = [&](double even, double odd, int64_t center) {
    std::vector<double> x(static_cast<size_t>(size), even);
    for (size_t i = 1; i < x.size(); i += 2) x[i] = odd;
    const Value row = testing::FromDoubles(testing::WithDType(DType::kF32, {1, size}), x);
    const Outcome outcome = Run("moments", {row}, {{"center", center}, {"rows", Ints{0, 1}}});
    return testing::ToDoubles(outcome.value);
  };
  EXPECT_NEAR(moments(0.1, 0.1, 1)[0], 0.1, 1e-8);
  EXPECT_NEAR(moments(0.1, 0.1, 1)[1], 0, 1e-12);
  EXPECT_NEAR(moments(0.1, 0.1, 0)[1], 0.01, 1e-8);
  EXPECT_NEAR(moments(4096, 4096.5, 1)[0], 4096.25, 1e-3);
  EXPECT_NEAR(moments(4096, 4096.5, 1)[1], 0.0625, 1e-6);
}

// An infinity has no variance, but a mean.
TEST_F(CudaKernelsTest, MomentsOfInfinitiesAndNan) {
  const double inf = std::numeric_limits<double>::infinity();
  const double nan = std::numeric_limits<double>::quiet_NaN();
  // In the first of the elements that a thread looks at, and further on.
  const int64_t size = 2000;
  std::vector<double> x(4 * size, 1);
  x[3] = inf;
  x[size + 777] = -inf;
  x[2 * size + 1990] = nan;
  for (const DType dtype : {DType::kF32, DType::kF64}) {
    const Value rows = testing::FromDoubles(testing::WithDType(dtype, {4, size}), x);
    const Attributes of_rows = {{"rows", Ints{0, 1}}};
    const std::vector<double> moments = testing::ToDoubles(Run("moments", {rows}, of_rows).value);
    EXPECT_EQ(moments[0], inf);
    EXPECT_EQ(moments[1], -inf);
    EXPECT_TRUE(std::isnan(moments[2]));
    EXPECT_EQ(moments[3], 1);
    for (int row = 0; row < 3; ++row) EXPECT_TRUE(std::isnan(moments[4 + row]));
    EXPECT_EQ(moments[7], 0);
    const Outcome squares = Run("moments", {rows}, {{"center", int64_t{0}}, {"rows", Ints{0, 1}}});
    const std::vector<double> got = testing::ToDoubles(squares.value);
    for (int row = 0; row < 4; ++row) EXPECT_EQ(got[row], 0);
    EXPECT_EQ(got[4], inf);
    EXPECT_EQ(got[5], inf);
    EXPECT_TRUE(std::isnan(got[6]));
    EXPECT_EQ(got[7], 1);
  }
}

// Of every width, in patches that are not full on either side, and not.
TEST_F(CudaKernelsTest, TransposesOfManySizes) {
  std::mt19937_64 random(kSeed);
  for (const Ints& sizes : {Ints{37, 21, 40}, Ints{8, 1, 16}, Ints{64, 3, 33}, Ints{5, 41, 2, 9},
                            Ints{2, 2, 300}, Ints{7, 9, 8}}) {
    Ints perm;
    for (size_t i = 0; i < sizes.size(); ++i) perm.push_back(static_cast<int64_t>(i));
    do {
      for (const DType dtype : {DType::kU8, DType::kF16, DType::kI32, DType::kF64}) {
        Value x = testing::Zeros(testing::WithDType(dtype, sizes));
        for (char& byte : x.bytes) byte = static_cast<char>(random() % 100);
        const Attributes attributes = {{"perm", perm}};
        EXPECT_EQ(Run("transpose", {x}, attributes).value, Expected("transpose", {x}, attributes))
            << x.type.ToString() << " " << perm[0] << perm[1] << perm[2];
      }
    } while (std::next_permutation(perm.begin(), perm.end()));
  }
}

TEST_F(CudaKernelsTest, CountsOfPackedRowsAreChecked) {
  const Attributes parts = {{"parts", int64_t{2}}};
  for (const DType dtype : {DType::kU8, DType::kF16, DType::kF32, DType::kF64}) {
    const Value x = testing::Zeros(testing::WithDType(dtype, {600, 2}));
    for (const int64_t count :
         {int64_t{301}, int64_t{-1}, int64_t{1} << 40, std::numeric_limits<int64_t>::min()}) {
      for (const std::string op : {"pack_rows", "unpack_rows"}) {
        const absl::Status status =
            Run(op, {x, testing::MakeValue<int64_t>(Ints{1}, {count})}, parts).status;
        EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << op;
        const Error error = ErrorOf(status);
        EXPECT_EQ(error.reason, Reason::kBadType);
        EXPECT_EQ(error.op, op);
        EXPECT_EQ(error.expected, "from 0 to 300");
        EXPECT_EQ(error.got, absl::StrCat(count));
        EXPECT_EQ(error.message, absl::StrCat(op, ": input 1, i64[1], holds ", count,
                                              " at [0], expected from 0 to 300"));
      }
    }
    for (const int64_t count : {0, 300}) {
      const Value fits = testing::MakeValue<int64_t>(Ints{1}, {count});
      EXPECT_TRUE(Run("pack_rows", {x, fits}, parts).status.ok());
    }
    // Nothing is moved, and so nothing looked at.
    const Value nothing = testing::Zeros(testing::WithDType(dtype, {4, 0}));
    EXPECT_TRUE(
        Run("pack_rows", {nothing, testing::MakeValue<int64_t>(Ints{1}, {9})}, parts).status.ok());
  }
}

// Numbers whose sums are exact in f32: a half type's result is that of rounding once.
TEST_F(CudaKernelsTest, ReductionsInSeveralLaunchesLoseNothing) {
  struct Sizes {
    Ints x, axes;
  };
  const std::vector<Sizes> all = {
      // Of one result, of few, in rows, in columns, and between: one part and many, with a rest.
      {{20011}, {}},
      {{3, 5000}, {1}},
      {{5000, 3}, {0}},
      {{130, 129}, {1}},
      {{128, 129}, {0}},
      {{2, 3000, 5}, {1}},
      {{3, 5, 70, 9}, {1, 3}},
      {{64, 3, 67}, {0, 2}},
      {{40, 5, 30}, {0, 2}},
      {{127, 2}, {0}},
      {{9, 127}, {1}},
      {{2, 2, 4099}, {0, 2}},
      // Whose terms are packs of 16 bytes, of some dtypes or of all: as many as in one, of one part
      // and of many, a dimension further out beside them, as a row of one.
      {{20016}, {}},
      {{700, 16}, {1}},
      {{3, 5008}, {1}},
      {{8, 3, 48}, {0, 2}},
      {{5, 130, 12}, {2}},
      {{2, 3, 40, 16}, {0, 3}},
      {{0, 16}, {1}},
      {{40, 3, 1008}, {0, 2}},
  };
  std::mt19937_64 random(kSeed);
  for (const DType dtype : testing::AllDTypes()) {
    if (dtype == DType::kBool) continue;
    for (const Sizes& s : all) {
      const TensorType type = testing::WithDType(dtype, s.x);
      Value x = testing::RandomWhole(type, dtype == DType::kU8 ? 0 : -9, 99, &random);
      Value signs = x;
      if (IsFloating(dtype)) {
        // Of a few dozens the sum is none of a half type's numbers.
        std::vector<double> elements = testing::ToDoubles(x);
        for (double& element : elements) element /= 64;
        x = testing::FromDoubles(type, elements);
        for (double& element : elements) element = element < 0.5 ? -1 : 1;
        signs = testing::FromDoubles(type, elements);
      } else {
        for (char& byte : signs.bytes) byte = static_cast<char>(random() | 1);
      }
      const Attributes axes = {{"axes", s.axes}};
      for (const char* op : {"sum", "mean", "max", "min", "prod"}) {
        if (std::string(op) == "mean" && !IsFloating(dtype)) continue;
        const Value& input = std::string(op) == "prod" ? signs : x;
        const Outcome outcome = Run(op, {input}, axes);
        ASSERT_TRUE(outcome.status.ok()) << outcome.status;
        EXPECT_EQ(outcome.value, Expected(op, {input}, axes)) << op << " " << type.ToString();
        // Sums that have rounded last bits, too.
        const Value rounded = testing::RandomNormal(type, &random);
        const Value& any = IsFloating(dtype) ? rounded : input;
        EXPECT_EQ(Run(op, {any}, axes, /*beside=*/1).value, Run(op, {any}, axes).value)
            << op << " " << type.ToString() << " beside";
      }
    }
  }
}

// However many results there are, each of whose parts is in the workspace.
TEST_F(CudaKernelsTest, SumsHaveNoPartsOfMoreThanSoManyTerms) {
  struct Sizes {
    const char* op;
    Ints x;
    int64_t axis;
    int64_t side_by_side;  // terms of a part that are added up apart from each other
    int64_t bytes_of_part;
  };
  for (const Sizes& s :
       {Sizes{"sum", {1 << 20, 1 << 16}, 0, 8, 4}, Sizes{"sum", {1 << 17, 1 << 20}, 1, 4, 4},
        Sizes{"softmax", {1 << 20, 1 << 17}, 0, 1, 8},
        Sizes{"log_softmax", {1 << 17, 1 << 20}, 1, 1, 8}}) {
    const TensorType type = testing::WithDType(DType::kF32, s.x);
    SCOPED_TRACE(s.op + type.ToString());
    const Attributes attributes = {std::string(s.op) == "sum"
                                       ? Attributes::value_type{"axes", Ints{s.axis}}
                                       : Attributes::value_type{"axis", s.axis}};
    const auto made = Make(s.op, {&type}, attributes);
    ASSERT_TRUE(made.ok()) << made.status();
    EXPECT_GE(made->kernel->workspace_bytes(),
              type.num_elements() / (kMostTerms * s.side_by_side) * s.bytes_of_part);
  }
}

// Their workspace is a small part of what they read, and empty where nothing is cut.
TEST_F(CudaKernelsTest, ReductionsWantLittleWorkspace) {
  for (const Ints& sizes : {Ints{1 << 26}, Ints{1 << 10, 1 << 16}, Ints{1 << 16, 1 << 10},
                            Ints{1 << 20, 64}, Ints{64, 1 << 20}, Ints{7, 1001, 997}}) {
    for (const Ints& axes : {Ints{}, Ints{0}, Ints{static_cast<int64_t>(sizes.size()) - 1}}) {
      for (const DType dtype : {DType::kF16, DType::kF32, DType::kI8}) {
        const TensorType type = testing::WithDType(dtype, sizes);
        const auto made = Make("sum", {&type}, {{"axes", axes}});
        ASSERT_TRUE(made.ok()) << made.status();
        const int64_t workspace = made->kernel->workspace_bytes();
        const int64_t results = made->outputs[0].num_elements();
        const int64_t part = dtype == DType::kI8 ? 1 : 4;
        EXPECT_LE(workspace, type.num_elements() * part / 62);
        const bool is_cut = type.num_elements() / results >= 128 && results < 1 << 15;
        EXPECT_GE(workspace > 0, is_cut) << type.ToString();
      }
    }
  }
}

// Whichever comes first, in parts, packs and rows of the host's and the GPU's cutting.
TEST_F(CudaKernelsTest, OfBothZerosOneWinsWhereverTheyStand) {
  for (const DType dtype : {DType::kF16, DType::kBF16, DType::kF32, DType::kF64}) {
    for (const int64_t size : {int64_t{2}, int64_t{24}, int64_t{1300}, int64_t{1303}}) {
      for (const bool backwards : {false, true}) {
        for (const char* op : {"max", "min"}) {
          const bool is_max = std::string(op) == "max";
          std::vector<double> elements(static_cast<size_t>(size), is_max ? -1 : 1);
          elements[0] = backwards ? 0.0 : -0.0;
          elements[static_cast<size_t>(size) * 2 / 3] = backwards ? -0.0 : 0.0;
          const Value x = testing::FromDoubles(testing::WithDType(dtype, {size}), elements);
          const Outcome outcome = Run(op, {x}, {{"axes", Ints{}}});
          ASSERT_TRUE(outcome.status.ok()) << outcome.status;
          EXPECT_EQ(std::signbit(testing::ToDoubles(outcome.value)[0]), !is_max)
              << op << " " << x.type.ToString() << " " << backwards;
          EXPECT_EQ(outcome.value, OnHost(op, {x}, {{"axes", Ints{}}})) << op;
        }
      }
    }
  }
}

TEST_F(CudaKernelsTest, NanWinsWhereverItStands) {
  for (const DType dtype : {DType::kF16, DType::kBF16, DType::kF32, DType::kF64}) {
    const TensorType type = testing::WithDType(dtype, {1300});
    for (const size_t at : {size_t{0}, size_t{5}, size_t{777}, size_t{1299}}) {
      std::vector<double> elements(1300, std::numeric_limits<double>::infinity());
      elements[3] = -elements[3];
      elements[at] = std::nan("");
      for (const char* op : {"max", "min"}) {
        const Outcome outcome = Run(op, {testing::FromDoubles(type, elements)}, {});
        EXPECT_TRUE(std::isnan(testing::ToDoubles(outcome.value)[0])) << op << " " << at;
      }
    }
    // What is less than all finite numbers is not taken for nothing.
    const double least = -std::numeric_limits<double>::infinity();
    const Value infinite = testing::FromDoubles(type, std::vector<double>(1300, least));
    EXPECT_EQ(testing::ToDoubles(Run("max", {infinite}, {}).value)[0], least);
  }
}

// The evaluator adds in the same order.
TEST_F(CudaKernelsTest, CumSumHasTheBitsOfItsOrder) {
  std::mt19937_64 random(kSeed);
  for (const Ints& sizes : {Ints{33}, Ints{1000}, Ints{700, 3}, Ints{3, 700}, Ints{2, 65, 3}}) {
    for (const DType dtype : testing::AllDTypes()) {
      if (dtype == DType::kBool) continue;
      const TensorType type = testing::WithDType(dtype, sizes);
      Value x = IsFloating(dtype) ? testing::RandomNormal(type, &random) : testing::Zeros(type);
      if (!IsFloating(dtype)) {
        for (char& byte : x.bytes) byte = static_cast<char>(random());
      }
      for (size_t axis = 0; axis < sizes.size(); ++axis) {
        for (const int64_t reverse : {0, 1}) {
          const Attributes attributes = {{"axis", static_cast<int64_t>(axis)},
                                         {"reverse", reverse}};
          const Outcome outcome = Run("cum_sum", {x}, attributes);
          ASSERT_TRUE(outcome.status.ok()) << outcome.status;
          EXPECT_EQ(outcome.value, Expected("cum_sum", {x}, attributes)) << type.ToString();
        }
      }
    }
  }
  for (const Ints& sizes : {Ints{1 << 14, 0}, Ints{0, 2, 1 << 14}, Ints{2, 0, 1 << 14}}) {
    for (const int64_t axis : {0, 1}) {
      const Value none = testing::Zeros(testing::WithDType(DType::kI32, sizes));
      const Outcome outcome = Run("cum_sum", {none}, {{"axis", axis}});
      EXPECT_TRUE(outcome.status.ok()) << outcome.status;
      EXPECT_TRUE(outcome.value.bytes.empty());
    }
  }
  // The first is the element itself: nothing is added to it.
  const Value zeros = testing::MakeValue<double>(Ints{2}, {-0.0, -0.0});
  for (const double sum :
       testing::ToDoubles(Run("cum_sum", {zeros}, {{"axis", int64_t{0}}}).value)) {
    EXPECT_TRUE(std::signbit(sum));
  }
}

// More inputs than a launch takes.
TEST_F(CudaKernelsTest, ManyInputsTakeSeveralLaunches) {
  std::mt19937_64 random(kSeed);
  for (const int64_t axis : {0, 1}) {
    for (const size_t count : {size_t{127}, size_t{128}, size_t{129}, size_t{400}}) {
      for (const DType dtype : {DType::kBool, DType::kBF16, DType::kF32, DType::kI64}) {
        std::vector<Value> inputs;
        for (size_t i = 0; i < count; ++i) {
          Ints sizes = {5, 3};
          // Some have nothing.
          sizes[static_cast<size_t>(axis)] = static_cast<int64_t>(random() % 4);
          inputs.push_back(testing::RandomWhole(testing::WithDType(dtype, sizes), 0, 1, &random));
        }
        const Attributes attributes = {{"axis", axis}};
        EXPECT_EQ(Run("concat", inputs, attributes).value, Expected("concat", inputs, attributes));
        const auto used = std::count_if(inputs.begin(), inputs.end(),
                                        [](const Value& input) { return !input.bytes.empty(); });
        EXPECT_EQ(parts_, (used + 127) / 128);
      }
    }
  }
  for (const size_t count : {size_t{256}, size_t{257}, size_t{700}}) {
    for (const DType dtype : {DType::kF16, DType::kBF16, DType::kF32, DType::kF64}) {
      // Products so far are beyond f16, or not among its numbers.
      std::vector<Value> factors(count,
                                 testing::FromDoubles(testing::WithDType(dtype, {3}), {1, -1, 1}));
      const Value large = testing::FromDoubles(testing::WithDType(dtype, {3}), {256, 1.25, 256});
      const Value small = testing::FromDoubles(testing::WithDType(dtype, {3}), {0.5, 1.25, 0.25});
      factors[0] = factors[250] = large;
      factors[count - 1] = small;
      const double sign = count % 2 == 0 ? -1 : 1;
      const Value expected =
          testing::FromDoubles(testing::WithDType(dtype, {3}), {32768, sign * 1.953125, 16384});
      EXPECT_EQ(Run("product", factors, {}).value, expected) << count;
    }
  }
}

// Elements of which each thread sets several.
TEST_F(CudaKernelsTest, ManyElementsAreAllSet) {
  std::mt19937_64 random(kSeed);
  for (const int64_t size : {1025, 40000, 150001}) {
    const Value x = testing::RandomNormal(testing::WithDType(DType::kF16, {size}), &random);
    const Value holders =
        testing::RandomWhole(testing::WithDType(DType::kF32, {size}), 0, 3, &random);
    EXPECT_EQ(Run("share", {x, holders}, {}).value, Expected("share", {x, holders}, {}));
    EXPECT_EQ(Run("holds", {x, x}, {}).value, Expected("holds", {x, x}, {}));
    const Attributes range = {{"axis", int64_t{0}}, {"begin", int64_t{7}}, {"end", size - 3}};
    EXPECT_EQ(Run("slice", {x}, range).value, Expected("slice", {x}, range));
    const Attributes dims = {{"dims", Ints{3, size}}};
    EXPECT_EQ(Run("expand", {x}, dims).value, Expected("expand", {x}, dims));
  }
}

TEST_F(CudaKernelsTest, HoldersAreSelectedAndFactorsAreNotRounded) {
  using Doubles = std::vector<double>;
  const double nan = std::nan("");
  const double inf = std::numeric_limits<double>::infinity();
  for (const DType dtype : {DType::kF16, DType::kBF16, DType::kF32, DType::kF64}) {
    const TensorType five = testing::WithDType(dtype, {5});
    const Value x = testing::FromDoubles(five, {nan, 1, -0.0, inf, nan});
    const Value y = testing::FromDoubles(five, {nan, nan, 0.0, inf, 1});
    EXPECT_EQ(testing::ToDoubles(Run("holds", {x, y}, {}).value), (Doubles{1, 0, 1, 1, 0}));
    const Value one_nan = testing::FromDoubles(testing::WithDType(dtype, {}), {nan});
    EXPECT_EQ(testing::ToDoubles(Run("holds", {x, one_nan}, {}).value), (Doubles{1, 0, 0, 0, 1}));
    const Value holders =
        testing::FromDoubles(testing::WithDType(DType::kF32, {5}), {0, 4, -0.0, 0, 0});
    EXPECT_EQ(testing::ToDoubles(Run("share", {x, holders}, {}).value),
              (Doubles{0, 0.25, 0, 0, 0}));
    // As a half type the factor would be 1.
    const double step = dtype == DType::kF16 ? 0x1p-10 : 0x1p-7;
    const Value x_of_scale = testing::FromDoubles(five, Doubles(5, 2 - step));
    const Value factor =
        testing::FromDoubles(testing::WithDType(FactorType(dtype), {}), {1 + 0.375 * step});
    const Outcome scaled = Run("scale", {x_of_scale, factor}, {});
    EXPECT_EQ(scaled.value, Expected("scale", {x_of_scale, factor}, {})) << DTypeName(dtype);
    if (DTypeBytes(dtype) == 2) {
      EXPECT_EQ(testing::ToDoubles(scaled.value), Doubles(5, 2));
    }
  }
}

TEST_F(CudaKernelsTest, FillWritesItsValue) {
  for (const DType dtype : testing::AllDTypes()) {
    for (const int64_t size : {0, 1, 1031}) {
      Attributes attributes = TypeAttributes(testing::WithDType(dtype, {size}));
      attributes.push_back(
          {"value", IsFloating(dtype) ? AttributeValue(0.1) : AttributeValue(int64_t{1})});
      EXPECT_EQ(Run("fill", {}, attributes).value, Expected("fill", {}, attributes))
          << DTypeName(dtype) << " " << size;
    }
  }
  // Beyond what a double holds.
  const int64_t large = (int64_t{1} << 62) + 1;
  const Outcome outcome =
      Run("fill", {}, {{"dims", Ints{2}}, {"dtype", std::string("i64")}, {"value", large}});
  EXPECT_EQ(testing::Elements<int64_t>(outcome.value), (Ints{large, large}));
  // Rounded once: by way of f32 it would be 1.
  const Outcome half =
      Run("fill", {},
          {{"dims", Ints{1}}, {"dtype", std::string("f16")}, {"value", 1 + 0x1p-11 + 0x1p-30}});
  EXPECT_EQ(testing::ToDoubles(half.value), (std::vector<double>{1 + 0x1p-10}));
}

TEST(CudaKernelListTest, EveryLocalOpHasOneAndNoCollective) {
  for (const OpDef* op : AllOps()) {
    EXPECT_EQ(HasCudaKernel(op->name), op->effect != Effect::kCollective) << op->name;
  }
}

}  // namespace
}  // namespace chorus
