#include "chorus/nn/module.h"

#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "chorus/chorus.h"
#include "chorus/nn/init.h"
#include "chorus/nn/layers.h"
#include "client/testing/fake_daemon.h"
#include "client/testing/values.h"
#include "core/base/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace chorus {
namespace nn {
namespace {

using chorus::testing::FakeDaemon;
using chorus::testing::Values;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

using Floats = std::vector<float>;

// x scale + shift, and counts its calls in a buffer.
class Affine : public Module {
 public:
  explicit Affine(int64_t width)
      : Module("Affine"),
        scale_(AddParameter("scale", {width}, init::Uniform(1, 2))),
        shift_(AddParameter("shift", {width}, init::Zeros())),
        calls_(AddBuffer("calls", {}, init::Zeros(), DType::kI64)) {}

  Tensor Forward(const Tensor& x) override {
    if (training()) calls_.Set(calls_() + 1);
    return x * scale_() + shift_();
  }

  Variable scale_;
  Variable shift_;
  Variable calls_;
};

// In bf16 every 256th sum of 1 and a uniform number is rounded to 2.
TEST(InitTest, UniformNumbersAreBelowTheirEnd) {
  FakeDaemon daemon;
  const Session session = daemon.Open();
  const Tensor y = init::Uniform(1, 2)(session, DType::kBF16, {4096}, 1);
  for (const BF16 number : Values<BF16>(y)) {
    EXPECT_GE(static_cast<float>(number), 1);
    EXPECT_LT(static_cast<float>(number), 2);
  }
}

class Two : public Module {
 public:
  explicit Two(int64_t width)
      : Module("Two"), a_(Add<Affine>("a", width)), b_(Add<Affine>("b", width)) {}
  Tensor Forward(const Tensor& x) override { return b_(Relu(a_(x))); }

  Affine& a_;
  Affine& b_;
};

std::vector<std::string> Names(const Module& module) {
  std::vector<std::string> names;
  for (const NamedVariable& named : module.named_variables()) names.push_back(named.name);
  return names;
}

class ModuleTest : public ::testing::Test {
 protected:
  Tensor Row(const Floats& values, int device = 0) {
    return FromHost<float>(session_.device(device), values, {static_cast<int64_t>(values.size())});
  }

