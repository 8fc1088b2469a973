#include "chorus/functional/shape.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <numeric>

#include "absl/numeric/int128.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "chorus/functional/math.h"
#include "client/internal/access.h"
#include "client/internal/errors.h"
#include "client/internal/local.h"
#include "client/internal/record.h"
#include "client/internal/tape.h"
#include "core/base/error.h"

namespace chorus {
namespace {

using internal::ApplyLocal;
using internal::Axis;
using internal::CheckDevice;
using internal::CheckNumber;
using internal::Fail;
using internal::FailedTensor;
using internal::InFunction;
using internal::IsUsable;
using internal::NumberLike;
using internal::SessionOf;
using internal::SourceOf;
using internal::Spec;
using internal::TextOf;
using internal::TypeText;
using internal::WithSource;

int64_t ElementsOf(const Shape& shape) {
  int64_t elements = 1;
  for (const int64_t size : shape) elements *= size;
  return elements;
}

// An axis of what has one dimension more than a usable x, counted from the front.
absl::StatusOr<int64_t> NewAxis(const char* name, const Tensor& x, int64_t axis) {
  const int64_t rank = static_cast<int64_t>(x.shape().size()) + 1;
  if (axis < -rank || axis >= rank) {
    return BadType(absl::StrCat(name, ": expected an axis from ", -rank, " to ", rank - 1, " of ",
                                TypeText(x), " and one dimension more, got ", axis));
  }
  return axis < 0 ? axis + rank : axis;
}

// --- Apart and together -------------------------------------------------------------------------

constexpr int64_t kMaxChunks = 65536;

// Where one of them went wrong.
std::vector<Tensor> All(size_t count, const Tensor& failed) {
  return std::vector<Tensor>(std::max<size_t>(count, 1), failed);
}

// Slices one after the other, of sizes that fit, one at least. A slice's gradient is as large as
// what it was cut out of: many are cut out of quarters, for else all of them together would take
// that times their number.
void Cut(const Tensor& x, absl::Span<const int64_t> sizes, int64_t axis, CallSite site,
         std::vector<Tensor>* pieces) {
  const size_t parts = std::min<size_t>(sizes.size(), 4);
  int64_t begin = 0;
  for (size_t i = 0; i < parts; ++i) {
    const size_t first = sizes.size() * i / parts;
    const auto part = sizes.subspan(first, sizes.size() * (i + 1) / parts - first);
    const int64_t end = std::accumulate(part.begin(), part.end(), begin);
    const Tensor piece = Slice(x, axis, begin, end, site);
    if (part.size() == 1) {
      pieces->push_back(piece);
    } else {
      Cut(piece, part, axis, site, pieces);
    }
    begin = end;
  }
}
std::vector<Tensor> Cut(const Tensor& x, const std::vector<int64_t>& sizes, int64_t axis,
                        CallSite site) {
  std::vector<Tensor> pieces;
  Cut(x, sizes, axis, site, &pieces);
  return pieces;
}

// `whole` in pieces of `size`, one at least.
std::vector<int64_t> PieceSizes(int64_t whole, int64_t size) {
  std::vector<int64_t> sizes;
  for (int64_t left = whole; left > 0; left -= size) sizes.push_back(std::min(size, left));
  if (sizes.empty()) sizes.push_back(0);
  return sizes;
}

}  // namespace

std::vector<Tensor> Split(const Tensor& x, int64_t size, int64_t axis, CallSite site) {
  if (!IsUsable(x)) return {ApplyLocal(Spec("Split", site), {x})};
  const absl::StatusOr<int64_t> checked = Axis("Split", x, axis);
  if (!checked.ok()) return {Fail(x, checked.status(), site)};
  if (size < 1) {
    return {Fail(x,
                 BadType(absl::StrCat("Split: expected pieces of 1 or more of ", TypeText(x),
                                      ", got ", size)),
                 site)};
  }
  return Cut(x, PieceSizes(x.shape()[static_cast<size_t>(*checked)], size), *checked, site);
}

std::vector<Tensor> Split(const Tensor& x, const std::vector<int64_t>& sizes, int64_t axis,
                          CallSite site) {
  if (!IsUsable(x)) return All(sizes.size(), ApplyLocal(Spec("Split", site), {x}));
  const absl::StatusOr<int64_t> checked = Axis("Split", x, axis);
  if (!checked.ok()) return All(sizes.size(), Fail(x, checked.status(), site));
  const int64_t whole = x.shape()[static_cast<size_t>(*checked)];
  int64_t left = whole;
  bool fit = !sizes.empty();
  for (const int64_t size : sizes) {
    fit = fit && size >= 0 && size <= left;
    if (fit) left -= size;
  }
  if (fit && left == 0) return Cut(x, sizes, *checked, site);
  const absl::Status error = BadType(absl::StrCat("Split: expected sizes that add up to the ",
                                                  whole, " of axis ", *checked, " of ", TypeText(x),
                                                  ", got [", absl::StrJoin(sizes, ","), "]"));
  return All(sizes.size(), Fail(x, error, site));
}

std::vector<Tensor> Split(const Tensor& x, std::initializer_list<int64_t> sizes, int64_t axis,
                          CallSite site) {
  return Split(x, std::vector<int64_t>(sizes), axis, site);
}

std::vector<Tensor> Chunk(const Tensor& x, int64_t count, int64_t axis, CallSite site) {
  const bool sound = count >= 1 && count <= kMaxChunks;
  const size_t results = sound ? static_cast<size_t>(count) : 1;
  if (!IsUsable(x)) return All(results, ApplyLocal(Spec("Chunk", site), {x}));
  const absl::StatusOr<int64_t> checked = Axis("Chunk", x, axis);
  if (!checked.ok()) return All(results, Fail(x, checked.status(), site));
  if (!sound) {
    return {Fail(x,
                 BadType(absl::StrCat("Chunk: expected a count from 1 to ", kMaxChunks, " for ",
                                      TypeText(x), ", got ", count)),
                 site)};
  }
  const int64_t whole = x.shape()[static_cast<size_t>(*checked)];
  if (whole == 0) return Cut(x, std::vector<int64_t>(results, 0), *checked, site);
  return Cut(x, PieceSizes(whole, (whole + count - 1) / count), *checked, site);
}

Tensor Stack(const std::vector<Tensor>& xs, int64_t axis, CallSite site) {
  if (xs.empty()) return ApplyLocal(Spec("Stack", site), {});
  for (const Tensor& x : xs) {
    if (!IsUsable(x)) return ApplyLocal(Spec("Stack", site), xs);
  }
  const absl::StatusOr<int64_t> checked = NewAxis("Stack", xs[0], axis);
  if (!checked.ok()) return Fail(xs[0], checked.status(), site);
  std::vector<Tensor> layers;
  for (size_t i = 0; i < xs.size(); ++i) {
    if (xs[i].dtype() != xs[0].dtype() || xs[i].shape() != xs[0].shape()) {
      return Fail(xs[0],
                  BadType(absl::StrCat("Stack: expected tensors of one type, got ", TypeText(xs[0]),
                                       " and ", TypeText(xs[i]), " as input ", i)),
                  site);
    }
    layers.push_back(Unsqueeze(xs[i], *checked, site));
  }
  return Concat(layers, *checked, site);
}

// --- Shapes -------------------------------------------------------------------------------------

Tensor Squeeze(const Tensor& x, const Axes& axes, CallSite site) {
  if (!IsUsable(x)) return ApplyLocal(Spec("Squeeze", site), {x});
  std::vector<bool> goes(x.shape().size());
  for (size_t i = 0; i < goes.size(); ++i) goes[i] = axes.all() && x.shape()[i] == 1;
  for (const int64_t axis : axes.list()) {
    const absl::StatusOr<int64_t> checked = Axis("Squeeze", x, axis);
    if (!checked.ok()) return Fail(x, checked.status(), site);
    const size_t i = static_cast<size_t>(*checked);
    if (x.shape()[i] != 1) {
      return Fail(x,
                  BadType(absl::StrCat("Squeeze: expected axes of size 1, got axis ", axis, " of ",
                                       TypeText(x))),
                  site);
    }
    goes[i] = true;
  }
  Shape shape;
  for (size_t i = 0; i < goes.size(); ++i) {
    if (!goes[i]) shape.push_back(x.shape()[i]);
  }
  return Reshape(x, shape, site);
}

Tensor Unsqueeze(const Tensor& x, int64_t axis, CallSite site) {
  if (!IsUsable(x)) return ApplyLocal(Spec("Unsqueeze", site), {x});
  const absl::StatusOr<int64_t> checked = NewAxis("Unsqueeze", x, axis);
  if (!checked.ok()) return Fail(x, checked.status(), site);
  Shape shape = x.shape();
  shape.insert(shape.begin() + *checked, 1);
  return Reshape(x, shape, site);
}

Tensor Flatten(const Tensor& x, int64_t begin, int64_t end, CallSite site) {
  if (!IsUsable(x)) return ApplyLocal(Spec("Flatten", site), {x});
  const Tensor of = x.shape().empty() ? Reshape(x, {1}, site) : x;
  if (!IsUsable(of)) return of;
  const absl::StatusOr<int64_t> first = Axis("Flatten", of, begin);
  if (!first.ok()) return Fail(x, first.status(), site);
  const absl::StatusOr<int64_t> last = Axis("Flatten", of, end);
  if (!last.ok()) return Fail(x, last.status(), site);
  if (*last < *first) {
    return Fail(x,
                BadType(absl::StrCat("Flatten: expected axes in order of ", TypeText(x), ", got ",
                                     begin, " and ", end)),
                site);
  }
  const auto from = of.shape().begin() + *first;
  const auto to = of.shape().begin() + *last + 1;
  Shape shape(of.shape().begin(), from);
  shape.push_back(ElementsOf(Shape(from, to)));
  shape.insert(shape.end(), to, of.shape().end());
  return Reshape(of, shape, site);
}

Tensor Pad(const Tensor& x, const std::vector<std::pair<int64_t, int64_t>>& widths,
           const Number& value, CallSite site) {
  if (!IsUsable(x)) return ApplyLocal(Spec("Pad", site), {x});
  const auto wrong = [&](absl::string_view expected, const auto&... got) {
    return Fail(
        x,
        BadType(absl::StrCat("Pad: expected ", expected, " for ", TypeText(x), ", got ", got...)),
        site);
  };
  if (widths.size() != x.shape().size()) {
    return wrong(absl::StrCat(x.shape().size(), " pairs of widths"), widths.size());
  }
  const absl::Status number = CheckNumber(x.dtype(), value);
  if (!number.ok()) return wrong("a value of its dtype", value.value());
  Tensor y = Reshape(x, x.shape(), site);
  if (!IsUsable(y)) return y;
  for (size_t i = 0; i < widths.size(); ++i) {
    const auto [before, after] = widths[i];
    if (std::min(before, after) < 0 || std::max(before, after) > kMaxValueBytes) {
      return wrong(absl::StrCat("widths from 0 to ", kMaxValueBytes), before, " and ", after,
                   " for axis ", i);
    }
    if (before == 0 && after == 0) continue;
    const int64_t axis = static_cast<int64_t>(i);
    if (value.value() == 0 && !std::signbit(value.value())) {
      y = ApplyLocal(Spec("pad", site, {{"after", after}, {"axis", axis}, {"before", before}}),
                     {y});
      continue;
    }
    const auto block = [&](int64_t width) {
      Shape shape = y.shape();
      shape[i] = width;
      return Expand(NumberLike(value, x, site), shape, site);
    };
    std::vector<Tensor> parts;
    if (before > 0) parts.push_back(block(before));
    parts.push_back(y);
    if (after > 0) parts.push_back(block(after));
    y = Concat(parts, axis, site);
    if (!IsUsable(y)) return y;
  }
  return y;
}

// --- Counted out --------------------------------------------------------------------------------

namespace {

// 0, 1, ... n - 1, by doubling what there is.
Tensor Counted(const DeviceRef& device, int64_t n, CallSite site) {
  Tensor x = Zeros(device, DType::kI64, {std::min<int64_t>(n, 1)}, site);
  for (int64_t size = 1; size < n; size *= 2) {
    const Operand next(static_cast<double>(size), site);
    const int64_t count = std::min(size, n - size);
    const Tensor low = count < size ? Slice(x, 0, 0, count, site) : x;
    x = Concat({x, Operand(low, site) + next}, 0, site);
  }
  return x;
}

// How many numbers come before `end`.
double CountTo(const Number& begin, const Number& end, const Number& step) {
  if (begin.is_whole() && end.is_whole() && step.is_whole()) {
    const absl::int128 way = absl::int128(end.whole()) - begin.whole();
    const absl::int128 whole_steps = way / step.whole();
    const bool is_more = whole_steps * step.whole() != way && (way < 0) == (step.whole() < 0);
    return static_cast<double>(std::max<absl::int128>(whole_steps + (is_more ? 1 : 0), 0));
  }
  return std::max(std::ceil((end.value() - begin.value()) / step.value()), 0.0);
}

Number NumberAt(const Number& begin, const Number& step, int64_t index) {
  if (begin.is_whole() && step.is_whole()) {
    const absl::int128 at = begin.whole() + absl::int128(index) * step.whole();
    if (at == static_cast<int64_t>(at)) return static_cast<int64_t>(at);
  }
  return begin.value() + static_cast<double>(index) * step.value();
}

}  // namespace

Tensor Arange(const DeviceRef& device, DType dtype, const Number& begin, const Number& end,
              const Number& step, CallSite site) {
  const auto wrong = [&](absl::string_view expected, const auto&... got) {
    const absl::Status error =
        BadType(absl::StrCat("Arange: expected ", expected, ", got ", got...));
    return FailedTensor(SessionOf(device), WithSource(error, SourceOf(site)));
  };
  if (SessionOf(device) == nullptr) return wrong("a device of a session", "none");
  const absl::Status of_session = CheckDevice("Arange", device);
  if (!of_session.ok()) {
    return FailedTensor(SessionOf(device), WithSource(of_session, SourceOf(site)));
  }
  if (!Contains(kNumberDTypes, dtype)) return wrong("a dtype of numbers", DTypeName(dtype));
  if (!std::isfinite(begin.value()) || !std::isfinite(end.value()) ||
      !std::isfinite(step.value()) || step.value() == 0) {
    return wrong("finite numbers and a step other than 0", TextOf(begin), ", ", TextOf(end),
                 " and step ", TextOf(step));
  }
  const double count = CountTo(begin, end, step);
  if (!(count * static_cast<double>(DTypeBytes(DType::kI64)) <= kMaxValueBytes)) {
    return wrong(absl::StrCat("at most ", kMaxValueBytes / DTypeBytes(DType::kI64), " elements"),
                 count);
  }
  if (!IsFloating(dtype)) {
    const double size = step.value();
    if (size != std::trunc(size)) return wrong("a whole step", size);
    const Number last =
        NumberAt(begin, step, std::max<int64_t>(static_cast<int64_t>(count) - 1, 0));
    for (const Number& number : {begin, last}) {
      if (CheckNumber(dtype, number).ok()) continue;
      return wrong(absl::StrCat("whole numbers that ", DTypeName(dtype), " has"), TextOf(number));
    }
  }
  Tensor x = Counted(device, static_cast<int64_t>(count), site);
  if (IsFloating(dtype)) x = Cast(x, DType::kF64, site);
  if (step.value() != 1) x *= Operand(step, site);
  if (begin.value() != 0) x += Operand(begin, site);
  return x.dtype() == dtype ? x : Cast(x, dtype, site);
}

// --- By name ------------------------------------------------------------------------------------

namespace {

// A letter for each axis of an operand, or of the result.
using Labels = std::string;

// A tensor, and which label each of its axes has.
struct Labelled {
  Labels labels;
  Tensor x;
};

bool Has(const Labels& labels, char label) { return labels.find(label) != Labels::npos; }

// Those of `labels` that are in `others`, or are not.
Labels Those(const Labels& labels, const Labels& others, bool in = true) {
  Labels result;
  for (const char label : labels) {
    if (Has(others, label) == in) result += label;
  }
  return result;
}

// Axes in the order of `labels`, which are those of `term`.
Labelled InOrder(const Labelled& term, const Labels& labels, CallSite site) {
  if (labels == term.labels || !IsUsable(term.x)) return term;
  std::vector<int64_t> permutation;
  for (const char label : labels) {
    permutation.push_back(static_cast<int64_t>(term.labels.find(label)));
  }
  return {labels, Transpose(term.x, permutation, site)};
}

// The first label that stands twice; npos where none does.
size_t FirstTwice(const Labels& labels) {
  for (size_t i = 0; i < labels.size(); ++i) {
    if (labels.find(labels[i], i + 1) != Labels::npos) return i;
  }
  return Labels::npos;
}

// Where a label stands twice, the elements with equal indices there.
Labelled Diagonals(Labelled term, CallSite site) {
  for (size_t i = FirstTwice(term.labels); i != Labels::npos; i = FirstTwice(term.labels)) {
    const char label = term.labels[i];
    const size_t j = term.labels.find(label, i + 1);
    std::vector<int64_t> permutation;
    Labels labels;
    Shape shape;
    for (size_t k = 0; k < term.labels.size(); ++k) {
      if (k == i || k == j) continue;
      permutation.push_back(static_cast<int64_t>(k));
      labels += term.labels[k];
      shape.push_back(term.x.shape()[k]);
    }
    permutation.push_back(static_cast<int64_t>(i));
    permutation.push_back(static_cast<int64_t>(j));
    const int64_t last = static_cast<int64_t>(shape.size());
    const int64_t size = term.x.shape()[i];
    // In rows of one element more, the diagonal is the first column.
    shape.push_back(size * size);
    Tensor x = Reshape(Transpose(term.x, permutation, site), shape, site);
    x = ApplyLocal(Spec("pad", site, {{"after", size}, {"axis", last}, {"before", int64_t{0}}}),
                   {x});
    shape.back() = size;
    shape.push_back(size + 1);
    x = Slice(Reshape(x, shape, site), last + 1, 0, 1, site);
    shape.pop_back();
    x = Reshape(x, shape, site);
    if (!IsUsable(x)) return {"", x};
    term = {labels + label, x};
  }
  return term;
}

// Without axes that neither the result nor another operand has.
Labelled WithoutOthers(const Labelled& term, const Labels& wanted, CallSite site) {
  std::vector<int64_t> axes;
  for (size_t i = 0; i < term.labels.size(); ++i) {
    if (!Has(wanted, term.labels[i])) axes.push_back(static_cast<int64_t>(i));
  }
  if (axes.empty() || !IsUsable(term.x)) return term;
  return {Those(term.labels, wanted), Sum(term.x, axes, false, site)};
}

class Equation {
 public:
  Equation(const std::string& text, CallSite site) : text_(text), site_(site) {}

