#include "client/internal/interner.h"

#include <iterator>

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

OriginsPtr Interner::Set(const Origins& set) {
  return origin_sets_.Get(set, [&set] { return std::make_shared<const Origins>(set); });
}

void Interner::Unite(OriginsPtr* both, const Origins& other,
                     absl::FunctionRef<Sequence()> oldest_run) {
  Origins united;
  std::set_union((*both)->begin(), (*both)->end(), other.begin(), other.end(),
                 std::back_inserter(united),
                 [](const OriginPtr& a, const OriginPtr& b) { return a->id < b->id; });
  if (united.size() > kMaxOrigins) {
    const Sequence oldest = oldest_run();
    united.erase(std::remove_if(united.begin(), united.end(),
                                [oldest](const OriginPtr& origin) ABSL_EXCLUSIVE_LOCKS_REQUIRED(
                                    session_lock) { return origin->last < oldest; }),
                 united.end());
  }
  *both = united.empty() ? nullptr : Set(united);
}

const std::string* Interner::Source(const std::string& source) {
  std::unique_ptr<std::string>& entry = sources_[source];
  if (entry == nullptr) entry = std::make_unique<std::string>(source);
  return entry.get();
}

}  // namespace internal
}  // namespace chorus
