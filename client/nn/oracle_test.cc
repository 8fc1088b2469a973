// Layers, losses and optimizers against what PyTorch computes from the same numbers
// (oracle/torch_values.py, whose file is kept: no PyTorch is needed here).
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "chorus/chorus.h"
#include "chorus/functional/conv.h"
#include "chorus/functional/math.h"
#include "chorus/functional/nn.h"
#include "chorus/nn/nn.h"
#include "chorus/nn/safetensors.h"
#include "client/testing/fake_daemon.h"
#include "client/testing/ranks.h"
#include "client/testing/values.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace chorus {
namespace nn {
namespace {

using chorus::testing::FakeDaemon;
using chorus::testing::Numbers;
using chorus::testing::Values;

using Doubles = std::vector<double>;
using Tensors = std::vector<Tensor>;

// Another file, of another PyTorch: tools/test --torch.
std::string Path() {
  const char* const path = std::getenv("CHORUS_TORCH_VALUES");
  return path != nullptr ? path : "client/nn/oracle/values.safetensors";
}

// The script's.
Tensor Weights(const Tensor& like, int order) {
  Doubles weights;
  for (int64_t i = 0; i < like.num_elements(); ++i) {
    weights.push_back(0.4 + 0.3 * std::sin(1.7 * static_cast<double>(i) + order));
  }
  const Tensor exact = FromHost(like.device(), weights, like.shape());
  return like.dtype() == DType::kF64 ? exact : Cast(exact, like.dtype());
}

class Parameter : public Module {
 public:
  Parameter() : Module("Parameter") { AddParameter("weight", {5}, init::Zeros()); }
};

class OracleTest : public ::testing::Test {
 protected:
  OracleTest() : file_(TensorFile::Open(Path())) { EXPECT_TRUE(file_.ok()) << file_.status(); }

  bool Has(const std::string& name) const { return file_->Find(name) != nullptr; }
  Tensor Value(const std::string& name) const {
    absl::StatusOr<Tensor> value = file_->Read(name, session_);
    EXPECT_TRUE(value.ok()) << value.status();
    return value.ok() ? *value : Tensor();
  }
  // Within `tolerance` of the largest element.
  void ExpectNear(const Tensor& got, const std::string& name, double tolerance = 1e-10) const {
    SCOPED_TRACE(name);
    const Tensor wanted = Value(name);
    ASSERT_EQ(got.shape(), wanted.shape());
    const Doubles expected = Values<double>(wanted);
    const Doubles values =
        Values<double>(got.dtype() == DType::kF64 ? got : Cast(got, DType::kF64));
    // Of what is 0 but for rounding: by the terms that it is the sum of.
    const double least = got.dtype() == DType::kF64 ? 1e-3 : 1e-2;
    double largest = 0;
    for (const double value : expected) largest = std::max(largest, std::abs(value));
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_NEAR(values[i], expected[i], tolerance * std::max(largest, least)) << "element " << i;
    }
    ++compared_;
  }

  // What is computed in f32 is compared with PyTorch's f64: 1e-5.
  static double ToleranceOf(DType dtype) { return dtype == DType::kF64 ? 1e-10 : 1e-5; }
  Tensor ValueAs(DType dtype, const std::string& name) const {
    const Tensor value = Value(name);
    return value.dtype() == DType::kF64 && dtype != DType::kF64 ? Cast(value, dtype) : value;
  }

