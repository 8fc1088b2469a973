#include "chorus/data/idx.h"

#include <zlib.h>

#include <cstdint>
#include <cstdlib>
#include <initializer_list>
#include <string>
#include <vector>

#include "chorus/chorus.h"
#include "core/base/error.h"
#include "core/base/file.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace chorus {
namespace data {
namespace {

using parallel::HostTensor;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string Bytes(std::initializer_list<int> bytes) {
  std::string text;
  for (const int b : bytes) text.push_back(static_cast<char>(b));
  return text;
}

std::string Gzip(const std::string& bytes) {
  std::string out(bytes.size() + 1000, '\0');
  z_stream stream = {};
  EXPECT_EQ(deflateInit2(&stream, 9, Z_DEFLATED, 16 + MAX_WBITS, 9, Z_DEFAULT_STRATEGY), Z_OK);
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(bytes.data()));
  stream.avail_in = static_cast<uInt>(bytes.size());
  stream.next_out = reinterpret_cast<Bytef*>(&out[0]);
  stream.avail_out = static_cast<uInt>(out.size());
  EXPECT_EQ(deflate(&stream, Z_FINISH), Z_STREAM_END);
  out.resize(stream.total_out);
  deflateEnd(&stream);
  return out;
}

absl::StatusOr<HostTensor> Parse(const std::string& bytes) { return ParseIdx("file", bytes); }

std::string Error(const std::string& bytes, Reason reason = Reason::kMalformed) {
  const absl::Status status = Parse(bytes).status();
  EXPECT_EQ(ErrorOf(status).reason, reason) << status;
  return std::string(status.message());
}

const std::string& Images() {
  static const auto* const bytes =
      new std::string(Bytes({0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 3, 1, 2, 3, 4, 5, 255}));
  return *bytes;
}

TEST(IdxTest, BytesPlainAndGzipped) {
  for (const std::string& bytes : {Images(), Gzip(Images())}) {
    const absl::StatusOr<HostTensor> images = Parse(bytes);
    ASSERT_TRUE(images.ok()) << images.status();
    EXPECT_EQ(images->shape(), Shape({2, 1, 3}));
    EXPECT_THAT(*images->Read<uint8_t>(), ElementsAre(1, 2, 3, 4, 5, 255));
  }
}

// As `cat a.gz b.gz` and parallel compressors give.
TEST(IdxTest, AGzipOfSeveralMembersIsOneFile) {
  const std::string& images = Images();
  for (size_t cut = 0; cut <= images.size(); ++cut) {
    const std::string first = Gzip(images.substr(0, cut)), second = Gzip(images.substr(cut));
    const absl::StatusOr<HostTensor> read = Parse(first + second + Gzip(""));
    ASSERT_TRUE(read.ok()) << cut << ": " << read.status();
    EXPECT_THAT(*read->Read<uint8_t>(), ElementsAre(1, 2, 3, 4, 5, 255));
    EXPECT_THAT(Error(first + second + "x"), HasSubstr("it has more or they are damaged"));
    EXPECT_THAT(Error(first + second + Gzip("x")), HasSubstr("it has more or they are damaged"));
    const std::string whole = first + second;
    for (size_t size = first.size() + 1; size < whole.size(); ++size) {
      EXPECT_NE(Error(whole.substr(0, size)), "") << cut << ", " << size;
    }
  }
}

TEST(IdxTest, EveryTypeTheFirstByteFirst) {
  EXPECT_THAT(*Parse(Bytes({0, 0, 9, 1, 0, 0, 0, 2, 255, 7}))->Read<int8_t>(), ElementsAre(-1, 7));
  EXPECT_THAT(*Parse(Bytes({0, 0, 11, 1, 0, 0, 0, 2, 1, 2, 255, 254}))->Read<int16_t>(),
              ElementsAre(258, -2));
  EXPECT_THAT(*Parse(Bytes({0, 0, 12, 1, 0, 0, 0, 1, 1, 2, 3, 4}))->Read<int32_t>(),
              ElementsAre(16909060));
  EXPECT_THAT(*Parse(Bytes({0, 0, 13, 1, 0, 0, 0, 1, 0x3f, 0xc0, 0, 0}))->Read<float>(),
              ElementsAre(1.5f));
  EXPECT_THAT(*Parse(Bytes({0, 0, 14, 0, 0xbf, 0xf8, 0, 0, 0, 0, 0, 0}))->Read<double>(),
              ElementsAre(-1.5));
  EXPECT_THAT(*Parse(Gzip(Bytes({0, 0, 11, 1, 0, 0, 0, 2, 1, 2, 255, 254})))->Read<int16_t>(),
              ElementsAre(258, -2));
}

TEST(IdxTest, ThereMayBeNoImages) {
  for (const bool zipped : {false, true}) {
    const std::string bytes = Bytes({0, 0, 8, 3, 0, 0, 0, 0, 0, 0, 0, 28, 0, 0, 0, 28});
    const absl::StatusOr<HostTensor> none = Parse(zipped ? Gzip(bytes) : bytes);
    ASSERT_TRUE(none.ok()) << none.status();
    EXPECT_EQ(none->shape(), Shape({0, 28, 28}));
  }
}

TEST(IdxTest, WhatIsCutOrLongerIsRefused) {
  for (const std::string& bytes : {Images(), Gzip(Images())}) {
    for (size_t size = 0; size < bytes.size(); ++size) {
      EXPECT_NE(Error(bytes.substr(0, size)), "") << size;
    }
    EXPECT_THAT(Error(bytes + "x"), HasSubstr("it has more or they are damaged"));
  }
  EXPECT_THAT(Error(Gzip(Images() + "x")), HasSubstr("it has more or they are damaged"));
  EXPECT_THAT(Error(Images().substr(0, 21)), HasSubstr("expected 6 bytes for u8[2,1,3]"));
  EXPECT_THAT(Error(Images().substr(0, 12)), HasSubstr("cut off in its head"));
}

TEST(IdxTest, ADamagedGzipIsRefused) {
  const std::string good = Gzip(Images());
  // The checksum and the size at its end.
  for (size_t i = good.size() - 8; i < good.size(); ++i) {
    std::string bad = good;
    bad[i] = static_cast<char>(bad[i] ^ 1);
    EXPECT_THAT(Error(bad), HasSubstr("damaged"));
  }
}

TEST(IdxTest, NoMoreIsAllocatedThanTheFileCanHave) {
  const std::string huge =
      Bytes({0, 0, 8, 3, 127, 255, 255, 255, 127, 255, 255, 255, 127, 255, 255, 255});
  EXPECT_THAT(Error(huge), HasSubstr("more than a file of 16 bytes can have"));
  EXPECT_THAT(Error(Gzip(huge)), HasSubstr("can have"));
  // Deflate gives 1032 bytes of one: more is refused before it is looked for, less when it lacks.
  std::string many = Bytes({0, 0, 8, 1, 0, 0, 0, 0});
  const std::string zipped = Gzip(many + std::string(100000, '\0'));
  ASSERT_LT(zipped.size(), 200u);
  many[5] = 1;  // 65536
  EXPECT_TRUE(Parse(Gzip(many + std::string(65536, '\0'))).ok());
  EXPECT_THAT(Error(Gzip(many)), HasSubstr("can have"));
  EXPECT_THAT(Error(std::string(Bytes({0, 0, 8, 255})) + std::string(1020, '\0')),
              HasSubstr("255 dimensions, at most 16 fit"));
}

TEST(IdxTest, NothingInSizesThatNoTensorHasIsRefused) {
  EXPECT_THAT(Error(Bytes({0, 0, 8, 3, 0, 0, 0, 0, 1, 0, 0, 228, 255, 255, 255, 227})),
              AllOf(HasSubstr("file: "), HasSubstr("u8[0,16777444,4294967267]")));
}

TEST(IdxTest, OtherFormatsAreRefused) {
  EXPECT_THAT(Error("PK\3\4 and more"), HasSubstr("expected an IDX file"));
  EXPECT_THAT(Error(Bytes({0, 0, 10, 0}), Reason::kUnsupported), HasSubstr("type 10, expected 8"));
}

TEST(IdxTest, FilesAreReadByTheirPaths) {
  std::string folder = ::testing::TempDir() + "/idx.XXXXXX";
  ASSERT_NE(mkdtemp(&folder[0]), nullptr);
  const std::string path = folder + "/images";
  EXPECT_EQ(ErrorOf(ReadIdx(path).status()).reason, Reason::kUnknownName);
  absl::StatusOr<HostTensor> images;
  {
    ASSERT_TRUE(ReplaceFile(path, {Images()}).ok());
    images = ReadIdx(path);
    ASSERT_TRUE(ReplaceFile(path, {"0"}).ok());
  }
  EXPECT_THAT(*images->Read<uint8_t>(), ElementsAre(1, 2, 3, 4, 5, 255));
  EXPECT_THAT(std::string(ReadIdx(path).status().message()), HasSubstr(path));
  (void)std::system(("rm -rf " + folder).c_str());
}

}  // namespace
}  // namespace data
}  // namespace chorus