  FakeDaemon daemon_;
  const Session session_ = daemon_.Open(2);
};

TEST_F(ModuleTest, VariablesHaveTheirPathsForNames) {
  Two two(3);
  EXPECT_THAT(Names(two),
              ElementsAre("a.scale", "a.shift", "a.calls", "b.scale", "b.shift", "b.calls"));
  EXPECT_EQ(two.parameters().size(), 4u);
  EXPECT_EQ(two.buffers().size(), 2u);
  EXPECT_EQ(two.b_.path(), "b");
  EXPECT_EQ(two.b_.label(), "b (Affine)");
  std::ostringstream out;
  out << two;
  EXPECT_EQ(out.str(),
            "Two\n"
            "  a: Affine scale[3] shift[3] calls[]\n"
            "  b: Affine scale[3] shift[3] calls[]\n"
            "12 numbers in parameters\n");
}

TEST_F(ModuleTest, FirstValuesDependOnSeedAndPathAlone) {
  Two two(3);
  ASSERT_TRUE(two.Init(session_, 7).ok());
  Two other(3);
  ASSERT_TRUE(other.Init(session_.device(1), 7).ok());
  const Floats a = Values<float>(two.a_.scale_());
  EXPECT_EQ(Values<float>(other.a_.scale_()), a);
  EXPECT_NE(Values<float>(two.b_.scale_()), a);
  ASSERT_TRUE(other.Init(session_, 8).ok());
  EXPECT_NE(Values<float>(other.a_.scale_()), a);
  for (const float value : a) {
    EXPECT_GE(value, 1);
    EXPECT_LT(value, 2);
  }
  EXPECT_EQ(two.a_.calls_().dtype(), DType::kI64);
  ASSERT_TRUE(two.Init(session_, 7, DType::kF64).ok());
  EXPECT_EQ(two.a_.scale_().dtype(), DType::kF64);
}

TEST_F(ModuleTest, GradientsComeToParametersThatAreNotFrozen) {
  Two two(2);
  ASSERT_TRUE(two.Init(session_, 1).ok());
  two.a_.scale_.Set(Row({2, 3}));
  two.b_.scale_.Set(Row({5, 7}));
  two.b_.shift_.RequireGrad(false);
  EXPECT_THAT(two.ToString(), HasSubstr("8 numbers in parameters, 2 of them frozen"));
  ASSERT_TRUE(Backward(Sum(two(Row({1, -1})))).ok());
  EXPECT_THAT(Values<float>(two.a_.scale_.grad()), ElementsAre(5, 0));
  EXPECT_THAT(Values<float>(two.b_.scale_.grad()), ElementsAre(2, 0));
  EXPECT_FALSE(two.b_.shift_.grad().defined());
  two.ClearGrads();
  EXPECT_FALSE(two.a_.scale_.grad().defined());
  two.b_.shift_.RequireGrad(true);
  two.RequireGrad(false);
  EXPECT_FALSE(two(Row({1, 1})).requires_grad());
}

// As a discriminator is while its generator is trained.
TEST_F(ModuleTest, WhatIsFrozenForAWhileKeepsItsGradient) {
  Two two(2);
  ASSERT_TRUE(two.Init(session_, 1).ok());
  const Variable& scale = two.b_.scale_;
  two.a_.scale_.Set(Row({2, 3}));
  ASSERT_TRUE(Backward(Sum(two(Row({1, -1})))).ok());
  const std::vector<float> before = Values<float>(scale.grad());
  const Tensor recorded = Sum(two(Row({1, -1})));
  scale.RequireGrad(false);
  EXPECT_FALSE(scale().requires_grad());
  EXPECT_FALSE(scale.grad().defined());
  ASSERT_TRUE(Backward(Sum(two(Row({1, -1})))).ok());
  scale.RequireGrad(true);
  EXPECT_EQ(Values<float>(scale.grad()), before);
  ASSERT_TRUE(Backward(recorded).ok());
  EXPECT_THAT(Values<float>(scale.grad()), ElementsAre(2 * before[0], 2 * before[1]));
  // What is cleared meanwhile is.
  two.RequireGrad(false);
  two.ClearGrads();
  two.RequireGrad(true);
  EXPECT_FALSE(scale.grad().defined());
  // Nor is it the old leaf behind a Set.
  scale.RequireGrad(false);
  scale.Set(Row({4, 5}));
  scale.RequireGrad(true);
  EXPECT_TRUE(scale().requires_grad());
  EXPECT_THAT(Values<float>(scale()), ElementsAre(4, 5));
}

// The step's own tensors are frozen, not replaced by those of when it was traced.
TEST_F(ModuleTest, WhatACompiledFunctionFreezesForAWhileIsItsInput) {
  Affine affine(2);
  ASSERT_TRUE(affine.Init(session_, 1).ok());
  affine.Eval();
  const Compiled step = Compile([&affine](const std::vector<Tensor>& in) {
    const StateScope scope(affine, {in[0], in[1], in[2]});
    affine.RequireGrad(false);
    const Tensor frozen = affine(in[3]);
    affine.RequireGrad(true);
    const Tensor loss = Sum(affine(frozen));
    const auto gradients = Grad({loss}, {in[0], in[1]});
    EXPECT_TRUE(gradients.ok()) << gradients.status();
    return std::vector<Tensor>{frozen, gradients.ok() ? (*gradients)[0] : Tensor()};
  });
  for (const float scale : {2.f, 3.f}) {
    const auto out = step.Run(
        {Row({scale, 1}).RequireGrad(), Row({0, 0}).RequireGrad(), affine.calls_(), Row({1, 1})});
    ASSERT_TRUE(out.ok()) << out.status();
    EXPECT_THAT(Values<float>((*out)[0]), ElementsAre(scale, 1));
    EXPECT_THAT(Values<float>((*out)[1]), ElementsAre(scale, 1));
  }
}

TEST_F(ModuleTest, ATiedVariableIsOneVariable) {
  struct Tied : Module {
    Tied() : Module("Tied"), first(Add<Affine>("first", 1)), second(Add<Affine>("second", 1)) {
      Tie("scale", first.scale_);
    }
    Tensor Forward(const Tensor& x) override { return first(x) * first.scale_(); }
    Affine& first;
    Affine& second;
  } tied;
  EXPECT_THAT(Names(tied), ElementsAre("scale", "first.shift", "first.calls", "second.scale",
                                       "second.shift", "second.calls"));
  ASSERT_TRUE(tied.Init(session_, 1).ok());
  tied.first.scale_.Set(Row({3}));
  ASSERT_TRUE(Backward(Sum(tied(Row({2})))).ok());  // 2 s^2
  EXPECT_THAT(Values<float>(tied.first.scale_.grad()), ElementsAre(12));
  // Also in a clone.
  const auto clone = tied.Clone(session_.device(1));
  ASSERT_TRUE(clone.ok()) << clone.status();
  EXPECT_EQ(Names(**clone), Names(tied));
  ASSERT_TRUE(Backward(Sum((**clone)(Row({2}, 1)))).ok());
  EXPECT_THAT(Values<float>((*clone)->variables()[0].grad()), ElementsAre(12));
}

TEST_F(ModuleTest, AClonesStateIsItsOwn) {
  Two two(1);
  ASSERT_TRUE(two.Init(session_, 1).ok());
  two.a_.scale_.Set(Row({2}));
  two.b_.scale_.Set(Row({3}));
  two(Row({1}));
  const auto cloned = two.Clone(session_.device(1));
  ASSERT_TRUE(cloned.ok()) << cloned.status();
  Module& clone = **cloned;
  EXPECT_EQ(clone.device()->slot(), 1);
  EXPECT_EQ(clone.kind(), "Two");
  EXPECT_THAT(Values<float>(clone(Row({1}, 1))), ElementsAre(6));
  EXPECT_THAT(Values<int64_t>(two.a_.calls_()), ElementsAre(1));
  EXPECT_THAT(Values<int64_t>(clone.buffers()[0]()), ElementsAre(2));
  clone.parameters()[0].Set(Row({5}, 1));
  EXPECT_THAT(Values<float>(clone(Row({1}, 1))), ElementsAre(15));
  EXPECT_THAT(Values<float>(two(Row({1}))), ElementsAre(6));
  // So is its mode, and a part of it is a module as well.
  clone.Eval();
  clone(Row({1}, 1));
  EXPECT_THAT(Values<int64_t>(clone.buffers()[0]()), ElementsAre(3));
  EXPECT_TRUE(two.training());
  Module& part = *clone.children()[0].module;
  EXPECT_EQ(part.label(), "a (Affine)");
  EXPECT_THAT(Values<float>(part(Row({1}, 1))), ElementsAre(5));
  // A clone of a clone.
  const auto third = clone.Clone(session_.device(0));
  ASSERT_TRUE(third.ok()) << third.status();
  EXPECT_THAT(Values<float>((**third)(Row({2}))), ElementsAre(30));
}

TEST_F(ModuleTest, AScopeExchangesWhatVariablesStandFor) {
  Two two(1);
  ASSERT_TRUE(two.Init(session_, 1).ok());
  std::vector<Tensor> state;
  for (const Variable& variable : two.variables()) {
    state.push_back(variable.is_parameter() ? Row({4}).RequireGrad()
                                            : Scalar<int64_t>(session_, 10));
  }
  const Floats before = Values<float>(two.a_.scale_());
  {
    const StateScope scope(two, state);
    ASSERT_TRUE(Backward(Sum(two(Row({1})))).ok());  // (1 * 4 + 4) * 4 + 4
    EXPECT_THAT(Values<int64_t>(scope.tensors()[2]), ElementsAre(11));
  }
  EXPECT_THAT(Values<float>(state[0].grad()), ElementsAre(4));
  EXPECT_EQ(Values<float>(two.a_.scale_()), before);
  EXPECT_THAT(Values<int64_t>(two.a_.calls_()), ElementsAre(0));
  // What stands for a clone's variables stands for the code's as well.
  const auto clone = two.Clone(session_);
  ASSERT_TRUE(clone.ok());
  const StateScope scope(**clone, state);
  EXPECT_THAT(Values<float>((**clone)(Row({1}))), ElementsAre(36));
}

TEST_F(ModuleTest, AModuleInACompiledFunctionHasItsStateForInputs) {
  Two two(1);
  ASSERT_TRUE(two.Init(session_, 1).ok());
  two.a_.scale_.Set(Row({2}));
  two.b_.scale_.Set(Row({3}));
  const Compiled step = Compile([&two](const std::vector<Tensor>& in) {
    const std::vector<Tensor> state(in.begin(), in.end() - 1);
    const StateScope scope(two, state);
    std::vector<Tensor> out = {two(in.back())};
    for (const Tensor& tensor : scope.tensors()) out.push_back(tensor);
    return out;
  });
  for (int i = 1; i <= 3; ++i) {
    std::vector<Tensor> in;
    for (const Variable& variable : two.variables()) in.push_back(variable().Detach());
    in.push_back(Row({1}));
    const auto out = step.Run(in);
    ASSERT_TRUE(out.ok()) << out.status();
    EXPECT_THAT(Values<float>((*out)[0]), ElementsAre(6));
    for (size_t v = 0; v < two.variables().size(); ++v) two.variables()[v].Set((*out)[v + 1]);
    EXPECT_THAT(Values<int64_t>(two.b_.calls_()), ElementsAre(i));
  }
  EXPECT_EQ(step.traces(), 1);
}

TEST_F(ModuleTest, HooksSeeAndReplaceResults) {
  Affine affine(1);
  ASSERT_TRUE(affine.Init(session_, 1).ok());
  affine.scale_.Set(Row({2}));
  int calls = 0;
  affine.AddHook([&calls](Module& module, const Tensor&, const Tensor&) {
    EXPECT_EQ(module.kind(), "Affine");
    ++calls;
    return Tensor();
  });
  affine.AddHook([](Module&, const Tensor& x, const Tensor& result) { return result + x; });
  EXPECT_THAT(Values<float>(affine(Row({5}))), ElementsAre(15));
  EXPECT_EQ(calls, 1);
}

TEST_F(ModuleTest, ItMovesBetweenDevices) {
  Two two(1);
  EXPECT_EQ(ErrorOf(two.To(session_)).reason, Reason::kWrongState);
  EXPECT_EQ(ErrorOf(two.device().status()).reason, Reason::kWrongState);
  ASSERT_TRUE(two.Init(session_, 1).ok());
  const Floats before = Values<float>(two.a_.scale_());
  ASSERT_TRUE(two.To(session_.device(1)).ok());
  EXPECT_EQ(two.device()->slot(), 1);
  EXPECT_EQ(Values<float>(two.a_.scale_()), before);
  EXPECT_TRUE(two.a_.scale_().requires_grad());
  two.b_.shift_.Set(Row({0}, 0));
  EXPECT_THAT(std::string(two.device().status().message()),
              HasSubstr("a.scale is on device 1, b.shift on device 0"));
}

// Whose devices have the same numbers.
TEST_F(ModuleTest, ItDoesNotMoveToAnotherSession) {
  const Session other = daemon_.Open();
  Two two(1);
  ASSERT_TRUE(two.Init(session_, 1).ok());
  EXPECT_EQ(ErrorOf(two.To(other)).reason, Reason::kBadType);
  EXPECT_TRUE(*two.device() == session_);
  two.b_.shift_.Set(FromHost<float>(other, {0}, {1}));
  EXPECT_THAT(std::string(two.device().status().message()), HasSubstr("of another session"));
}

TEST_F(ModuleTest, ErrorsNameTheModuleAndTheLine) {
  Two two(1);
  const Tensor early = two(Row({1}));
  EXPECT_EQ(ErrorOf(early.status()).reason, Reason::kWrongState);
  EXPECT_THAT(std::string(early.status().message()), HasSubstr("a (Affine): scale is not there"));
  ASSERT_TRUE(two.Init(session_, 1).ok());
  const Tensor elsewhere = two.b_(Row({1}, 1));
  EXPECT_THAT(std::string(elsewhere.status().message()),
              HasSubstr("b (Affine): its input is on device 1, its scale on device 0"));
  EXPECT_THAT(ErrorOf(elsewhere.status()).source, HasSubstr("module_test.cc:"));
  // An operand's error comes first.
  const Tensor failed = FromError(session_, absl::InternalError("before"));
  EXPECT_THAT(std::string(two(failed).status().message()), HasSubstr("before"));
}

// Forward sees the error, so that what other ranks wait for in it can tell them.
TEST_F(ModuleTest, ARefusedCallIsAForwardThatLeavesNoTrace) {
  class Notes : public Module {
   public:
    Notes() : Module("Notes"), calls_(AddBuffer("calls", {}, init::Zeros())) {}
    Tensor Forward(const Tensor& x) override {
      seen_ = x.status();
      calls_.Set(calls_() + 1);
      return FromHost<double>(*session_, {5}, {1});
    }
    const Variable calls_;
    const Session* session_ = nullptr;
    absl::Status seen_;
  };
  Notes notes;
  notes.session_ = &session_;
  const Tensor early = notes(Row({1}));
  EXPECT_EQ(ErrorOf(early.status()).reason, Reason::kWrongState);
  EXPECT_EQ(notes.seen_, early.status());
  EXPECT_FALSE(notes.calls_().defined());
  ASSERT_TRUE(notes.Init(session_, 1, DType::kF64).ok());
  const Tensor elsewhere = notes(Row({1}, 1));
  EXPECT_EQ(ErrorOf(elsewhere.status()).reason, Reason::kBadType);
  EXPECT_EQ(notes.seen_, elsewhere.status());
  EXPECT_THAT(Values<double>(notes.calls_()), ElementsAre(0));
  EXPECT_THAT(Values<double>(notes(Row({1}))), ElementsAre(5));
  EXPECT_THAT(Values<double>(notes.calls_()), ElementsAre(1));
}

TEST_F(ModuleTest, ANameThatCannotBeIsRefused) {
  struct Wrong : Module {
    explicit Wrong(const std::string& name) : Module("Wrong") {
      Add<Affine>("part", 1);
      AddParameter(name, {1}, init::Zeros());
    }
    Tensor Forward(const Tensor& x) override { return x; }
  };
  for (const char* name : {"part", "a.b", ""}) {
    Wrong wrong(name);
    EXPECT_FALSE(wrong.Init(session_, 1).ok()) << name;
    EXPECT_FALSE(wrong(Row({1})).status().ok()) << name;
  }
  Sequential negative({std::make_shared<Affine>(-1)});
  EXPECT_THAT(std::string(negative.Init(session_, 1).message()),
              HasSubstr("0 (Affine): expected sizes from 0, got [-1] for scale"));
}

TEST_F(ModuleTest, ContainersCallAndFind) {
  Sequential layers;
  layers.Append<Affine>(1);
  layers.Append<Affine>(1);
  EXPECT_EQ(layers.size(), 2);
  EXPECT_EQ(layers[1].path(), "1");
  ASSERT_TRUE(layers.Init(session_, 1).ok());
  for (const Variable& parameter : layers.parameters()) parameter.Set(Row({2}));
  EXPECT_THAT(Values<float>(layers(Row({1}))), ElementsAre(10));
  ModuleMap map;
  map.Insert<Affine>("query", 1);
  EXPECT_EQ(map.Find("query")->kind(), "Affine");
  EXPECT_EQ(map.Find("key"), nullptr);
  EXPECT_FALSE(map(Row({1})).status().ok());
}

TEST_F(ModuleTest, CallTakesOneTensorUnlessItIsOverridden) {
  Affine affine(1);
  ASSERT_TRUE(affine.Init(session_, 1).ok());
  affine.scale_.Set(Row({2}));
  const auto called = affine.Call({parallel::Nest(Row({3}))}, {});
  ASSERT_TRUE(called.ok()) << called.status();
  EXPECT_THAT(Values<float>(called->tensor()), ElementsAre(6));
  EXPECT_EQ(ErrorOf(affine.Call({}, {}).status()).reason, Reason::kBadType);
}

}  // namespace
}  // namespace nn
}  // namespace chorus
