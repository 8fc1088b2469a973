// NCCL as a table of functions, with declarations of our own (core/cuda/cuda_api.h says
// why).
//
// Threads: a table does not change once it is filled; a communicator is used by one thread at a
// time. Ownership: communicators are NCCL's. Errors: said at each function of our own.
#ifndef CHORUS_CORE_CUDA_NCCL_API_H_
#define CHORUS_CORE_CUDA_NCCL_API_H_

#include <climits>
#include <cstddef>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "core/cuda/cuda_api.h"

namespace chorus {
namespace cuda {

// ncclResult_t, ncclDataType_t, ncclRedOp_t.
enum class NcclResult : int { kSuccess = 0, kInProgress = 7 };
enum class NcclType : int { kFloat32 = 7 };
enum class NcclReduction : int { kSum = 0 };

using NcclComm = struct NcclCommStruct*;

// ncclUniqueId.
struct NcclId {
  char bytes[128] = {};
};

// ncclConfig_t of NCCL 2.28; as NCCL_CONFIG_INITIALIZER makes it. An older NCCL reads the part that
// it knows; one with another major version is not for us.
struct NcclConfig {
  static constexpr int kUnset = INT_MIN;

  size_t size = sizeof(NcclConfig);
  unsigned int magic = 0xcafebeef;
  unsigned int version = 22809;
  int blocking = kUnset;
  int cga_cluster_size = kUnset;
  int min_ctas = kUnset;
  int max_ctas = kUnset;
  const char* net_name = nullptr;
  int split_share = kUnset;
  int traffic_class = kUnset;
  const char* comm_name = nullptr;
  int collnet_enable = kUnset;
  int cta_policy = kUnset;
  int shrink_share = kUnset;
  int nvls_ctas = kUnset;
  int channels_per_net_peer = kUnset;
  int nvlink_centric_sched = kUnset;
};

// X(name in the table, symbol, what it returns, parameters).
// clang-format off
#define CHORUS_NCCL_FUNCTIONS(X)                                                                   \
  X(GetVersion, ncclGetVersion, NcclResult, (int* version))                                        \
  X(GetUniqueId, ncclGetUniqueId, NcclResult, (NcclId* id))                                        \
  X(GetErrorString, ncclGetErrorString, const char*, (NcclResult result))                          \
  X(GetLastError, ncclGetLastError, const char*, (NcclComm comm))                                  \
  X(CommInitRankConfig, ncclCommInitRankConfig, NcclResult,                                        \
    (NcclComm* comm, int ranks, NcclId id, int rank, NcclConfig* config))                          \
  X(CommGetAsyncError, ncclCommGetAsyncError, NcclResult, (NcclComm comm, NcclResult* error))      \
  X(CommAbort, ncclCommAbort, NcclResult, (NcclComm comm))                                         \
  X(AllReduce, ncclAllReduce, NcclResult,                                                          \
    (const void* from, void* to, size_t count, NcclType type, NcclReduction reduction,             \
     NcclComm comm, Stream stream))
// clang-format on

struct NcclApi {
#define CHORUS_NCCL_FIELD(name, symbol, result, parameters) result(*name) parameters = nullptr;
  CHORUS_NCCL_FUNCTIONS(CHORUS_NCCL_FIELD)
#undef CHORUS_NCCL_FIELD
  std::string path;  // of the library
};

// From `folders`, where the system's loader looks, Python's packages and the toolkit's usual place.
// FAILED_PRECONDITION kWrongState: there is no libnccl.so.2, or it lacks a function.
absl::StatusOr<NcclApi> LoadNcclApi(const std::vector<std::string>& folders);

// The symbols of the table, in its order.
const std::vector<const char*>& NcclSymbols();

}  // namespace cuda
}  // namespace chorus

#endif  // CHORUS_CORE_CUDA_NCCL_API_H_
