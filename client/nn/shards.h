// Tensors shared out among files: each rank writes those, or those rows, that it holds, and others,
// of another number, read what they need.
//
//   NAME-00001-of-00004.safetensors, ...   a file of each of four ranks (safetensors.h)
//   NAME.safetensors.index.json            which tensor is in which file:
//     {"metadata": {"total_size": 4096, "progress": {"step": "30"}},
//      "weight_map": {"encoder.weight": "NAME-00002-of-00004.safetensors", ...}}
//
// That is the layout of Hugging Face's, whose readers open these files as these open theirs. Beyond
// it a tensor may be in several files, in pieces of rows (of dimension 0): "table[0:128/512]" is
// rows 0 to 127 of a "table" of 512. Each row is in one piece. `progress` is in every file, and
// equal.
//
// The index comes last, in one piece: what has no index was not finished. A NAME is used once.
//
// Files are not trusted: what does not fit exactly is refused before anything is read.
//
// Threads: any, for const functions. Ownership: TensorFiles holds the files' bytes, mapped.
// Errors: returned. As safetensors.h; INVALID_ARGUMENT kMalformed: pieces that are missing, overlap
//   or differ in type, files of other savings; kBadType: a NAME whose part behind the last slash is
//   no UTF-8; FAILED_PRECONDITION kWrongState: NAME has an index.
#ifndef CHORUS_CLIENT_NN_SHARDS_H_
#define CHORUS_CLIENT_NN_SHARDS_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "chorus/call_site.h"
#include "chorus/nn/safetensors.h"
#include "chorus/tensor.h"

namespace chorus {
namespace nn {

// "NAME-00002-of-00004.safetensors" is shard 1 of 4.
std::string ShardPath(const std::string& name, int shard, int shards);
std::string ShardIndexPath(const std::string& name);

// Rows of a tensor, or all of it.
struct TensorPiece {
  std::string name;   // of the whole
  Tensor tensor;      // these rows
  int64_t begin = 0;  // the first of them
  int64_t rows = -1;  // how many the whole has; -1: this is the whole
};

// Writes one shard; each rank its own. All give one `metadata`, by which files are known to belong
// together: the step should be in it, and "format": "pt" where Hugging Face's loaders are to take
// the files. A piece without rows is not written.
absl::Status SaveShard(const std::string& name, int shard, int shards,
                       const std::vector<TensorPiece>& pieces,
                       const std::map<std::string, std::string>& metadata = {});
// Writes the index, when all shards are written (after a barrier; by one of the ranks) and fit.
absl::Status FinishShards(const std::string& name, int shards);

class TensorFiles {
 public:
  // An index ("NAME.safetensors.index.json") with all its files, or one file of safetensors.
  static absl::StatusOr<TensorFiles> Open(const std::string& path);

  // Of whole tensors, by name.
  const std::vector<TensorFile::Entry>& entries() const;
  const TensorFile::Entry* Find(const std::string& name) const;  // null: there is none
  const std::map<std::string, std::string>& metadata() const;
  // A copy on the device: of all of it, or of the rows from `begin` to `end` - 1, however many
  // pieces they are in.
  absl::StatusOr<Tensor> Read(const std::string& name, const DeviceRef& device,
                              CallSite site = CallSite::Here()) const;
  absl::StatusOr<Tensor> ReadRows(const std::string& name, int64_t begin, int64_t end,
                                  const DeviceRef& device, CallSite site = CallSite::Here()) const;

 private:
  friend absl::Status FinishShards(const std::string& name, int shards);
  struct Content;
  explicit TensorFiles(std::shared_ptr<const Content> content) : content_(std::move(content)) {}
  // Of an index with this text at `path`.
  static absl::StatusOr<TensorFiles> OfIndex(const std::string& path, const std::string& text);

  std::shared_ptr<const Content> content_;
};

}  // namespace nn
}  // namespace chorus

#endif  // CHORUS_CLIENT_NN_SHARDS_H_
