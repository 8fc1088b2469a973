#include "examples/05_trainer/plot.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"

namespace trainer {
namespace {

struct Range {
  double low = 0;
  double high = 1;
  double At(double value) const { return (value - low) / (high - low); }
};

Range RangeOf(const std::vector<double>& values) {
  Range range;
  bool any = false;
  for (const double v : values) {
    if (!std::isfinite(v)) continue;
    range.low = any ? std::min(range.low, v) : v;
    range.high = any ? std::max(range.high, v) : v;
    any = true;
  }
  if (!any) return Range();
  if (range.high == range.low) range.high = range.low + 1;
  return range;
}

std::string Escaped(const std::string& text) {
  return absl::StrReplaceAll(text, {{"&", "&amp;"}, {"<", "&lt;"}, {">", "&gt;"}});
}

}  // namespace

std::string SvgPlot(const std::vector<Curve>& curves) {
  constexpr double kWidth = 720, kHeight = 240, kLeft = 70, kRight = 20, kTop = 30, kBottom = 30;
  const double inner_width = kWidth - kLeft - kRight;
  const double inner_height = kHeight - kTop - kBottom;
  std::string svg = absl::StrFormat(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%g\" height=\"%g\" "
      "font-family=\"sans-serif\" font-size=\"12\">\n"
      "<rect width=\"100%%\" height=\"100%%\" fill=\"white\"/>\n",
      kWidth, kHeight * static_cast<double>(curves.size()));
  for (size_t c = 0; c < curves.size(); ++c) {
    const Curve& curve = curves[c];
    const double top = kHeight * static_cast<double>(c) + kTop;
    const Range x = RangeOf(curve.x);
    const Range y = RangeOf(curve.y);
    absl::StrAppendFormat(&svg, "<text x=\"%g\" y=\"%g\">%s</text>\n", kLeft, top - 10,
                          Escaped(curve.name));
    absl::StrAppendFormat(
        &svg,
        "<rect x=\"%g\" y=\"%g\" width=\"%g\" height=\"%g\" fill=\"none\" stroke=\"gray\"/>\n",
        kLeft, top, inner_width, inner_height);
    for (const double part : {0.0, 0.5, 1.0}) {
      absl::StrAppendFormat(&svg, "<text x=\"%g\" y=\"%g\" text-anchor=\"end\">%.4g</text>\n",
                            kLeft - 6, top + inner_height * (1 - part) + 4,
                            y.low + part * (y.high - y.low));
      absl::StrAppendFormat(&svg, "<text x=\"%g\" y=\"%g\" text-anchor=\"middle\">%.4g</text>\n",
                            kLeft + inner_width * part, top + inner_height + 16,
                            x.low + part * (x.high - x.low));
    }
    absl::StrAppend(&svg, "<polyline fill=\"none\" stroke=\"steelblue\" points=\"");
    for (size_t i = 0; i < curve.x.size(); ++i) {
      if (!std::isfinite(curve.y[i])) continue;
      absl::StrAppendFormat(&svg, "%.1f,%.1f ", kLeft + inner_width * x.At(curve.x[i]),
                            top + inner_height * (1 - y.At(curve.y[i])));
    }
    absl::StrAppend(&svg, "\"/>\n");
  }
  return svg + "</svg>\n";
}

std::string TextPlot(const Curve& curve, int columns, int rows) {
  const Range x = RangeOf(curve.x);
  const Range y = RangeOf(curve.y);
  std::vector<std::string> lines(static_cast<size_t>(rows),
                                 std::string(static_cast<size_t>(columns), ' '));
  for (size_t i = 0; i < curve.x.size(); ++i) {
    if (!std::isfinite(curve.y[i])) continue;
    const auto column = static_cast<size_t>(std::lround(x.At(curve.x[i]) * (columns - 1)));
    const auto row = static_cast<size_t>(std::lround((1 - y.At(curve.y[i])) * (rows - 1)));
    lines[row][column] = '*';
  }
  std::string text = absl::StrFormat("%s, %.4g to %.4g\n", curve.name, y.low, y.high);
  for (const std::string& line : lines) absl::StrAppend(&text, "|", line, "\n");
  return absl::StrCat(text, "+", std::string(static_cast<size_t>(columns), '-'), "\n");
}

}  // namespace trainer
