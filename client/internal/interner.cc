#include "client/internal/interner.h"

namespace chorus {
namespace internal {

TensorInfoPtr Interner::Type(const TensorType& type) {
  return types_.Get(type, [&type] {
    auto info = std::make_shared<TensorInfo>();
    info->type = type;
    info->shape = type.sizes();
    info->elements = type.num_elements();
    info->bytes = type.num_bytes();
    return info;
  });
}

const std::string* Interner::Source(const std::string& source) {
  std::unique_ptr<std::string>& entry = sources_[source];
  if (entry == nullptr) entry = std::make_unique<std::string>(source);
  return entry.get();
}

}  // namespace internal
}  // namespace chorus
