#include "core/tensor/type.h"

#include <cstdint>
#include <limits>
#include <string>

#include "core/base/error.h"
#include "gtest/gtest.h"

namespace chorus {
namespace {

constexpr int64_t kMax = std::numeric_limits<int64_t>::max();

TEST(TypeTest, EveryDTypeHasANameThatLeadsBack) {
  for (int i = 1; i <= static_cast<int>(DType::kComplex128); ++i) {
    const DType dtype = static_cast<DType>(i);
    EXPECT_EQ(DTypeFromName(DTypeName(dtype)), dtype) << i;
    EXPECT_GT(DTypeBytes(dtype), 0) << i;
  }
  EXPECT_EQ(DTypeFromName("f33"), DType::kUnspecified);
  EXPECT_EQ(DTypeBytes(static_cast<DType>(200)), 0);
  EXPECT_EQ(DTypeBytes(DType::kI64), 8);
  EXPECT_TRUE(IsFloating(DType::kBF16));
  EXPECT_FALSE(IsFloating(DType::kI64));
  EXPECT_TRUE(IsSupported(DType::kF16));
  EXPECT_TRUE(IsSupported(DType::kBool));
  EXPECT_FALSE(IsSupported(DType::kComplex64));
  EXPECT_FALSE(IsSupported(DType::kUnspecified));
  EXPECT_EQ(DTypeNames(kSupportedDTypes), "f16, bf16, f32, f64, i8, u8, i16, i32, i64 and bool");
  EXPECT_EQ(DTypeNames(OneDType(DType::kF32)), "f32");
  EXPECT_TRUE(IsSupported(DType::kF32));
}

TEST(TypeTest, PrintsAndCounts) {
  EXPECT_EQ(TensorType(DType::kF32, {4, 3}).ToString(), "f32[4,3]");
  EXPECT_EQ(TensorType(DType::kF64, {}).ToString(), "f64[]");
  EXPECT_EQ(TensorType(DType::kF64, {}).num_elements(), 1);
  EXPECT_EQ(TensorType(DType::kF32, {4, 3}).num_bytes(), 48);
  EXPECT_EQ(TensorType(DType::kF32, {4, 0}).num_bytes(), 0);
  const TensorType symbolic(DType::kF32, {Dim::Symbol(2, 64), 3});
  EXPECT_EQ(symbolic.ToString(), "f32[s2<=64,3]");
  EXPECT_FALSE(symbolic.is_static());
  EXPECT_EQ(symbolic.num_elements(), 192);
  EXPECT_EQ(RowMajorStrides({2, 3, 4}), (std::vector<int64_t>{12, 4, 1}));
}

TEST(TypeTest, ValidateRefusesWhatCannotBe) {
  EXPECT_TRUE(TensorType(DType::kF32, {4, 3}).Validate(48).ok());
  EXPECT_FALSE(TensorType(DType::kF32, {4, 3}).Validate(47).ok());
  EXPECT_FALSE(TensorType(DType::kF64, {}).Validate(7).ok());
  EXPECT_FALSE(TensorType(DType::kUnspecified, {1}).Validate(kMax).ok());
  EXPECT_FALSE(TensorType(static_cast<DType>(99), {1}).Validate(kMax).ok());
  EXPECT_FALSE(TensorType(DType::kF32, {-1}).Validate(kMax).ok());
  EXPECT_FALSE(TensorType(DType::kF32, {kMax, kMax}).Validate(kMax).ok());
  EXPECT_FALSE(TensorType(DType::kF32, {0, kMax, kMax}).Validate(kMax).ok());
  EXPECT_FALSE(TensorType(DType::kF32, std::vector<Dim>(17, Dim(1))).Validate(kMax).ok());
  const absl::Status status = TensorType(DType::kF32, {-5}).Validate(kMax);
  EXPECT_EQ(ErrorOf(status).reason, Reason::kBadType);
  EXPECT_NE(std::string(status.message()).find("-5"), std::string::npos) << status;
}

TEST(TypeTest, DecodesWhatItEncodes) {
  for (const TensorType& type :
       {TensorType(DType::kF32, {}), TensorType(DType::kBool, {0, kMax}),
        TensorType(DType::kI64, {Dim::Symbol(std::numeric_limits<int32_t>::max() - 1, 8), 3})}) {
    ByteWriter out;
    EncodeType(type, &out);
    ByteReader in(out.bytes());
    EXPECT_EQ(DecodeType(&in), type);
    EXPECT_TRUE(in.Done());
    for (size_t cut = 0; cut < out.size(); ++cut) {
      ByteReader short_in(absl::string_view(out.bytes()).substr(0, cut));
      DecodeType(&short_in);
      EXPECT_FALSE(short_in.ok()) << type.ToString() << " cut at " << cut;
    }
  }
}

TEST(TypeTest, DecodeRefusesNumbersOutOfRange) {
  for (const std::string& bytes : {std::string("\x0d\x00\x00", 3), std::string("\x03\x01\x00", 3),
                                   std::string("\x03\x00\x11", 3) + std::string(34, '\0'),
                                   std::string("\x03\x00\x01\x02\xff\xff\xff\xff\x0f", 9)}) {
    ByteReader in(bytes);
    DecodeType(&in);
    EXPECT_FALSE(in.ok());
  }
}

}  // namespace
}  // namespace chorus
