// PyTorch's c10d with Gloo, the other peer: as many processes of torch_rank.py, over loopback.
#ifndef CHORUS_BENCHMARKS_TORCH_PEER_H_
#define CHORUS_BENCHMARKS_TORCH_PEER_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "benchmarks/helper.h"
#include "benchmarks/interleave.h"

namespace chorus {
namespace bench {

class TorchPeer {
 public:
  // `python` is one that has torch, `script` is torch_rank.py. NOT_FOUND: it has none.
  static absl::StatusOr<std::unique_ptr<TorchPeer>> Start(const ScratchDirectory& scratch,
                                                          const std::string& python,
                                                          const std::string& script, int ranks);

  const std::string& version() const { return version_; }
  // A contender for an op of collective_case.h. UNIMPLEMENTED: Gloo has none.
  absl::StatusOr<Contender> AsContender(const Task& task);
  // Gives the operands and results back.
  absl::Status Forget();

 private:
  std::unique_ptr<HelperGroup> ranks_;
  std::string version_;
};

}  // namespace bench
}  // namespace chorus

#endif  // CHORUS_BENCHMARKS_TORCH_PEER_H_