  absl::Status Parse() {
    std::string bare = text_;
    bare.erase(std::remove(bare.begin(), bare.end(), ' '), bare.end());
    const size_t arrow = bare.find("->");
    const std::string inputs = bare.substr(0, arrow);
    terms_ = absl::StrSplit(inputs, ',');
    const std::string output = arrow == std::string::npos ? "" : bare.substr(arrow + 2);
    std::string all = absl::StrJoin(terms_, "");
    for (const char label : all + output) {
      if (!absl::ascii_isalpha(static_cast<unsigned char>(label))) {
        return Wrong("letters, commas and one \"->\"",
                     absl::StrCat("'", Printable({&label, 1}), "'"));
      }
    }
    if (arrow == std::string::npos) {
      std::sort(all.begin(), all.end());
      for (const char label : all) {
        if (std::count(all.begin(), all.end(), label) == 1) output_ += label;
      }
      return absl::OkStatus();
    }
    for (const char label : output) {
      if (!Has(all, label)) return Wrong("a result of labels of the operands", Quoted(label));
      if (Has(output_, label)) {
        return Wrong("each label once in the result", absl::StrCat(Quoted(label), " twice"));
      }
      output_ += label;
    }
    return absl::OkStatus();
  }

  // That these operands are what it says.
  absl::Status Check(const std::vector<Tensor>& operands) const {
    if (operands.empty() || operands.size() > 2) {
      return Wrong("one operand or two", absl::StrCat(operands.size()));
    }
    if (operands.size() != terms_.size()) {
      return Wrong(absl::StrCat(terms_.size(), " operands"), absl::StrCat(operands.size()));
    }
    if (operands[0].dtype() != operands.back().dtype()) {
      return Wrong("operands of one dtype",
                   absl::StrCat(TypeText(operands[0]), " and ", TypeText(operands.back())));
    }
    std::array<int64_t, 128> sizes;
    sizes.fill(-1);
    for (size_t i = 0; i < terms_.size(); ++i) {
      const Shape& shape = operands[i].shape();
      if (shape.size() != terms_[i].size()) {
        return Wrong(absl::StrCat(terms_[i].size(), " dimensions of operand ", i),
                     TypeText(operands[i]));
      }
      for (size_t k = 0; k < shape.size(); ++k) {
        int64_t& size = sizes[static_cast<size_t>(terms_[i][k])];
        if (size >= 0 && size != shape[k]) {
          return Wrong(absl::StrCat("size ", size, " along ", Quoted(terms_[i][k])),
                       absl::StrCat(shape[k], " in operand ", i, ", ", TypeText(operands[i])));
        }
        size = shape[k];
      }
    }
    return absl::OkStatus();
  }

