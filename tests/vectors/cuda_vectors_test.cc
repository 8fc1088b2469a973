// The public vectors on logical devices of one GPU, without a transport: on a stand-in, or with
// CHORUS_TEST_GPU=driver in the environment on this machine's GPU.
#include "gtest/gtest.h"
#include "tests/conformance/direct_cluster.h"
#include "tests/conformance/job.h"
#include "tests/vectors/public_vectors.h"

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  chorus::vectors::RunnerOptions options;
  options.cluster = chorus::conformance::DirectCluster("cuda");
  options.sim_seed = chorus::conformance::TestSeed();
  return chorus::vectors::RunPublicVectors(options);
}