  // `function` of the case's inputs: its result and the gradients for what `leaves` are the tensors
  // of, by name; in f64 also the gradients of these, of those cases that the script wrote them for:
  // how many were compared, the test says.
  struct Leaf {
    std::string name;  // "in.0", "p.weight"
    Tensor tensor;
  };
  void ExpectCase(const std::string& name, const std::function<Tensor()>& function,
                  const std::vector<Leaf>& leaves) const {
    SCOPED_TRACE(name);
    Tensors tensors;
    for (const Leaf& leaf : leaves) tensors.push_back(leaf.tensor);
    const Tensor out = function();
    ASSERT_TRUE(out.status().ok()) << out.status();
    const double tolerance = ToleranceOf(out.dtype());
    ExpectNear(out, name + "/out", tolerance);
    BackwardOptions create;
    create.create_graph = true;
    const auto first = Grad({Sum(out * Weights(out, 1))}, tensors, create);
    ASSERT_TRUE(first.ok()) << first.status();
    Tensor total = Sum(tensors[0] * 0);
    for (size_t i = 0; i < leaves.size(); ++i) {
      ExpectNear((*first)[i], absl::StrCat(name, "/g.", leaves[i].name), tolerance);
      total = total + Sum((*first)[i] * Weights((*first)[i], 2 + static_cast<int>(i)));
    }
    if (out.dtype() != DType::kF64 || !Has(absl::StrCat(name, "/gg.", leaves[0].name))) return;
    const auto second = Grad({total}, tensors);
    ASSERT_TRUE(second.ok()) << second.status();
    for (size_t i = 0; i < leaves.size(); ++i) {
      ExpectNear((*second)[i], absl::StrCat(name, "/gg.", leaves[i].name));
    }
  }
  void ExpectFunction(const std::string& name,
                      const std::function<Tensor(const Tensors& in)>& function) const {
    for (const DType dtype : {DType::kF64, DType::kF32}) {
      SCOPED_TRACE(dtype == DType::kF64 ? "f64" : "f32");
      Tensors in;
      std::vector<Leaf> leaves;
      for (int i = 0; Has(absl::StrCat(name, "/in.", i)); ++i) {
        in.push_back(ValueAs(dtype, absl::StrCat(name, "/in.", i)).Detach().RequireGrad());
        leaves.push_back({absl::StrCat("in.", i), in.back()});
      }
      ExpectCase(
          name, [&] { return function(in); }, leaves);
    }
  }
  void ExpectModule(const std::string& name, Module* module,
                    std::function<Tensor(const Tensor&)> function = nullptr) const {
    for (const DType dtype : {DType::kF64, DType::kF32}) {
      SCOPED_TRACE(dtype == DType::kF64 ? "f64" : "f32");
      ASSERT_TRUE(module->Init(session_, 1, dtype).ok());
      Tensor x = ValueAs(dtype, name + "/in.0").Detach();
      std::vector<Leaf> leaves;
      if (x.dtype() == dtype) leaves.push_back({"in.0", x.RequireGrad()});
      // In PyTorch's order too, by which the script's weights go.
      for (const NamedVariable& named : module->named_variables()) {
        const std::string of_parameter = absl::StrCat(name, "/p.", named.name);
        if (!named.variable.is_parameter()) continue;
        named.variable.Set(ValueAs(dtype, of_parameter));
        leaves.push_back({"p." + named.name, named.variable()});
      }
      ExpectCase(
          name, [&] { return function == nullptr ? (*module)(x) : function(x); }, leaves);
    }
  }

  // Ten steps of one parameter.
  void ExpectSteps(const std::string& name, Optimizer* optimizer, DType dtype = DType::kF64) const {
    const Variable parameter = optimizer->parameters()[0];
    parameter.Set(ValueAs(dtype, name + "/step.0"));
    for (int step = 0; step < 10; ++step) {
      const Tensor gradient = FromHost(session_, Numbers(5, 100 + step), {5});
      ASSERT_TRUE(optimizer->Step({Cast(gradient, dtype)}).ok());
      ExpectNear(parameter(), absl::StrCat(name, "/step.", step + 1),
                 dtype == DType::kF64 ? 1e-12 : 1e-5);
    }
  }

