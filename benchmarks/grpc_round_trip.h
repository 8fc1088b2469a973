// What one unary gRPC call over a Unix socket takes: the standard health check of a bare server.
#ifndef CHORUS_BENCHMARKS_GRPC_ROUND_TRIP_H_
#define CHORUS_BENCHMARKS_GRPC_ROUND_TRIP_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "benchmarks/helper.h"

namespace chorus {
namespace bench {

class GrpcRoundTrip {
 public:
  static absl::StatusOr<std::unique_ptr<GrpcRoundTrip>> Start(const ScratchDirectory& scratch);
  absl::StatusOr<std::vector<double>> Run(int64_t iterations);

 private:
  std::unique_ptr<HelperGroup> server_;
  std::unique_ptr<HelperGroup> client_;
};

// Helpers. `socket` is where the server listens.
int RunGrpcServerHelper(const std::string& control_path, const std::string& socket);
int RunGrpcClientHelper(const std::string& control_path, const std::string& socket);

}  // namespace bench
}  // namespace chorus

#endif  // CHORUS_BENCHMARKS_GRPC_ROUND_TRIP_H_
