// Tensors in files, in the safetensors format: 8 bytes with the length of a JSON header (little
// endian), the header (of each tensor its dtype, shape and bytes, and "__metadata__", strings),
// then the bytes, row-major. Any reader of the format opens what is written here, and PyTorch's
// files open here. https://huggingface.co/docs/safetensors
//
// A file is not trusted: what does not fit exactly is refused before anything is read.
//
// Threads: any, for const functions. Ownership: a TensorFile holds the file's bytes, mapped;
// tensors
//   that it gives are copies of the daemon's. Errors: returned. INVALID_ARGUMENT kMalformed: the
//   file is cut, damaged, or of another format, and how; NOT_FOUND kUnknownName: no such file or
//   tensor.
#ifndef CHORUS_CLIENT_NN_SAFETENSORS_H_
#define CHORUS_CLIENT_NN_SAFETENSORS_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "chorus/call_site.h"
#include "chorus/tensor.h"

namespace chorus {
namespace nn {

struct NamedTensor {
  std::string name;
  Tensor tensor;
};

// Waits for the tensors and writes them: into a file beside `path`, which takes its place when all
// of it is on the disk; so there is the old file or the new one, whatever happens. A name twice, or
// "__metadata__": INVALID_ARGUMENT kBadType. The first tensor that has failed gives its error.
absl::Status SaveTensors(const std::string& path, const std::vector<NamedTensor>& tensors,
                         const std::map<std::string, std::string>& metadata = {});

class TensorFile {
 public:
  static absl::StatusOr<TensorFile> Open(const std::string& path);
  // Of bytes in memory; errors call them `path`.
  static absl::StatusOr<TensorFile> Of(const std::string& path, std::string bytes);

  struct Entry {
    std::string name;
    DType dtype = DType::kUnspecified;
    Shape shape;
  };
  const std::vector<Entry>& entries() const;         // by name
  const Entry* Find(const std::string& name) const;  // null: there is none
  // Of entries that are by name.
  static const Entry* FindIn(const std::vector<Entry>& entries, const std::string& name);
  const std::map<std::string, std::string>& metadata() const;
  // The elements, row-major, not aligned; they live as long as this file does.
  absl::StatusOr<absl::string_view> Bytes(const std::string& name) const;
  // A copy on the device.
  absl::StatusOr<Tensor> Read(const std::string& name, const DeviceRef& device,
                              CallSite site = CallSite::Here()) const;

 private:
  struct Content;
  explicit TensorFile(std::shared_ptr<const Content> content) : content_(std::move(content)) {}

  std::shared_ptr<const Content> content_;
};

}  // namespace nn
}  // namespace chorus

#endif  // CHORUS_CLIENT_NN_SAFETENSORS_H_
