// The public vectors over one transport on one backend.
//
//   public_ring_host_test --transport=ring --backend=host     as BUILD.bazel has them
#include <iostream>

#include "absl/flags/parse.h"
#include "gtest/gtest.h"
#include "tests/vectors/flags.h"
#include "tests/vectors/public_vectors.h"

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  absl::ParseCommandLine(argc, argv);
  const absl::StatusOr<chorus::vectors::RunnerOptions> options =
      chorus::vectors::OptionsFromFlags();
  if (!options.ok()) {
    std::cerr << options.status().message() << std::endl;
    return 2;
  }
  std::cout << "--sim_seed=" << options->sim_seed << std::endl;
  return chorus::vectors::RunPublicVectors(*options);
}
