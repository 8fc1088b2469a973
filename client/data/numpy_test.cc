// testdata/write_testdata.py has written the files that NumPy writes.
#include "chorus/data/numpy.h"

#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "chorus/chorus.h"
#include "core/base/error.h"
#include "core/base/file.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace chorus {
namespace data {
namespace {

using parallel::HostTensor;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Arrays = std::map<std::string, HostTensor>;

std::string Path(const std::string& name) { return "client/data/testdata/" + name; }

std::string BytesOf(const std::string& name) {
  const absl::StatusOr<HeldBytes> file = MapFile(Path(name));
  EXPECT_TRUE(file.ok()) << file.status();
  return file.ok() ? std::string(file->bytes) : "";
}

// That the array has 7 i - 20 at element i.
template <typename T>
void ExpectValues(const absl::StatusOr<HostTensor>& array, const Shape& shape) {
  ASSERT_TRUE(array.ok()) << array.status();
  EXPECT_EQ(array->shape(), shape);
  const absl::StatusOr<std::vector<T>> values = array->Read<T>();
  ASSERT_TRUE(values.ok()) << values.status();
  for (size_t i = 0; i < values->size(); ++i) {
    EXPECT_EQ((*values)[i], static_cast<T>(7 * static_cast<int>(i) - 20)) << i;
  }
}

absl::Status ErrorOfNpy(const std::string& bytes) { return ParseNpy("file", bytes).status(); }

// A file of version 1 with this header, and so many bytes behind it.
std::string Npy(const std::string& header, size_t data) {
  std::string bytes("\x93NUMPY\x01\x00", 8);
  bytes.push_back(static_cast<char>(header.size()));
  bytes.push_back(static_cast<char>(header.size() >> 8));
  return bytes + header + std::string(data, '\1');
}

TEST(NpyTest, EveryTypeOfNumpysThatThereIsHere) {
  ExpectValues<double>(ReadNpy(Path("f8.npy")), {2, 3});
  ExpectValues<float>(ReadNpy(Path("f4.npy")), {2, 3});
  ExpectValues<int64_t>(ReadNpy(Path("i8.npy")), {2, 3});
  ExpectValues<int32_t>(ReadNpy(Path("i4.npy")), {2, 3});
  ExpectValues<int16_t>(ReadNpy(Path("i2.npy")), {2, 3});
  ExpectValues<int8_t>(ReadNpy(Path("i1.npy")), {2, 3});
  EXPECT_THAT(*ReadNpy(Path("u1.npy"))->Read<uint8_t>(), ElementsAre(0, 1, 2, 3, 4, 5));
  EXPECT_THAT(*ReadNpy(Path("b1.npy"))->Read<bool>(),
              ElementsAre(false, true, false, false, true, false));
  const absl::StatusOr<std::vector<F16>> half = ReadNpy(Path("f2.npy"))->Read<F16>();
  ASSERT_TRUE(half.ok()) << half.status();
  for (size_t i = 0; i < 6; ++i) {
    EXPECT_EQ(static_cast<float>((*half)[i]), static_cast<float>(7 * static_cast<int>(i) - 20));
  }
}

TEST(NpyTest, VersionsOrdersAndSizes) {
  ExpectValues<float>(ReadNpy(Path("version2.npy")), {5});
  ExpectValues<float>(ReadNpy(Path("version3.npy")), {5});
  ExpectValues<int32_t>(ReadNpy(Path("fortran.npy")), {2, 3, 5});
  ExpectValues<double>(ReadNpy(Path("scalar.npy")), {});
  ExpectValues<float>(ReadNpy(Path("empty.npy")), {0, 3});
  ExpectValues<float>(ReadNpy(Path("empty_fortran.npy")), {3, 0, 2});
}

TEST(NpyTest, WhatChorusHasNotIsRefusedByName) {
  const struct {
    const char* name;
    const char* text;
  } cases[] = {{"big_endian.npy", "dtype '>f4'"}, {"unsigned.npy", "dtype '<u4'"},
               {"complex.npy", "dtype '<c8'"},    {"structured.npy", "a structured dtype"},
               {"text.npy", "dtype '<U2'"},       {"object.npy", "dtype '|O'"}};
  for (const auto& c : cases) {
    const absl::Status status = ReadNpy(Path(c.name)).status();
    EXPECT_EQ(ErrorOf(status).reason, Reason::kUnsupported) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(c.text));
    EXPECT_THAT(std::string(status.message()), HasSubstr(c.name));
  }
  EXPECT_EQ(ErrorOf(ReadNpy(Path("none.npy")).status()).reason, Reason::kUnknownName);
}

TEST(NpyTest, HeadersAreReadAsPythonWritesThem) {
  for (const char* header : {"{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }   \n",
                             "{\"shape\":(2,3),\"descr\":\"<f4\",\"fortran_order\":False}",
                             "{'fortran_order':False,'shape':( 2 , 3 , ),'descr':'<f4',}",
                             // Python 2's, of its long integers.
                             "{'descr': '<f4', 'fortran_order': False, 'shape': (2L, 3L), }",
                             "{'descr': '<f4', 'fortran_order': False, 'shape': (2L, 3), }"}) {
    const absl::StatusOr<HostTensor> array = ParseNpy("file", Npy(header, 24));
    ASSERT_TRUE(array.ok()) << header << ": " << array.status();
    EXPECT_EQ(array->shape(), Shape({2, 3}));
  }
}

TEST(NpyTest, HeadersThatAreNoneAreRefused) {
  const std::string good = "{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }";
  ASSERT_TRUE(ErrorOfNpy(Npy(good, 8)).ok());
  const struct {
    const char* from;
    const char* to;
    const char* text;
  } cases[] = {
      {"{", "", "no dictionary"},
      {"}", "", "no dictionary"},
      {"}", "} 1", "more than a dictionary"},
      {"'descr': '<f4', ", "", "lacks descr"},
      {"'descr'", "'shape'", "its shape is no tuple"},
      {"'fortran_order': False", "'descr': '<f4'", "has descr twice"},
      {"'descr'", "'what'", "an unknown key \"what\""},
      {"'<f4'", "4", "its dtype is no plain one"},
      {"'<f4'", "'\\x3cf4'", "its dtype is no plain one"},
      {"'<f4'", "'<f4", "no dictionary"},
      {"False", "0", "fortran_order is no bool"},
      {"(2,)", "(2)", "its shape is no tuple"},
      {"(2,)", "2", "its shape is no tuple"},
      {"(2,)", "(-2,)", "its shape is no tuple"},
      {"(2,)", "(2.5,)", "its shape is no tuple"},
      {"(2,)", "(99999999999999999999,)", "its shape is no tuple"},
      {"(2,)", "(,)", "its shape is no tuple"},
      {"(2,)", "(2,", "its shape is no tuple"},
      {"(2,)", "(L,)", "its shape is no tuple"},
      {"(2,)", "(2LL,)", "its shape is no tuple"},
      {"(2,)", "(2 L,)", "its shape is no tuple"},
      {"(2,)", "(2L)", "its shape is no tuple"},
  };
  for (const auto& c : cases) {
    const std::string header = absl::StrReplaceAll(good, {{c.from, c.to}});
    ASSERT_NE(header, good);
    const absl::Status status = ErrorOfNpy(Npy(header, 8));
    EXPECT_EQ(ErrorOf(status).reason, Reason::kMalformed) << header << ": " << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(c.text)) << header;
  }
}

