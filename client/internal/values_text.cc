#include "client/internal/values_text.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <type_traits>
#include <utility>

#include "core/tensor/half.h"

namespace chorus {
namespace internal {
namespace {

constexpr int64_t kMostWhole = 1000;  // elements that are all shown
constexpr int64_t kMostEdge = 3;      // at either end of a dimension that is not

template <typename T>
std::string NumberText(T number) {
  if constexpr (std::is_floating_point_v<T>) {
    if (std::isnan(number)) return "nan";  // of either sign
  }
  char text[32];
  return std::string(text, std::to_chars(text, text + sizeof(text), number).ptr);
}

template <typename T>
T Load(const char* at) {
  T value;
  std::memcpy(&value, at, sizeof(value));
  return value;
}

std::string ElementText(DType dtype, const char* at) {
  switch (dtype) {
    case DType::kF16:
      return NumberText(static_cast<float>(Load<F16>(at)));
    case DType::kBF16:
      return NumberText(static_cast<float>(Load<BF16>(at)));
    case DType::kF32:
      return NumberText(Load<float>(at));
    case DType::kF64:
      return NumberText(Load<double>(at));
    case DType::kI8:
      return NumberText(int{Load<int8_t>(at)});
    case DType::kU8:
      return NumberText(int{Load<uint8_t>(at)});
    case DType::kI16:
      return NumberText(Load<int16_t>(at));
    case DType::kI32:
      return NumberText(Load<int32_t>(at));
    case DType::kI64:
      return NumberText(Load<int64_t>(at));
    case DType::kBool:
      return Load<uint8_t>(at) != 0 ? "true" : "false";
    default:
      return "?";
  }
}

class Printer {
 public:
  Printer(DType dtype, const std::vector<int64_t>& shape, const char* bytes)
      : dtype_(dtype), shape_(shape), strides_(RowMajorStrides(shape)), bytes_(bytes) {
    int64_t elements = 1;
    for (const int64_t size : shape) elements *= size;
    if (elements <= kMostWhole) return;
    // Of many dimensions even the edges are many.
    for (edge_ = kMostEdge; edge_ > 1 && Shown() > kMostWhole; --edge_) {
    }
  }

  std::string Text() {
    Collect(0, 0);
    for (const std::string& element : elements_) width_ = std::max(width_, element.size());
    if (shape_.size() < 2) width_ = 0;
    Print(0);
    return std::move(text_);
  }

 private:
  bool IsCut(size_t dim) const { return edge_ > 0 && shape_[dim] > 2 * edge_; }
  int64_t Shown() const {
    int64_t shown = 1;
    for (size_t dim = 0; dim < shape_.size(); ++dim) {
      shown *= IsCut(dim) ? 2 * edge_ : shape_[dim];
    }
    return shown;
  }

  // The texts of what is shown, in order.
  void Collect(size_t dim, int64_t offset) {
    if (dim == shape_.size()) {
      elements_.push_back(ElementText(dtype_, bytes_ + offset * DTypeBytes(dtype_)));
      return;
    }
    for (int64_t i = 0; i < shape_[dim]; ++i) {
      if (IsCut(dim) && i == edge_) i = shape_[dim] - edge_;
      Collect(dim + 1, offset + i * strides_[dim]);
    }
  }

  void Print(size_t dim) {
    if (dim == shape_.size()) {
      const std::string& element = elements_[next_++];
      text_.append(width_ - std::min(width_, element.size()), ' ');
      text_ += element;
      return;
    }
    const size_t inner = shape_.size() - dim - 1;
    const std::string between =
        inner == 0 ? ", " : "," + std::string(inner, '\n') + std::string(dim + 1, ' ');
    text_ += '[';
    for (int64_t i = 0; i < shape_[dim]; ++i) {
      if (i > 0) text_ += between;
      if (IsCut(dim) && i == edge_) {
        text_ += "..." + between;
        i = shape_[dim] - edge_;
      }
      Print(dim + 1);
    }
    text_ += ']';
  }

  const DType dtype_;
  const std::vector<int64_t>& shape_;
  const std::vector<int64_t> strides_;  // in elements
  const char* const bytes_;
  int64_t edge_ = 0;  // 0: all is shown
  std::vector<std::string> elements_;
  size_t next_ = 0;
  size_t width_ = 0;
  std::string text_;
};

}  // namespace

std::string ValuesText(DType dtype, const std::vector<int64_t>& shape, const char* bytes) {
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return "[]";
  return Printer(dtype, shape, bytes).Text();
}

}  // namespace internal
}  // namespace chorus
