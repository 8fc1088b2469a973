#include "tests/conformance/cluster.h"

#include "gtest/gtest.h"

namespace chorus {
namespace conformance {

void Cluster::Kill(const sdk::Session&) { ADD_FAILURE() << "no session dies alone here"; }

int64_t Cluster::MemoryInUse() {
  ADD_FAILURE() << "its memory cannot be asked for";
  return -1;
}

}  // namespace conformance
}  // namespace chorus