TEST(NpyTest, SizesThatDoNotFitAreRefused) {
  const auto error = [](const std::string& shape, size_t data, const std::string& order = "False") {
    const absl::Status status = ErrorOfNpy(
        Npy("{'descr': '<f4', 'fortran_order': " + order + ", 'shape': " + shape + ", }", data));
    EXPECT_EQ(ErrorOf(status).reason, Reason::kMalformed) << status;
    return std::string(status.message());
  };
  EXPECT_THAT(error("(2,)", 7), HasSubstr("it says f32[2], but has 7 bytes"));
  EXPECT_THAT(error("(2,)", 9), HasSubstr("it says f32[2], but has 9 bytes"));
  EXPECT_THAT(error("()", 0), HasSubstr("it says f32[], but has 0 bytes"));
  for (const char* order : {"False", "True"}) {
    EXPECT_THAT(error("(4611686018427387904, 4)", 0, order), HasSubstr("but has 0 bytes"));
    EXPECT_THAT(error("(0, 4611686018427387904, 4)", 0, order), HasSubstr("but has 0 bytes"));
    EXPECT_THAT(error("(1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1)", 4, order), HasSubstr("it says"));
  }
  // A header that is longer than its file.
  for (const char version : {'\1', '\2'}) {
    std::string bytes = BytesOf("version2.npy");
    bytes[6] = version;
    bytes[9] = '\xff';
    EXPECT_THAT(std::string(ErrorOfNpy(bytes).message()), HasSubstr("cut off in its header"));
  }
  std::string bytes = BytesOf("f4.npy");
  bytes[6] = 4;
  EXPECT_THAT(std::string(ErrorOfNpy(bytes).message()), HasSubstr("version 4.0 of the .npy"));
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_FALSE(ErrorOfNpy(BytesOf("f4.npy").substr(0, size)).ok()) << size;
  }
}

