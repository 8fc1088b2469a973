#include "client/internal/tensor_data.h"

namespace chorus {
namespace internal {

TensorData::~TensorData() {
  const State s = state.load(std::memory_order_acquire);
  if (s != State::kSent && s != State::kExternal) return;
  if (s == State::kExternal) {
    releases->Add(external.arena);
  } else {
    releases->Add(id, info->bytes);
  }
  releases->DrainIfUrgent();
}

Binding TensorData::binding() const {
  switch (state.load(std::memory_order_relaxed)) {
    case State::kInline:
    case State::kHost:
      return inline_data;
    case State::kExternal:
      return external;
    default:
      return id;
  }
}

}  // namespace internal
}  // namespace chorus
