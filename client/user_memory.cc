#include "chorus/user_memory.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <functional>
#include <string>
#include <tuple>
#include <utility>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "absl/strings/str_cat.h"
#include "chorus/autograd.h"
#include "client/internal/access.h"
#include "client/internal/errors.h"
#include "client/internal/member.h"
#include "client/internal/record.h"
#include "client/internal/refusals.h"
#include "client/internal/session_core.h"
#include "client/internal/tape.h"
#include "client/internal/trace.h"
#include "core/base/error.h"

namespace chorus {
namespace {

using internal::AllGatherIntoTensorIn;
using internal::AllReduceIn;
using internal::CallInRuns;
using internal::CoreOf;
using internal::DeviceFrom;
using internal::ForkedError;
using internal::ImplOf;
using internal::MemberOf;
using internal::RefuseRest;
using internal::SourceOf;
using internal::TensorDataPtr;
using internal::Trace;
using internal::WithSource;

// Large beside what an all_reduce of 4 B takes, small beside the caches that the ranks share:
// docs/performance.md has the measurement.
constexpr size_t kChunkBytes = 1 << 20;
// Being copied in, being reduced, being copied out.
constexpr size_t kUnderWay = 3;
// Less than this is uploaded: that takes no memory of its own.
constexpr size_t kLeastStagedBytes = 32 << 10;
// Lengths come and go; what was used last is kept.
constexpr size_t kMostStagings = 64;

// A result this large does not fit the caches: it is written past them, so that the chunks stay.
constexpr size_t kLeastStreamedBytes = 8 << 20;

// Of a chunk. The last one of a call has another than those that go on, however long they are: so
// ranks with different counts do not take one for the other.
Shape ShapeOf(size_t length, bool is_last) {
  const auto size = static_cast<int64_t>(length);
  return is_last ? Shape{size} : Shape{1, size};
}

void CopyOut(char* to, const char* from, size_t bytes, bool streaming) {
#if defined(__SSE2__)
  constexpr size_t kLine = 64;
  if (streaming && bytes >= kLine) {
    const size_t head = (kLine - reinterpret_cast<uintptr_t>(to) % kLine) % kLine;
    std::memcpy(to, from, head);
    to += head;
    from += head;
    bytes -= head;
    for (; bytes >= kLine; bytes -= kLine, to += kLine, from += kLine) {
      const __m128i* const source = reinterpret_cast<const __m128i*>(from);
      __m128i* const target = reinterpret_cast<__m128i*>(to);
      const __m128i a = _mm_loadu_si128(source);
      const __m128i b = _mm_loadu_si128(source + 1);
      const __m128i c = _mm_loadu_si128(source + 2);
      const __m128i d = _mm_loadu_si128(source + 3);
      _mm_stream_si128(target, a);
      _mm_stream_si128(target + 1, b);
      _mm_stream_si128(target + 2, c);
      _mm_stream_si128(target + 3, d);
    }
    _mm_sfence();
  }
#else
  (void)streaming;
#endif
  std::memcpy(to, from, bytes);
}

}  // namespace

class UserMemory::Cursor {
 public:
  explicit Cursor(const std::vector<Extent>& extents) : extents_(extents) {}

  // Calls `copy` with each piece of the next `bytes`: an extent, where in it, and how many.
  template <typename Copy>
  void Pass(size_t bytes, Copy copy) {
    while (bytes > 0) {
      const Extent& extent = extents_[index_];
      const size_t length = std::min(bytes, extent.bytes - offset_);
      if (length > 0) copy(extent, offset_, length);
      bytes -= length;
      offset_ += length;
      if (offset_ == extent.bytes) {
        ++index_;
        offset_ = 0;
      }
    }
  }