  void ExpectOptimizers(DType dtype) const {
    Parameter parameter;
    ASSERT_TRUE(parameter.Init(session_, 1, dtype).ok());
    const auto expect = [&](const std::string& name, Optimizer&& optimizer,
                            Schedule schedule = nullptr) {
      optimizer.SetSchedule(std::move(schedule));
      ExpectSteps(name, &optimizer, dtype);
    };
    const std::vector<Variable> all = parameter.parameters();
    Sgd::Options sgd;
    expect("step_decay", Sgd(all, sgd), StepDecay(3, 0.5));
    expect("warm_up", Sgd(all, sgd), WarmUp(4));
    sgd.weight_decay = 0.01;
    expect("sgd", Sgd(all, sgd));
    sgd.momentum = 0.9;
    expect("sgd_momentum", Sgd(all, sgd));
    sgd.weight_decay = 0;
    sgd.nesterov = true;
    expect("sgd_nesterov", Sgd(all, sgd));
    Adam::Options adam;
    adam.learning_rate = 0.02;
    adam.weight_decay = 0.01;
    expect("adam", Adam(all, adam));
    adam.weight_decay = 0;
    adam.amsgrad = true;
    expect("adam_amsgrad", Adam(all, adam));
    AdamW::Options adamw;
    adamw.learning_rate = 0.02;
    expect("adamw", AdamW(all, adamw));
    Adagrad::Options adagrad;
    adagrad.learning_rate = 0.1;
    adagrad.learning_rate_decay = 0.2;
    adagrad.weight_decay = 0.01;
    expect("adagrad", Adagrad(all, adagrad));
  }

