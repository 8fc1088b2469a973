// What the corpus of graph_fuzz is to the decoder and to the check: a file that has grown stale is
// refused before it shows anything.
#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/graph/encoding.h"
#include "core/ops/specialize.h"
#include "core/ops/validate.h"
#include "gtest/gtest.h"

namespace chorus {
namespace {

TEST(FuzzCorpusTest, GraphsDecodeAndAreSoundButForThoseThatMustNot) {
  const std::set<std::string> malformed = {"cut", "empty", "huge_count", "magic_only",
                                           "source_too_long"};
  const std::set<std::string> unsound = {"empty_nodes", "longest_source"};
  std::set<std::string> missing = malformed;
  missing.insert(unsound.begin(), unsound.end());
  int with_rules = 0;
  int bound = 0;
  for (const auto& entry : std::filesystem::directory_iterator("core/ops/fuzz_corpus")) {
    const std::string name = entry.path().filename();
    SCOPED_TRACE(name);
    missing.erase(name);
    std::ifstream file(entry.path(), std::ios::binary);
    const std::string bytes(std::istreambuf_iterator<char>(file), {});
    const absl::StatusOr<Graph> graph = DecodeGraph(bytes);
    ASSERT_EQ(graph.ok(), malformed.count(name) == 0) << graph.status();
    if (!graph.ok()) continue;
    EXPECT_EQ(EncodeGraph(*graph), bytes);
    const absl::Status valid = ValidateGraph(*graph, GraphLimits());
    ASSERT_EQ(valid.ok(), unsound.count(name) == 0) << valid;
    if (!valid.ok()) continue;
    // Its numbers follow its sizes.
    const absl::StatusOr<std::vector<int64_t>> maxima = CheckSymbols(*graph);
    ASSERT_TRUE(maxima.ok()) << maxima.status();
    const absl::StatusOr<Graph> least = Specialize(*graph, std::vector<int64_t>(maxima->size(), 1));
    ASSERT_TRUE(least.ok()) << least.status();
    const absl::Status valid_least = ValidateGraph(*least, GraphLimits());
    EXPECT_TRUE(valid_least.ok()) << valid_least;
    with_rules += graph->sizes.empty() ? 0 : 1;
    bound += graph->num_instance_slots > 0 ? 1 : 0;
  }
  EXPECT_TRUE(missing.empty()) << *missing.begin();
  EXPECT_EQ(with_rules, 3);
  EXPECT_EQ(bound, 1);
}

}  // namespace
}  // namespace chorus