TEST(NpzTest, StoredAndDeflatedArchives) {
  const absl::StatusOr<Arrays> stored = ReadNpz(Path("stored.npz"));
  ASSERT_TRUE(stored.ok()) << stored.status();
  EXPECT_EQ(stored->size(), 2u);
  ExpectValues<float>(stored->at("x"), {2, 3});
  ExpectValues<int64_t>(stored->at("y"), {4});
  const absl::StatusOr<Arrays> deflated = ReadNpz(Path("deflated.npz"));
  ASSERT_TRUE(deflated.ok()) << deflated.status();
  ExpectValues<float>(deflated->at("x"), {40, 30});
  EXPECT_THAT(*deflated->at("y").Read<bool>(),
              ElementsAre(false, true, false, false, true, false, false));
  const absl::StatusOr<Arrays> nothing = ReadNpz(Path("nothing.npz"));
  ASSERT_TRUE(nothing.ok()) << nothing.status();
  EXPECT_TRUE(nothing->empty());
}

TEST(NpzTest, OtherFilesAreRefused) {
  for (const char* name : {"f4.npy", "cut.npz"}) {
    const absl::Status status = ReadNpz(Path(name)).status();
    EXPECT_EQ(ErrorOf(status).reason, Reason::kMalformed) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("expected an .npz file"));
  }
  EXPECT_THAT(std::string(ParseNpz("file", "").status().message()), HasSubstr("it is empty"));
  EXPECT_EQ(ErrorOf(ReadNpz(Path("none.npz")).status()).reason, Reason::kUnknownName);
}

TEST(NpzTest, AMemberThatDoesNotFitIsNamed) {
  const std::string good = BytesOf("stored.npz");
  const auto error = [&good](const std::string& from, const std::string& to) {
    const std::string bytes = absl::StrReplaceAll(good, {{from, to}});
    EXPECT_NE(bytes, good);
    return std::string(ParseNpz("file", bytes).status().message());
  };
  EXPECT_THAT(error("x.npy", "x.txt"), HasSubstr("x.txt: expected members NAME.npy"));
  EXPECT_THAT(error("x.npy", "y.npy"), HasSubstr("File already exists"));
  // The checksum.
  EXPECT_THAT(error("fortran_order", "fortran-order"), HasSubstr("x.npy: CRC error"));
  EXPECT_THAT(error("'shape': (2, 3)", "'shape': (3, 2)"), HasSubstr("x.npy: CRC error"));
}

TEST(NpzTest, SizesThatAreNotTheMembersAreRefused) {
  ExpectValues<float>(ReadNpz(Path("size_right.npz"))->at("x"), {2, 3});
  const auto error = [](const char* name, Reason reason = Reason::kMalformed) {
    const absl::Status status = ReadNpz(Path(name)).status();
    EXPECT_EQ(ErrorOf(status).reason, reason) << name << ": " << status;
    return std::string(status.message());
  };
  EXPECT_THAT(error("size_too_large.npz"), HasSubstr("x.npy: it says 1073741824 bytes, which is"));
  EXPECT_THAT(error("size_larger.npz"), HasSubstr("x.npy: cut off"));
  EXPECT_THAT(error("size_smaller.npz"), HasSubstr("x.npy: more than the 144 bytes"));
  EXPECT_THAT(error("nested.npz"), HasSubstr("members have more bytes than the archive"));
  EXPECT_THAT(error("bzip2.npz", Reason::kUnsupported), HasSubstr("x.npy: compression 12 of zip"));
}

// Damaged anywhere: refused, or arrays that are all there.
TEST(NpzTest, DamagedArchivesAreRefusedOrReadable) {
  const uint32_t seed = 20261125;
  std::cout << "seed " << seed << std::endl;
  std::mt19937 random(seed);
  for (const char* name : {"stored.npz", "deflated.npz"}) {
    const std::string good = BytesOf(name);
    int read = 0;
    for (int i = 0; i < 2000; ++i) {
      std::string bytes = good;
      const int changes = 1 + static_cast<int>(random() % 3);
      for (int c = 0; c < changes; ++c) {
        bytes[random() % bytes.size()] = static_cast<char>(random());
      }
      if (random() % 4 == 0) bytes.resize(random() % (bytes.size() + 1));
      const absl::StatusOr<Arrays> arrays = ParseNpz("file", bytes);
      if (!arrays.ok()) {
        const Reason reason = ErrorOf(arrays.status()).reason;
        EXPECT_TRUE(reason == Reason::kMalformed || reason == Reason::kUnsupported)
            << arrays.status();
        continue;
      }
      ++read;
      for (const auto& array : *arrays) EXPECT_TRUE(array.second.status().ok());
    }
    EXPECT_GT(read, 0);
    EXPECT_LT(read, 2000);
  }
}

}  // namespace
}  // namespace data
}  // namespace chorus
