#include "tests/vectors/vector.h"

#include <functional>
#include <nlohmann/json.hpp>

#include "gmock/gmock.h"
#include "tests/vectors/testing.h"

namespace chorus {
namespace vectors {
namespace {

using ::testing::HasSubstr;
using Json = nlohmann::json;

TEST(VectorTest, ReadsWhatAFileSays) {
  const absl::StatusOr<VectorFile> file = ParseVectorFile("f.json", FileText({SmallVector()}));
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->tolerance.second_factor, 64);
  EXPECT_EQ(file->tolerance.factor.at(DType::kBF16), 2);
  EXPECT_EQ(file->tolerance.eps.at(DType::kF16), 0.0009765625);
  ASSERT_EQ(file->entries.size(), 1);
  EXPECT_EQ(file->entries[0].id, "small");
  ASSERT_TRUE(file->entries[0].vector.ok()) << file->entries[0].vector.status();
  const Vector& v = *file->entries[0].vector;
  EXPECT_EQ(v.op, Op::kAllReduce);
  EXPECT_EQ(v.attributes.reduction, Reduction::kSum);
  EXPECT_EQ(v.size(), 2);
  EXPECT_TRUE(v.everybody());
  EXPECT_FALSE(v.one_process());
  EXPECT_EQ(v.inputs[1][0].TypeText(), "f64[2]");
  EXPECT_EQ(FloatAt(v.inputs[1][0], 1), 0.5);
  EXPECT_EQ(FloatAt(*(*v.first->xbar[0])[0], 1), -0.5);
  EXPECT_EQ(v.second->S, 306);
  EXPECT_EQ(v.scale->G, 171);
  EXPECT_THAT(v.requires_grad, ::testing::ElementsAre(true, true));
}

TEST(VectorTest, ReadsStringsForNumbersThatJsonHasNot) {
  Json json = SmallVector();
  json.erase("grad");
  json.erase("second");
  json["outputs"][0][0]["data"] = {"nan", "-inf"};
  json["outputs"][1][0] = {{"dtype", "i64"}, {"shape", {2}}, {"data", {"9007199254740993", -5}}};
  const absl::StatusOr<VectorFile> file = ParseVectorFile("f.json", FileText({json}));
  ASSERT_TRUE(file.ok() && file->entries[0].vector.ok()) << file->entries[0].vector.status();
  const Vector& v = *file->entries[0].vector;
  EXPECT_EQ(TextAt(v.outputs[0][0], 0), "nan");
  EXPECT_EQ(TextAt(v.outputs[0][0], 1), "-inf");
  EXPECT_EQ(TextAt(v.outputs[1][0], 0), "9007199254740993");
}

struct Spoiled {
  const char* what;
  std::function<void(Json*)> spoil;
  const char* text;
};

TEST(VectorTest, SaysWhatIsWrongWithAVector) {
  const std::vector<Spoiled> cases = {
      {"no id", [](Json* v) { v->erase("id"); }, "no \"id\""},
      {"unknown op", [](Json* v) { (*v)["op"] = "all_shuffle"; }, "unknown op all_shuffle"},
      {"op of another type", [](Json* v) { (*v)["op"] = 7; }, "op: expected a text, got 7"},
      {"unknown key", [](Json* v) { (*v)["third"] = 1; }, "unknown key \"third\""},
      {"huge world", [](Json* v) { (*v)["world"] = 1e9; }, "world: expected a whole number"},
      {"wide world", [](Json* v) { (*v)["world"] = 100; }, "of 1 to 64, got 100"},
      {"world that wraps", [](Json* v) { (*v)["world"] = 18446744073709551615u; }, "world"},
      {"group outside",
       [](Json* v) {
         (*v)["group"] = {0, 2};
       },
       "group"},
      {"group twice",
       [](Json* v) {
         (*v)["group"] = {1, 1};
       },
       "different ranks"},
      {"empty group", [](Json* v) { (*v)["group"] = Json::array(); }, "group"},
      {"unknown dtype", [](Json* v) { (*v)["dtype"] = "f8"; },
       "dtype: expected a dtype, got \"f8\""},
      {"complex", [](Json* v) { (*v)["dtype"] = "c64"; }, "not complex"},
      {"unknown reduction", [](Json* v) { (*v)["attrs"]["reduction"] = "mean"; },
       "unknown reduction mean"},
      {"no reduction", [](Json* v) { (*v)["attrs"] = Json::object(); }, "no \"reduction\""},
      {"no factors", [](Json* v) { (*v)["attrs"]["reduction"] = "premul_sum"; }, "no \"premul\""},
      {"unknown attribute", [](Json* v) { (*v)["attrs"]["dim"] = 0; }, "unknown key \"dim\""},
      {"attributes of another type", [](Json* v) { (*v)["attrs"] = 3; }, "attrs"},
      {"a rank too few", [](Json* v) { (*v)["inputs"].erase(1); }, "a list for 2 ranks"},
      {"two inputs", [](Json* v) { (*v)["inputs"][0].push_back((*v)["inputs"][0][0]); },
       "2 tensors are not what all_reduce has"},
      {"no output", [](Json* v) { (*v)["outputs"][1] = Json::array(); }, "0 tensors"},
      {"null for inputs", [](Json* v) { (*v)["inputs"][0] = nullptr; }, "inputs[0]"},
      {"no shape", [](Json* v) { (*v)["inputs"][0][0].erase("shape"); }, "no \"shape\""},
      {"shape of text", [](Json* v) { (*v)["inputs"][0][0]["shape"] = {"2"}; }, "shape"},
      {"negative size", [](Json* v) { (*v)["inputs"][0][0]["shape"] = {-2}; }, "shape"},
      {"huge shape",
       [](Json* v) {
         (*v)["inputs"][0][0]["shape"] = {1 << 30, 1 << 30, 1 << 30};
       },
       "inputs[0][0]"},
      {"huge and empty",
       [](Json* v) {
         (*v)["inputs"][0][0] = {{"shape", {0, 1u << 31, 1u << 31, 1u << 31}}, {"data", {1}}};
       },
       "inputs[0][0]"},
      {"another number of elements", [](Json* v) { (*v)["inputs"][0][0]["shape"] = {3}; },
       "f64[3] with 2 elements"},
      {"an element of another type", [](Json* v) { (*v)["inputs"][0][0]["data"][1] = "two"; },
       "inputs[0][0].data[1]: expected a number, got \"two\""},
      {"an element that is a list",
       [](Json* v) {
         (*v)["inputs"][0][0]["data"][1] = Json::array({1, 2});
       },
       "expected a number, got a list of 2"},
      {"a number out of range",
       [](Json* v) {
         (*v)["inputs"][0][0] = {{"dtype", "u8"}, {"shape", {1}}, {"data", {300}}};
       },
       "300 is no u8"},
      {"a half that is none",
       [](Json* v) {
         (*v)["inputs"][0][0] = {{"dtype", "f16"}, {"shape", {1}}, {"data", {0.1}}};
       },
       "is no f16"},
      {"unknown layout",
       [](Json* v) {
         (*v)["layout"] = {{"x", {"contiguous", "tiled"}}};
       },
       "layout"},
      {"layout of outputs",
       [](Json* v) {
         (*v)["layout"] = {{"y", {"contiguous", "expanded"}}};
       },
       "unknown key \"y\""},
      {"requires_grad of numbers",
       [](Json* v) {
         (*v)["requires_grad"] = {1, 0};
       },
       "true or false"},
      {"gradient of another shape",
       [](Json* v) {
         (*v)["grad"]["g"][0][0] = {{"shape", {1}}, {"data", {1}}};
       },
       "g[0][0]: f64[1] as gradient of f64[2]"},
      {"no xbar", [](Json* v) { (*v)["grad"].erase("xbar"); }, "no \"xbar\""},
      {"third order", [](Json* v) { (*v)["second"]["T"] = 1; }, "unknown key \"T\""},
      {"S of text", [](Json* v) { (*v)["second"]["S"] = "much"; }, "S: expected a number"},
      {"a direction without weight", [](Json* v) { (*v)["second"]["w"][0] = nullptr; },
       "rank 0 has \"v\""},
      {"exact scale", [](Json* v) { (*v)["exact"] = {"G"}; }, "exact"},
      {"no exact", [](Json* v) { v->erase("exact"); }, "no \"exact\""},
      {"no scale", [](Json* v) { v->erase("scale"); }, "no \"scale\""},
      {"no scale of G", [](Json* v) { (*v)["scale"].erase("G"); }, "no \"G\""},
      {"endless scale", [](Json* v) { (*v)["scale"]["y"] = "inf"; }, "scale"},
      {"another kind of thing", [](Json* v) { *v = 7; }, "expected an object, got 7"},
  };
  for (const Spoiled& c : cases) {
    SCOPED_TRACE(c.what);
    Json json = SmallVector();
    c.spoil(&json);
    const absl::StatusOr<VectorFile> file =
        ParseVectorFile("f.json", FileText({json, SmallVector()}));
    ASSERT_TRUE(file.ok()) << file.status();
    ASSERT_EQ(file->entries.size(), 2);
    EXPECT_THAT(file->entries[0].vector.status().message(), HasSubstr(c.text));
    EXPECT_TRUE(file->entries[1].vector.ok());
  }
}

TEST(VectorTest, EachOpHasItsAttributes) {
  const auto error = [](const Json& json) {
    const absl::StatusOr<VectorFile> file = ParseVectorFile("f.json", FileText({json}));
    return std::string(file->entries[0].vector.status().message());
  };
  Json json = SmallVector();
  json["op"] = "reduce_scatter_tensor";
  EXPECT_THAT(error(json), HasSubstr("no \"dim\""));
  json["attrs"]["dim"] = 1;
  EXPECT_THAT(error(json), HasSubstr("no \"splits\""));
  json["attrs"]["splits"] = {1, -1};
  EXPECT_THAT(error(json), HasSubstr("splits"));
  json["attrs"]["splits"] = {1, 1};
  EXPECT_THAT(error(json), HasSubstr("dimension 1 of f64[2]"));
  json["attrs"]["dim"] = -1;
  EXPECT_EQ(error(json), "");

  json = SmallVector();
  json["op"] = "broadcast";
  json["attrs"] = {{"src", 2}};
  EXPECT_THAT(error(json), HasSubstr("src"));
  json["attrs"] = {{"src", "host"}};
  EXPECT_THAT(error(json), HasSubstr("src"));
  json["attrs"] = {{"src", 1}};
  EXPECT_EQ(error(json), "");

  json["op"] = "parallel_gather";
  json["attrs"] = {{"dst", "host"}, {"dim", 0}};
  EXPECT_THAT(error(json), HasSubstr("1 tensors are not what parallel_gather has"));
  json["outputs"][1] = json["grad"]["g"][1] = json["second"]["w"][1] = Json::array();
  EXPECT_EQ(error(json), "");
}

TEST(VectorTest, SaysWhatIsWrongWithAFile) {
  const auto error = [](absl::string_view text) {
    return std::string(ParseVectorFile("f.json", text).status().message());
  };
  EXPECT_EQ(error(""), "f.json: this is no JSON");
  EXPECT_EQ(error("{\"vectors\": ["), "f.json: this is no JSON");
  EXPECT_EQ(error("[1e999]"), "f.json: this is no JSON");
  EXPECT_EQ(error("[1]"), "f.json: expected an object, got a list of 1");
  EXPECT_EQ(error("{\"vectors\": 3}"), "f.json: no list of \"vectors\"");
  EXPECT_EQ(error("{\"vectors\": []}"), "f.json: file: no \"schema\"");
  // Deeper than any stack.
  const std::string deep = std::string(1000000, '[') + std::string(1000000, ']');
  EXPECT_EQ(error(deep), "f.json: expected an object, got a list of 1");
  Json inside = SmallVector();
  inside["op"] = "HERE";
  std::string text = FileText({inside});
  text.replace(text.find("\"HERE\""), 6, deep);
  const absl::StatusOr<VectorFile> file = ParseVectorFile("f.json", text);
  ASSERT_TRUE(file.ok());
  EXPECT_THAT(file->entries[0].vector.status().message(), HasSubstr("got a list of 1"));
}

TEST(VectorTest, WhatIsWrongWithAFileIsWrongWithAllItsVectors) {
  for (const auto& spoil : std::vector<std::function<void(Json*)>>{
           [](Json* f) { (*f)["schema"] = "golden-collectives/2"; },
           [](Json* f) { (*f)["phi"] = "sin(y)"; },
           [](Json* f) { f->erase("tolerance"); },
           [](Json* f) { (*f)["tolerance"]["eps"].erase("bf16"); },
           [](Json* f) { (*f)["tolerance"]["second_factor"] = "many"; },
       }) {
    Json json = Json::parse(FileText({SmallVector(), SmallVector()}));
    spoil(&json);
    const absl::StatusOr<VectorFile> file = ParseVectorFile("f.json", json.dump());
    ASSERT_TRUE(file.ok()) << file.status();
    ASSERT_EQ(file->entries.size(), 2);
    for (const VectorFile::Entry& entry : file->entries) {
      EXPECT_FALSE(entry.vector.ok());
      EXPECT_EQ(entry.id, "small");
    }
  }
}

}  // namespace
}  // namespace vectors
}  // namespace chorus
