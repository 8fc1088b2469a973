#include "core/ops/slice/slice_host.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "core/base/error.h"
#include "core/ops/host_indices.h"

namespace chorus {
namespace {

// A part of each row of the result, in bytes; it has some.
struct Segment {
  int input = -1;      // -1: zeros
  int64_t row = 0;     // from one row of the input to the next
  int64_t offset = 0;  // within the input's row
  int64_t size = 0;
};

// Those of `all` that have bytes. Of the others there may be very many, and a zero-sized buffer may
// be null, which memcpy does not take even for nothing.
std::vector<Segment> NotEmpty(std::vector<Segment> all) {
  all.erase(std::remove_if(all.begin(), all.end(),
                           [](const Segment& segment) { return segment.size == 0; }),
            all.end());
  return all;
}

class RowSegments : public HostKernel {
 public:
  // `segments` as NotEmpty() leaves them.
  RowSegments(int64_t rows, int64_t row_size, std::vector<Segment> segments)
      : HostKernel(row_size == 0 ? 0 : rows,
                   2 * row_size + kSegmentCost * static_cast<int64_t>(segments.size())),
        row_size_(row_size),
        segments_(std::move(segments)) {}

  absl::Status Run(const HostBuffers& buffers, int64_t begin, int64_t end) const override {
    char* out = static_cast<char*>(buffers.outputs[0]) + begin * row_size_;
    for (int64_t row = begin; row < end; ++row) {
      for (const Segment& segment : segments_) {
        if (segment.input < 0) {
          std::memset(out, 0, static_cast<size_t>(segment.size));
        } else {
          std::memcpy(out,
                      static_cast<const char*>(buffers.inputs[segment.input]) + row * segment.row +
                          segment.offset,
                      static_cast<size_t>(segment.size));
        }
        out += segment.size;
      }
    }
    return absl::OkStatus();
  }

 private:
  static constexpr int64_t kSegmentCost = 32;  // beside its bytes

  const int64_t row_size_;
  const std::vector<Segment> segments_;
};

// A tensor as rows along an axis.
struct Rows {
  Rows(const TensorType& type, int64_t axis) {
    for (int64_t d = 0; d < axis; ++d) count *= type.dims[d].size;
    step = DTypeBytes(type.dtype);
    for (size_t d = axis + 1; d < type.dims.size(); ++d) step *= type.dims[d].size;
    size = step * type.dims[axis].size;
  }
  int64_t count = 1;
  int64_t step = 0;  // bytes of one index of the axis
  int64_t size = 0;  // bytes of a row
};

HostKernelOrError MakeSlice(const NodeView& node, absl::Span<const TensorType> outputs) {
  const int64_t axis = IntAttribute(node.attributes, "axis");
  const Rows in(node.input(0), axis);
  const Rows out(outputs[0], axis);
  return std::make_unique<RowSegments>(
      out.count, out.size,
      NotEmpty({{0, in.size, IntAttribute(node.attributes, "begin") * in.step, out.size}}));
}

HostKernelOrError MakePad(const NodeView& node, absl::Span<const TensorType> outputs) {
  const int64_t axis = IntAttribute(node.attributes, "axis");
  const Rows in(node.input(0), axis);
  const Rows out(outputs[0], axis);
  return std::make_unique<RowSegments>(
      out.count, out.size,
      NotEmpty({{-1, 0, 0, IntAttribute(node.attributes, "before") * in.step},
                {0, in.size, 0, in.size},
                {-1, 0, 0, IntAttribute(node.attributes, "after") * in.step}}));
}

HostKernelOrError MakeConcat(const NodeView& node, absl::Span<const TensorType> outputs) {
  const int64_t axis = IntAttribute(node.attributes, "axis");
  const Rows out(outputs[0], axis);
  std::vector<Segment> segments;
  for (int i = 0; i < node.num_inputs(); ++i) {
    const Rows in(node.input(i), axis);
    segments.push_back({i, in.size, 0, in.size});
  }
  return std::make_unique<RowSegments>(out.count, out.size, NotEmpty(std::move(segments)));
}

// pack_rows and unpack_rows. A unit is a row of the result.
class PackedRows : public HostKernel {
 public:
  PackedRows(const NodeView& node, bool packs)
      : HostKernel(Rows(node.input(0), 0).step == 0 ? 0 : node.input(0).dims[0].size,
                   2 * Rows(node.input(0), 0).step),
        row_(Rows(node.input(0), 0).step),
        rows_(node.input(0).dims[0].size / IntAttribute(node.attributes, "parts")),
        end_(node.input(0).dims[0].size),
        packs_(packs),
        count_(node, 1, rows_ + 1) {}

  absl::Status Run(const HostBuffers& buffers, int64_t begin, int64_t end) const override {
    const int64_t count = count_.At(buffers.inputs[1], 0);
    if (!count_.IsWithin(count)) return count_.OutOfRange(0, count);
    for (int64_t to = begin; to < end; ++to) {
      char* const out = static_cast<char*>(buffers.outputs[0]) + to * row_;
      const int64_t from = packs_ ? Unpacked(to, count) : Packed(to, count);
      if (from < 0) {
        std::memset(out, 0, static_cast<size_t>(row_));
      } else {
        std::memcpy(out, static_cast<const char*>(buffers.inputs[0]) + from * row_,
                    static_cast<size_t>(row_));
      }
    }
    return absl::OkStatus();
  }

 private:
  // Where the row of that index stands in the other form; -1: nowhere.
  int64_t Unpacked(int64_t packed, int64_t count) const {
    if (count == 0 || packed >= end_ / rows_ * count) return -1;
    return packed / count * rows_ + packed % count;
  }
  int64_t Packed(int64_t unpacked, int64_t count) const {
    const int64_t row = unpacked % rows_;
    return row < count ? unpacked / rows_ * count + row : -1;
  }

  const int64_t row_;   // bytes
  const int64_t rows_;  // of each part
  const int64_t end_;   // rows of all
  const bool packs_;
  const HostIndices count_;
};

HostKernelOrError MakePackRows(const NodeView& node, absl::Span<const TensorType>) {
  return std::make_unique<PackedRows>(node, /*packs=*/true);
}

HostKernelOrError MakeUnpackRows(const NodeView& node, absl::Span<const TensorType>) {
  return std::make_unique<PackedRows>(node, /*packs=*/false);
}

constexpr HostKernelEntry kEntries[] = {{"concat", MakeConcat},
                                        {"pack_rows", MakePackRows},
                                        {"pad", MakePad},
                                        {"slice", MakeSlice},
                                        {"unpack_rows", MakeUnpackRows}};

}  // namespace

absl::Span<const HostKernelEntry> SliceHostKernels() { return kEntries; }

}  // namespace chorus