  Tensor Of(const std::vector<Tensor>& operands) const {
    Labelled a = Diagonals({terms_[0], operands[0]}, site_);
    if (operands.size() == 1) {
      a = InOrder(WithoutOthers(a, output_, site_), output_, site_);
      return IsUsable(a.x) ? Reshape(a.x, a.x.shape(), site_) : a.x;
    }
    Labelled b = Diagonals({terms_[1], operands[1]}, site_);
    a = WithoutOthers(a, output_ + b.labels, site_);
    b = WithoutOthers(b, output_ + a.labels, site_);
    const Labels both = Those(a.labels, b.labels);
    const Labels batch = Those(both, output_);
    const Labels summed = Those(both, output_, /*in=*/false);
    const Labels of_a = Those(a.labels, both, /*in=*/false);
    const Labels of_b = Those(b.labels, both, /*in=*/false);
    a = InOrder(a, batch + of_a + summed, site_);
    b = InOrder(b, batch + summed + of_b, site_);
    for (const Tensor& x : {a.x, b.x}) {
      if (!IsUsable(x)) return x;
    }
    const auto sizes = [](const Labelled& term, size_t begin, size_t count) {
      const auto first = term.x.shape().begin() + static_cast<std::ptrdiff_t>(begin);
      return Shape(first, first + static_cast<std::ptrdiff_t>(count));
    };
    const Shape common = sizes(a, 0, batch.size());
    const Shape rows = sizes(a, batch.size(), of_a.size());
    const Shape columns = sizes(b, batch.size() + summed.size(), of_b.size());
    const auto join = [](Shape shape, const Shape& tail) {
      shape.insert(shape.end(), tail.begin(), tail.end());
      return shape;
    };
    const Shape shape = join(join(common, rows), columns);
    Tensor y;
    if (summed.empty()) {
      y = Mul(Reshape(a.x, join(join(common, rows), Shape(columns.size(), 1)), site_),
              Reshape(b.x, join(join(common, Shape(rows.size(), 1)), columns), site_), site_);
    } else {
      const int64_t depth = ElementsOf(sizes(a, batch.size() + of_a.size(), summed.size()));
      y = MatMul(Reshape(a.x, join(common, {ElementsOf(rows), depth}), site_),
                 Reshape(b.x, join(common, {depth, ElementsOf(columns)}), site_), site_);
      y = Reshape(y, shape, site_);
    }
    return InOrder({batch + of_a + of_b, y}, output_, site_).x;
  }

  std::string Name() const { return absl::StrCat("Einsum \"", Printable(text_), "\""); }

 private:
  static std::string Quoted(char label) { return absl::StrCat("'", std::string(1, label), "'"); }
  absl::Status Wrong(absl::string_view expected, absl::string_view got) const {
    return BadType(absl::StrCat(Name(), ": expected ", expected, ", got ", got));
  }

  const std::string& text_;
  const CallSite site_;
  std::vector<Labels> terms_;
  Labels output_;
};

}  // namespace

Tensor Einsum(const std::string& equation, const std::vector<Tensor>& operands, CallSite site) {
  for (const Tensor& x : operands) {
    if (!IsUsable(x)) return ApplyLocal(Spec("Einsum", site), operands);
  }
  Equation parsed(equation, site);
  absl::Status status = parsed.Parse();
  if (status.ok()) status = parsed.Check(operands);
  const Tensor like = operands.empty() ? Tensor() : operands[0];
  if (!status.ok()) return Fail(like, status, site);
  const Tensor y = parsed.Of(operands);
  return y.status().ok() ? y : Fail(like, InFunction(parsed.Name(), y.status()), site);
}

}  // namespace chorus
