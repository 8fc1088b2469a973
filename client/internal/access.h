// The one way from the handles of the SDK to what they stand for, and back.
//
// Threads: any; plain functions. Ownership: as the handles' headers say.
// Errors: none; what a handle does not stand for is null.
#ifndef CHORUS_CLIENT_INTERNAL_ACCESS_H_
#define CHORUS_CLIENT_INTERNAL_ACCESS_H_

#include <memory>
#include <utility>

#include "chorus/session.h"
#include "chorus/tensor.h"

namespace chorus {
namespace internal {

// The friend of all handles; the functions below are for use.
class Access {
 public:
  template <typename Handle>
  static const auto& Impl(const Handle& handle) {
    return handle.impl_;
  }
  template <typename Handle>
  static const std::shared_ptr<SessionCore>& Session(const Handle& handle) {
    return handle.session_;
  }
  template <typename Handle>
  static const std::shared_ptr<MemberCore>& Member(const Handle& handle) {
    return handle.member_;
  }
  static GroupCore* Core(const Group& group) { return group.core_; }
  // Tensor::Read, into memory that is asked for when its size is known.
  static absl::Status ReadInto(const Tensor& tensor, DType dtype,
                               std::function<char*(int64_t elements)> allocate) {
    return tensor.ReadInto(dtype, std::move(allocate));
  }
  template <typename Handle, typename... Parts>
  static Handle Make(Parts&&... parts) {
    return Handle(std::forward<Parts>(parts)...);
  }
};

// Null: of no tensor.
inline const std::shared_ptr<TensorImpl>& ImplOf(const Tensor& tensor) {
  return Access::Impl(tensor);
}
// Null: of none.
inline const std::shared_ptr<SessionCore>& SessionOf(const Session& session) {
  return Access::Session(session);
}
inline const std::shared_ptr<SessionCore>& SessionOf(const DeviceRef& device) {
  return Access::Session(device);
}
// Null: never joined.
inline const std::shared_ptr<MemberCore>& MemberOf(const World& world) {
  return Access::Member(world);
}
inline const std::shared_ptr<MemberCore>& MemberOf(const Group& group) {
  return Access::Member(group);
}
inline GroupCore* CoreOf(const Group& group) { return Access::Core(group); }

inline Session SessionFrom(std::shared_ptr<SessionCore> core) {
  return Access::Make<Session>(std::move(core));
}
inline DeviceRef DeviceFrom(std::shared_ptr<SessionCore> session, int slot) {
  return Access::Make<DeviceRef>(std::move(session), slot);
}
inline World WorldFrom(std::shared_ptr<MemberCore> member) {
  return Access::Make<World>(std::move(member));
}
inline Group GroupFrom(std::shared_ptr<MemberCore> member, GroupCore* core) {
  return Access::Make<Group>(std::move(member), core);
}
inline Tensor TensorFrom(std::shared_ptr<TensorImpl> impl) {
  return Access::Make<Tensor>(std::move(impl));
}

}  // namespace internal
}  // namespace chorus

#endif  // CHORUS_CLIENT_INTERNAL_ACCESS_H_
