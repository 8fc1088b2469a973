// Layers, losses and optimizers against what PyTorch computes from the same numbers
// (oracle/torch_values.py, whose file is kept: no PyTorch is needed here).
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "chorus/chorus.h"
#include "chorus/functional/math.h"
#include "chorus/functional/nn.h"
#include "chorus/nn/nn.h"
#include "chorus/nn/safetensors.h"
#include "client/testing/fake_daemon.h"
#include "client/testing/values.h"
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
  return FromHost(like.device(), weights, like.shape());
}

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
    const Doubles values = Values<double>(got);
    double largest = 0;
    for (const double value : expected) largest = std::max(largest, std::abs(value));
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_NEAR(values[i], expected[i], tolerance * std::max(largest, 1e-3)) << "element " << i;
    }
    ++compared_;
  }

  // `function` of the case's inputs: its result and the gradients for what `leaves` are the tensors
  // of, by name.
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
    ExpectNear(out, name + "/out");
    BackwardOptions create;
    create.create_graph = true;
    const auto first = Grad({Sum(out * Weights(out, 1))}, tensors, create);
    ASSERT_TRUE(first.ok()) << first.status();
    Tensor total = Sum(tensors[0] * 0);
    for (size_t i = 0; i < leaves.size(); ++i) {
      ExpectNear((*first)[i], absl::StrCat(name, "/g.", leaves[i].name));
      total = total + Sum((*first)[i] * Weights((*first)[i], 2 + static_cast<int>(i)));
    }
    if (!Has(absl::StrCat(name, "/gg.", leaves[0].name))) return;
    const auto second = Grad({total}, tensors);
    ASSERT_TRUE(second.ok()) << second.status();
    for (size_t i = 0; i < leaves.size(); ++i) {
      ExpectNear((*second)[i], absl::StrCat(name, "/gg.", leaves[i].name));
    }
  }
  void ExpectFunction(const std::string& name,
                      const std::function<Tensor(const Tensors& in)>& function) const {
    Tensors in;
    std::vector<Leaf> leaves;
    for (int i = 0; Has(absl::StrCat(name, "/in.", i)); ++i) {
      in.push_back(Value(absl::StrCat(name, "/in.", i)).RequireGrad());
      leaves.push_back({absl::StrCat("in.", i), in.back()});
    }
    ExpectCase(
        name, [&] { return function(in); }, leaves);
  }
  void ExpectModule(const std::string& name, Module* module,
                    std::function<Tensor(const Tensor&)> function = nullptr) const {
    ASSERT_TRUE(module->Init(session_, 1, DType::kF64).ok());
    Tensor x = Value(name + "/in.0");
    std::vector<Leaf> leaves;
    if (x.dtype() == DType::kF64) leaves.push_back({"in.0", x.RequireGrad()});
    for (const NamedVariable& named : module->named_variables()) {
      named.variable.Set(Value(absl::StrCat(name, "/p.", named.name)));
    }
    // In the file's order.
    for (const TensorFile::Entry& entry : file_->entries()) {
      absl::string_view parameter = entry.name;
      if (!absl::ConsumePrefix(&parameter, name + "/p.")) continue;
      for (const NamedVariable& named : module->named_variables()) {
        if (named.name == parameter) leaves.push_back({"p." + named.name, named.variable()});
      }
    }
    SortAsScripted(name, &leaves);
    ExpectCase(
        name, [&] { return function == nullptr ? (*module)(x) : function(x); }, leaves);
  }
  // The script's weights go by its order of parameters, which names alone do not tell.
  static void SortAsScripted(const std::string& name, std::vector<Leaf>* leaves) {
    const std::vector<std::string> order =
        name == "attention"
            ? std::vector<std::string>{"in.0",         "p.query.weight", "p.query.bias",
                                       "p.key.weight", "p.key.bias",     "p.value.weight",
                                       "p.value.bias", "p.out.weight",   "p.out.bias"}
            : std::vector<std::string>{"in.0", "p.weight", "p.bias"};
    std::sort(leaves->begin(), leaves->end(), [&order](const Leaf& a, const Leaf& b) {
      return std::find(order.begin(), order.end(), a.name) <
             std::find(order.begin(), order.end(), b.name);
    });
  }

  // Ten steps of one parameter.
  void ExpectSteps(const std::string& name, Optimizer* optimizer) const {
    const Variable parameter = optimizer->parameters()[0];
    parameter.Set(Value(name + "/step.0"));
    for (int step = 0; step < 10; ++step) {
      ASSERT_TRUE(optimizer->Step({FromHost(session_, Numbers(5, 100 + step), {5})}).ok());
      ExpectNear(parameter(), absl::StrCat(name, "/step.", step + 1), 1e-12);
    }
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
  EXPECT_EQ(compared_, 3 * 7 + 5 + 2);
}