  FakeDaemon daemon_;
  const Session session_ = daemon_.Open();
  const absl::StatusOr<TensorFile> file_;
  mutable int compared_ = 0;
};

TEST_F(OracleTest, Layers) {
  std::cout << "PyTorch " << file_->metadata().at("torch") << std::endl;
  Linear linear(3, 2);
  ExpectModule("linear", &linear);
  LayerNorm layer(Shape{2, 3});
  ExpectModule("layer_norm", &layer);
  RmsNorm rms(5);
  ExpectModule("rms_norm", &rms);
  GroupNorm group(2, 4);
  ExpectModule("group_norm", &group);
  Embedding embedding(5, 3, 2);
  ExpectModule("embedding", &embedding);
  EXPECT_EQ(compared_, 3 * (7 + 4) + (5 + 3) + 2 * 2);
}

TEST_F(OracleTest, Attention) {
  MultiheadAttention attention(4, 2);
  ExpectModule("attention", &attention,
               [&](const Tensor& x) { return attention(x, CausalMask(session_, 3)); });
  EXPECT_EQ(compared_, 2 * (1 + 9) + 9);
}

TEST_F(OracleTest, Convolutions) {
  Conv1dOptions one;
  one.stride = one.padding = one.dilation = one.groups = 2;
  Conv1d conv1d(4, 6, 3, one);
  ExpectModule("conv1d", &conv1d);
  Conv2dOptions two;
  two.stride = {2, 1};
  two.padding = {1, 2};
  two.dilation = {1, 2};
  two.groups = 2;
  Conv2d conv2d(4, 2, {3, 2}, two);
  ExpectModule("conv2d", &conv2d);
  ConvTranspose2dOptions back;
  back.stride = {2, 3};
  back.padding = {1, 0};
  back.output_padding = {1, 2};
  back.groups = 2;
  ConvTranspose2d transposed(4, 2, {3, 2}, back);
  ExpectModule("conv_transpose2d", &transposed);
  EXPECT_EQ(compared_, 3 * (7 + 4));
}

TEST_F(OracleTest, Pooling) {
  MaxPool2dOptions max;
  max.stride = {2, 1};
  max.padding = 1;
  ExpectFunction("max_pool2d", [&](const Tensors& in) {
    return chorus::MaxPool2d(in[0], {3, 2}, max);
  });
  AvgPool2dOptions mean;
  mean.stride = {2, 1};
  mean.padding = 1;
  ExpectFunction("avg_pool2d", [&](const Tensors& in) {
    return chorus::AvgPool2d(in[0], {3, 2}, mean);
  });
  mean.count_padding = false;
  ExpectFunction("avg_pool2d_inside", [&](const Tensors& in) {
    return chorus::AvgPool2d(in[0], {3, 2}, mean);
  });
  ExpectFunction("adaptive_avg_pool2d", [](const Tensors& in) {
    return chorus::AdaptiveAvgPool2d(in[0], {3, 4});
  });
  EXPECT_EQ(compared_, 4 * (3 + 2));
}

TEST_F(OracleTest, BatchNorms) {
  BatchNorm norm(3);
  ExpectModule("batch_norm", &norm);
  EXPECT_EQ(compared_, 7 + 4);
  for (const bool forgets : {true, false}) {
    BatchNormOptions options;
    if (!forgets) options.momentum = std::nullopt;
    const std::string name = forgets ? "batch_norm_running" : "batch_norm_mean";
    BatchNorm tracked(3, options);
    ASSERT_TRUE(tracked.Init(session_, 1, DType::kF64).ok());
    for (int step = 0; step < 3; ++step) {
      tracked(Numbers(session_, {2, 3, 2, 2}, 1 + step));
      ExpectNear(tracked.running_mean()(), absl::StrCat(name, "/mean.", step));
      ExpectNear(tracked.running_var()(), absl::StrCat(name, "/var.", step));
    }
    tracked.Eval();
    ExpectNear(tracked(Numbers(session_, {2, 3, 2, 2}, 9)), name + "/eval");
  }
}

// PyTorch's SyncBatchNorm wants a GPU: the whole batch's BatchNorm is what ranks are compared with.
TEST_F(OracleTest, SyncBatchNorm) {
  const Doubles x = Values<double>(Value("batch_norm/in.0"));
  const Doubles y = Values<double>(Value("batch_norm/out"));
  const Doubles weight = Values<double>(Value("batch_norm/p.weight"));
  const Doubles bias = Values<double>(Value("batch_norm/p.bias"));
  chorus::testing::OnRanks(2, [&](const World& world, int rank) {
    BatchNormOptions options;
    options.ranks = world;
    BatchNorm norm(3, options);
    ASSERT_TRUE(norm.Init(world, 1, DType::kF64).ok());
    norm.weight().Set(FromHost(world, weight, {3}));
    norm.bias().Set(FromHost(world, bias, {3}));
    // One row, and three.
    const auto begin = rank == 0 ? 0 : 12, end = rank == 0 ? 12 : 48;
    const Doubles part(x.begin() + begin, x.begin() + end);
    EXPECT_THAT(Values<double>(norm(FromHost(world, part, {(end - begin) / 12, 3, 2, 2}))),
                ::testing::Pointwise(::testing::DoubleNear(1e-10),
                                     Doubles(y.begin() + begin, y.begin() + end)));
  });
}

TEST_F(OracleTest, Recurrent) {
  RnnOptions options;
  options.layers = 2;
  options.bidirectional = true;
  const auto flat = [](Recurrent* layer) {
    return [layer](const Tensor& x) {
      const RnnResult result = (*layer)(x, Tensor());
      Tensors parts = {Reshape(result.output, {-1}), Reshape(result.hidden, {-1})};
      if (result.cell.defined()) parts.push_back(Reshape(result.cell, {-1}));
      return Concat(parts, 0);
    };
  };
  Lstm lstm(3, 2, options);
  ExpectModule("lstm", &lstm, flat(&lstm));
  Gru gru(3, 2, options);
  ExpectModule("gru", &gru, flat(&gru));
  EXPECT_EQ(compared_, 2 * (2 * (1 + 17) + 17));
}

TEST_F(OracleTest, Functions) {
  ExpectFunction("gelu", [](const Tensors& in) { return Gelu(in[0]); });
  ExpectFunction("gelu_tanh", [](const Tensors& in) { return Gelu(in[0], GeluForm::kTanh); });
  ExpectFunction("silu", [](const Tensors& in) { return Silu(in[0]); });
  ExpectFunction("softmax", [](const Tensors& in) { return Softmax(in[0]); });
  EXPECT_EQ(compared_, 4 * (3 + 2));
}

TEST_F(OracleTest, Losses) {
  const Tensor labels = FromHost<int64_t>(session_, {2, 0, -100, 1}, {4});
  const Tensor weights = FromHost<double>(session_, {0.5, 2, 3}, {3});
  const Tensor soft = Softmax(FromHost(session_, Numbers(12, 2), {4, 3}));
  ExpectFunction("cross_entropy",
                 [&](const Tensors& in) { return CrossEntropyLoss(in[0], labels); });
  ClassOptions options;
  // Beside inputs of another dtype.
  const auto like = [](const Tensors& in, const Tensor& x) { return Cast(x, in[0].dtype()); };
  const auto options_like = [&](const Tensors& in) {
    ClassOptions cast = options;
    cast.weights = like(in, weights);
    return cast;
  };
  ExpectFunction("nll", [&](const Tensors& in) {
    return NllLoss(LogSoftmax(in[0]), labels, options_like(in));
  });
  options.label_smoothing = 0.3;
  ExpectFunction("cross_entropy_all", [&](const Tensors& in) {
    return CrossEntropyLoss(in[0], labels, options_like(in));
  });
  options.reduce = Reduce::kSum;
  ExpectFunction("cross_entropy_sum", [&](const Tensors& in) {
    return CrossEntropyLoss(in[0], labels, options_like(in));
  });
  options.reduce = Reduce::kMean;
  options.label_smoothing = 0.2;
  ExpectFunction("cross_entropy_soft", [&](const Tensors& in) {
    return CrossEntropyLoss(in[0], like(in, soft), options_like(in));
  });
  ExpectFunction("mse", [](const Tensors& in) { return MseLoss(in[0], in[1]); });
  ExpectFunction("l1", [](const Tensors& in) { return L1Loss(in[0], in[1]); });
  ExpectFunction("huber", [](const Tensors& in) { return HuberLoss(in[0], in[1], 0.7); });
  const Tensor target = (FromHost(session_, Numbers(12, 5), {4, 3}) + 1) * 0.5;
  ExpectFunction("bce", [&](const Tensors& in) {
    return BceWithLogitsLoss(in[0], like(in, target), like(in, weights));
  });
  ExpectFunction("kl_div", [&](const Tensors& in) {
    return KlDivLoss(LogSoftmax(in[0]), like(in, soft), Reduce::kSum);
  });
  EXPECT_EQ(compared_, 7 * (3 + 2) + 3 * (5 + 3));
}

TEST_F(OracleTest, Optimizers) {
  for (const DType dtype : {DType::kF64, DType::kF32}) ExpectOptimizers(dtype);
  EXPECT_EQ(compared_, 2 * 9 * 10);
}

TEST_F(OracleTest, ClippingAndCosine) {
  Tensors gradients = {FromHost(session_, Numbers(6, 1), {3, 2}),
                       FromHost(session_, Numbers(4, 2), {4})};
  ExpectNear(ClipGradNorm(&gradients, 0.5), "clip/norm");
  ExpectNear(gradients[0], "clip/0");
  ExpectNear(gradients[1], "clip/1");
  // PyTorch's goes up again behind its last step; ours stays.
  Parameter parameter;
  ASSERT_TRUE(parameter.Init(session_, 1, DType::kF64).ok());
  Sgd sgd(parameter.parameters(), {});
  sgd.SetSchedule(CosineDecay(8, 0.2));
  parameter.parameters()[0].Set(Value("cosine/step.0"));
  for (int step = 0; step < 9; ++step) {
    ASSERT_TRUE(sgd.Step({FromHost(session_, Numbers(5, 100 + step), {5})}).ok());
    ExpectNear(parameter.parameters()[0](), absl::StrCat("cosine/step.", step + 1), 1e-12);
  }
}

}  // namespace
}  // namespace nn
}  // namespace chorus