 private:
  const std::vector<Extent>& extents_;
  size_t index_ = 0;
  size_t offset_ = 0;
};

std::vector<size_t> UserMemory::ChunksOf(size_t count, size_t element_bytes) {
  const size_t most = kChunkBytes / element_bytes;
  std::vector<size_t> lengths(std::max<size_t>(1, (count + most - 1) / most), most);
  lengths.back() = count - (lengths.size() - 1) * most;
  return lengths;
}

DeviceRef UserMemory::Device() const {
  return DeviceFrom(MemberOf(group_)->session, MemberOf(group_)->device_slot);
}

absl::Status UserMemory::Run(DType dtype, size_t element_bytes, const std::vector<Extent>& extents,
                             const ReduceOp& op, CallSite site) {
  if (CoreOf(group_) == nullptr) {
    return WithSource(MakeError(Reason::kWrongState, "UserMemory: a group that was never joined"),
                      SourceOf(site));
  }
  if (Trace* const trace = Trace::Current()) {
    const absl::Status refused = WithSource(
        MakeError(Reason::kWrongState,
                  "UserMemory: inside a compiled function there are no bytes; call it outside"),
        SourceOf(site));
    trace->Fail(refused);
    return refused;
  }
  if (!CoreOf(group_)->alive.load(std::memory_order_relaxed)) {
    return WithSource(
        MakeError(Reason::kWrongState, "UserMemory: the group ended when its world was reformed"),
        SourceOf(site));
  }
  // Its stagings are not mapped there.
  if (CoreOf(group_)->member->session->Forked()) return WithSource(ForkedError(), SourceOf(site));
  path_ = Path::kUpload;
  const NoGrad not_recorded;
  CallInRuns call;
  if (extents.size() > 1) {
    bool everywhere = false;
    const absl::Status agreed = AgreeOn(extents, element_bytes, &call, &everywhere, site);
    if (!agreed.ok()) {
      return everywhere ? agreed : RefuseRest(CoreOf(group_), &call, agreed);
    }
  }
  size_t total = 0;
  for (const Extent& extent : extents) total += extent.bytes;
  const bool streaming = total >= kLeastStreamedBytes;
  Cursor from(extents), to(extents);
  std::deque<UnderWay> under_way;
  absl::Status first_error;
  const auto finish_oldest = [&] {
    const absl::Status finished = Finish(&under_way.front(), streaming, &to);
    if (first_error.ok()) first_error = finished;
    under_way.pop_front();
  };
  const std::vector<size_t> lengths = ChunksOf(total / element_bytes, element_bytes);
  for (size_t i = 0; i < lengths.size(); ++i) {
    if (under_way.size() == kUnderWay) finish_oldest();
    if (first_error.ok()) {
      call.last = i + 1 == lengths.size();
      absl::StatusOr<UnderWay> chunk = Start(dtype, ShapeOf(lengths[i], call.last),
                                             lengths[i] * element_bytes, &from, op, &call, site);
      if (chunk.ok()) {
        under_way.push_back(*std::move(chunk));
        continue;
      }
      first_error = chunk.status();
    }
    // Others may wait for the chunks that this rank does not send any more, also where an epoch has
    // ended by this: they may be in the next one already, in the middle of this call.
    first_error = RefuseRest(CoreOf(group_), &call, first_error);
    break;
  }
  while (!under_way.empty()) finish_oldest();
  if (first_error.ok() || ErrorOf(first_error).reason != Reason::kMismatch) return first_error;
  // What the ranks asked for are chunks; the caller knows the whole.
  Error error = ErrorOf(first_error);
  absl::StrAppend(&error.message, "; in all this rank gives ", total / element_bytes, " elements");
  return ToStatus(error);
}

absl::StatusOr<UserMemory::UnderWay> UserMemory::Start(DType dtype, const Shape& shape,
                                                       size_t bytes, Cursor* from,
                                                       const ReduceOp& op, CallInRuns* call,
                                                       CallSite site) {
  UnderWay chunk;
  chunk.bytes = bytes;
  if (bytes >= kLeastStagedBytes && !remote_) {
    CHORUS_ASSIGN_OR_RETURN(chunk.staging, Take(dtype, shape, site));
  }
  std::string uploaded;
  if (chunk.staging == nullptr) uploaded.resize(bytes);
  char* to = chunk.staging != nullptr ? chunk.staging->data : &uploaded[0];
  from->Pass(bytes, [&to](const Extent& extent, size_t offset, size_t length) {
    std::memcpy(to, extent.in + offset, length);
    to += length;
  });
  if (chunk.staging != nullptr) {
    path_ = Path::kStaging;
    chunk.result = AllReduceIn(call, chunk.staging->tensor, group_, op, site);
  } else {
    const Tensor x = FromBytes(Device(), dtype, shape, uploaded.data(), shape.back(), site);
    chunk.result = AllReduceIn(call, x, group_, op, site);
  }
  const absl::Status status = chunk.result.status();
  if (status.ok()) return chunk;
  if (chunk.staging != nullptr) chunk.staging->taken = false;
  return status;
}

// All members' counts are equal. (Where there is one part the chunks' own shapes show it.) What
// every call pays is a hash from each; the counts themselves are asked for where hashes differ.
absl::Status UserMemory::AgreeOn(const std::vector<Extent>& extents, size_t element_bytes,
                                 CallInRuns* call, bool* everywhere, CallSite site) {
  uint64_t hash = extents.size();
  for (const Extent& extent : extents) {
    hash = (hash ^ extent.bytes) * 0x9E3779B97F4A7C15;
    hash ^= hash >> 32;
  }
  const Tensor own_hash = FromHost<int64_t>(Device(), {static_cast<int64_t>(hash)}, {1}, site);
  CHORUS_ASSIGN_OR_RETURN(const std::vector<int64_t> hashes,
                          AllGatherIntoTensorIn(call, own_hash, group_, site).Read<int64_t>());
  const auto other = std::adjacent_find(hashes.begin(), hashes.end(), std::not_equal_to<>());
  if (other == hashes.end()) return absl::OkStatus();
  const auto rank = other + 1 - hashes.begin();
  call->last = true;
  CHORUS_ASSIGN_OR_RETURN(const std::string text,
                          CountsOf(rank, extents, element_bytes, call, site));
  *everywhere = true;
  return WithSource(MakeError(Reason::kMismatch, absl::StrCat("AllReduceCoalesced of memory: rank ",
                                                              rank, " of the group gives ", text)),
                    SourceOf(site));
}

// What `rank` of the group gives where rank 0 gives something else, as text.
absl::StatusOr<std::string> UserMemory::CountsOf(int64_t rank, const std::vector<Extent>& extents,
                                                 size_t element_bytes, CallInRuns* call,
                                                 CallSite site) {
  constexpr size_t kNamed = 64;
  std::vector<int64_t> counts(1 + kNamed);
  counts[0] = static_cast<int64_t>(extents.size());
  for (size_t i = 0; i < std::min(extents.size(), kNamed); ++i) {
    counts[1 + i] = static_cast<int64_t>(extents[i].bytes / element_bytes);
  }
  const auto each = static_cast<int64_t>(counts.size());
  const Tensor own_counts = FromHost<int64_t>(Device(), counts, {each}, site);
  CHORUS_ASSIGN_OR_RETURN(const std::vector<int64_t> all,
                          AllGatherIntoTensorIn(call, own_counts, group_, site).Read<int64_t>());
  const auto expected = all.begin();
  const auto [differs, got] = std::mismatch(expected, expected + each, all.begin() + rank * each);
  const auto at = differs - expected;
  if (at == each) return absl::StrCat("other counts than rank 0 behind part ", kNamed - 1);
  if (at == 0) return absl::StrCat(*got, " parts, rank 0 gives ", *differs);
  return absl::StrCat(*got, " elements as part ", at - 1, ", rank 0 gives ", *differs);
}

absl::Status UserMemory::Finish(UnderWay* chunk, bool streaming, Cursor* to) {
  const TensorDataPtr& data = ImplOf(chunk->result)->data;
  const absl::StatusOr<bool> on_device = data->session->Wait(data, data->session->wait_timeout());
  if (chunk->staging != nullptr) {
    chunk->staging->taken = false;
    // After a timeout the run may go on, and read it: nobody writes there again.
    if (!on_device.ok()) *chunk->staging = Staging();
  }
  CHORUS_RETURN_IF_ERROR(on_device.status());
  if (chunk->bytes == 0) return absl::OkStatus();
  const auto copy_out = [&](const char* from) {
    to->Pass(chunk->bytes, [&](const Extent& extent, size_t offset, size_t length) {
      CopyOut(extent.out + offset, from, length, streaming);
      from += length;
    });
  };
  if (!remote_) {
    const absl::StatusOr<std::shared_ptr<const char>> mapped = data->session->Map(data, *on_device);
    if (mapped.ok()) copy_out(mapped->get());
    if (mapped.status().code() != absl::StatusCode::kUnimplemented) return mapped.status();
    remote_ = true;
  }
  std::string copy(chunk->bytes, '\0');
  CHORUS_RETURN_IF_ERROR(data->session->Read(data, *on_device, &copy[0]));
  copy_out(copy.data());
  return absl::OkStatus();
}

absl::StatusOr<UserMemory::Staging*> UserMemory::Take(DType dtype, const Shape& shape,
                                                      CallSite site) {
  Staging* staging = nullptr;
  Staging* oldest = nullptr;
  for (const std::unique_ptr<Staging>& one : stagings_) {
    if (one->taken) continue;
    if (one->dtype == dtype && one->shape == shape) staging = one.get();
    if (oldest == nullptr || one->last_use < oldest->last_use) oldest = one.get();
  }
  if (staging == nullptr) {
    if (stagings_.size() < kMostStagings) {
      stagings_.push_back(std::make_unique<Staging>());
      oldest = stagings_.back().get();
    }
    absl::StatusOr<std::pair<Tensor, char*>> mapped = MapBytes(Device(), dtype, shape, site);
    if (mapped.status().code() == absl::StatusCode::kUnimplemented) {
      remote_ = true;
      return nullptr;
    }
    CHORUS_RETURN_IF_ERROR(mapped.status());
    staging = oldest;
    staging->dtype = dtype;
    staging->shape = shape;
    std::tie(staging->tensor, staging->data) = *std::move(mapped);
  }
  staging->taken = true;
  staging->last_use = ++uses_;
  return staging;
}

}  // namespace chorus