TEST_F(OracleTest, Attention) {
  MultiheadAttention attention(4, 2);
  ExpectModule("attention", &attention,
               [&](const Tensor& x) { return attention(x, CausalMask(session_, 3)); });
  EXPECT_EQ(compared_, 1 + 2 * 9);
}

TEST_F(OracleTest, Functions) {
  ExpectFunction("gelu", [](const Tensors& in) { return Gelu(in[0]); });
  ExpectFunction("gelu_tanh", [](const Tensors& in) { return Gelu(in[0], GeluForm::kTanh); });
  ExpectFunction("silu", [](const Tensors& in) { return Silu(in[0]); });
  ExpectFunction("softmax", [](const Tensors& in) { return Softmax(in[0]); });
  EXPECT_EQ(compared_, 4 * 3);
}

TEST_F(OracleTest, Losses) {
  const Tensor labels = FromHost<int64_t>(session_, {2, 0, -100, 1}, {4});
  const Tensor weights = FromHost<double>(session_, {0.5, 2, 3}, {3});
  const Tensor soft = Softmax(FromHost(session_, Numbers(12, 2), {4, 3}));
  ExpectFunction("cross_entropy",
                 [&](const Tensors& in) { return CrossEntropyLoss(in[0], labels); });
  ClassOptions options;
  options.weights = weights;
  ExpectFunction("nll",
                 [&](const Tensors& in) { return NllLoss(LogSoftmax(in[0]), labels, options); });
  options.label_smoothing = 0.3;
  ExpectFunction("cross_entropy_all",
                 [&](const Tensors& in) { return CrossEntropyLoss(in[0], labels, options); });
  options.reduce = Reduce::kSum;
  ExpectFunction("cross_entropy_sum",
                 [&](const Tensors& in) { return CrossEntropyLoss(in[0], labels, options); });
  options.reduce = Reduce::kMean;
  options.label_smoothing = 0.2;
  ExpectFunction("cross_entropy_soft",
                 [&](const Tensors& in) { return CrossEntropyLoss(in[0], soft, options); });
  ExpectFunction("mse", [](const Tensors& in) { return MseLoss(in[0], in[1]); });
  ExpectFunction("l1", [](const Tensors& in) { return L1Loss(in[0], in[1]); });
  ExpectFunction("huber", [](const Tensors& in) { return HuberLoss(in[0], in[1], 0.7); });
  const Tensor target = (FromHost(session_, Numbers(12, 5), {4, 3}) + 1) * 0.5;
  ExpectFunction("bce",
                 [&](const Tensors& in) { return BceWithLogitsLoss(in[0], target, weights); });
  ExpectFunction("kl_div", [&](const Tensors& in) {
    return KlDivLoss(LogSoftmax(in[0]), soft, Reduce::kSum);
  });
  EXPECT_GE(compared_, 10 * 2);
}

class Parameter : public Module {
 public:
  Parameter() : Module("Parameter") { AddParameter("weight", {5}, init::Zeros()); }
};

TEST_F(OracleTest, Optimizers) {
  Parameter parameter;
  ASSERT_TRUE(parameter.Init(session_, 1, DType::kF64).ok());
  const auto expect = [&](const std::string& name, Optimizer&& optimizer,
                          Schedule schedule = nullptr) {
    optimizer.SetSchedule(std::move(schedule));
    ExpectSteps(name, &optimizer);
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
  EXPECT_EQ(compared_, 9 * 10);
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
