#include "chorus/data/plot.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace chorus {
namespace plot {
namespace {

// Of a chart, in pixels.
constexpr double kWidth = 480, kLeft = 76, kRight = 24, kTop = 34, kAxis = 48;
constexpr double kInnerWidth = kWidth - kLeft - kRight, kInnerHeight = 220;
constexpr double kLegendLine = 16, kBelow = 14;
// With more of them a line is enough.
constexpr size_t kMostMarkers = 50;
// Told apart also by those who see few colours (Okabe and Ito), then by dashes.
constexpr const char* kColours[] = {"#0072b2", "#d55e00", "#009e73", "#cc79a7",
                                    "#e69f00", "#56b4e9", "#000000"};
constexpr const char* kDashes[] = {"", "6 3", "2 3"};

std::string Escaped(const std::string& text) {
  std::string escaped;
  for (const char c : text) {
    switch (c) {
      case '&':
        escaped += "&amp;";
        break;
      case '<':
        escaped += "&lt;";
        break;
      case '>':
        escaped += "&gt;";
        break;
      case '"':
        escaped += "&quot;";
        break;
      default:
        // XML has no control characters at all.
        escaped += c >= ' ' && c <= '~' ? c : '?';
    }
  }
  return escaped;
}

bool Shows(double value, Axis::Scale scale) {
  return std::isfinite(value) && (scale == Axis::Scale::kLinear || value > 0);
}

double Scaled(double value, Axis::Scale scale) {
  switch (scale) {
    case Axis::Scale::kLinear:
      return value;
    case Axis::Scale::kLog2:
      return std::log2(value);
    case Axis::Scale::kLog10:
      return std::log10(value);
  }
  return value;
}

// From the least to the greatest value; never empty.
struct Range {
  double low = 0;
  double high = 0;
  double At(double value) const { return (value - low) / (high - low); }
};

void Include(double value, bool* any, Range* range) {
  range->low = *any ? std::min(range->low, value) : value;
  range->high = *any ? std::max(range->high, value) : value;
  *any = true;
}

// 0 to 1 where there is no value, and beyond a single one.
Range Opened(Range range) {
  if (range.high == range.low) range.high = range.low + 1;
  // Where 1 is nothing beside the value.
  if (range.high == range.low) range.high = std::nextafter(range.low, INFINITY);
  return range;
}

Range RangeOf(const std::vector<double>& values) {
  Range range;
  bool any = false;
  for (const double value : values) {
    if (std::isfinite(value)) Include(value, &any, &range);
  }
  return Opened(range);
}

// An axis with the values that it has to show, scaled.
class Ruler {
 public:
  Ruler(const Axis& axis, Range range) : axis_(axis) {
    range_ = Opened(range);
    switch (axis.scale) {
      case Axis::Scale::kLinear:
        AddRoundTicks();
        break;
      case Axis::Scale::kLog2:
        AddPowersOfTwo();
        break;
      case Axis::Scale::kLog10:
        AddDecades();
        break;
    }
  }

  // 0 at the beginning of the axis, 1 at its end.
  double At(double value) const { return range_.At(Scaled(value, axis_.scale)); }
  const std::vector<double>& ticks() const { return ticks_; }
  std::string TextOf(double value) const {
    return Escaped(axis_.text ? axis_.text(value) : absl::StrFormat("%.5g", value));
  }

 private:
  static constexpr int kMostTicks = 8;

  void AddRoundTicks() {
    const double rough = (range_.high - range_.low) / 5;
    const double decade = std::pow(10, std::floor(std::log10(rough)));
    const double step = decade * (rough > 5 * decade ? 10 : rough > 2 * decade ? 5 : 2);
    const double first = std::ceil(range_.low / step);
    for (int k = 0; k <= kMostTicks; ++k) {
      const double tick = (first + k) * step + 0.0;  // no -0
      if (tick <= range_.high) ticks_.push_back(tick);
    }
  }

  void AddPowersOfTwo() {
    range_ = {std::floor(range_.low), std::ceil(range_.high)};
    const double step = std::ceil((range_.high - range_.low) / kMostTicks);
    for (double power = range_.low; power <= range_.high; power += step) {
      ticks_.push_back(std::exp2(power));
    }
  }

  // Begins and ends at a tick.
  void AddDecades() {
    constexpr double kParts[] = {1, 2, 5};
    const double low = std::floor(range_.low);
    const double high = std::ceil(range_.high);
    std::vector<double> all;
    for (double decade = low; decade <= high; ++decade) {
      for (const double part : kParts) all.push_back(part * std::pow(10, decade));
    }
    // The last one that is not above the least value, the first one that is not below the greatest.
    constexpr double kNearly = 1e-9;
    const auto begin = std::prev(std::find_if(all.begin() + 1, all.end(), [&](double tick) {
      return std::log10(tick) > range_.low + kNearly;
    }));
    auto end = std::find_if(begin + 1, all.end(),
                            [&](double tick) { return std::log10(tick) >= range_.high - kNearly; });
    if (end != all.end()) ++end;
    ticks_.assign(begin, end);
    range_ = {std::log10(ticks_.front()), std::log10(ticks_.back())};
    if (ticks_.size() <= kMostTicks) return;
    // Only the decades, or every second one and so on.
    const double step = std::ceil((high - low) / kMostTicks);
    ticks_.clear();
    for (double decade = std::ceil(range_.low - kNearly); decade <= range_.high + kNearly;
         decade += step) {
      ticks_.push_back(std::pow(10, decade));
    }
  }

  const Axis axis_;
  Range range_;
  std::vector<double> ticks_;
};

class Drawing {
 public:
  std::string Whole(const std::vector<Chart>& charts, int columns) {
    const auto in_row = static_cast<size_t>(std::max(1, columns));
    double height = 0;
    for (size_t first = 0; first < charts.size(); first += in_row) {
      const size_t end = std::min(charts.size(), first + in_row);
      size_t lines = 0;
      for (size_t k = first; k < end; ++k) {
        DrawChart(charts[k], kWidth * static_cast<double>(k - first), height);
        lines = std::max(lines, charts[k].curves.size());
      }
      height += kTop + kInnerHeight + kAxis + kLegendLine * static_cast<double>(lines) + kBelow;
    }
    const double width = kWidth * static_cast<double>(std::min(in_row, charts.size()));
    return absl::StrFormat(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%g\" height=\"%g\" "
        "viewBox=\"0 0 %g %g\" font-family=\"sans-serif\" font-size=\"12\">\n"
        // Without it a dark viewer would show black on black.
        "<rect width=\"100%%\" height=\"100%%\" fill=\"white\"/>\n%s</svg>\n",
        width, height, width, height, body_);
  }

 private:
  void DrawChart(const Chart& chart, double x, double y) {
    Range across;
    Range up;
    bool any = false;
    for (const Curve& curve : chart.curves) {
      for (size_t i = 0; i < curve.x.size(); ++i) {
        if (!Shows(curve.x[i], chart.x.scale) || !Shows(curve.y[i], chart.y.scale)) continue;
        bool any_up = any;
        Include(Scaled(curve.x[i], chart.x.scale), &any, &across);
        Include(Scaled(curve.y[i], chart.y.scale), &any_up, &up);
      }
    }
    const Ruler x_ruler(chart.x, across);
    const Ruler y_ruler(chart.y, up);
    const double left = x + kLeft;
    const double top = y + kTop;
    const double bottom = top + kInnerHeight;
    DrawText(left, top - 12, "start", Escaped(chart.title), " font-weight=\"bold\"");
    for (const double tick : y_ruler.ticks()) {
      const double at = bottom - kInnerHeight * y_ruler.At(tick);
      DrawLine(left, at, left + kInnerWidth, at);
      DrawText(left - 6, at + 4, "end", y_ruler.TextOf(tick));
    }
    for (const double tick : x_ruler.ticks()) {
      const double at = left + kInnerWidth * x_ruler.At(tick);
      DrawLine(at, top, at, bottom);
      DrawText(at, bottom + 16, "middle", x_ruler.TextOf(tick));
    }
    absl::StrAppendFormat(
        &body_,
        "<rect x=\"%g\" y=\"%g\" width=\"%g\" height=\"%g\" fill=\"none\" stroke=\"gray\"/>\n",
        left, top, kInnerWidth, kInnerHeight);
    DrawText(left + kInnerWidth / 2, bottom + 34, "middle", Escaped(chart.x.label));
    const double middle = top + kInnerHeight / 2;
    DrawText(x + 14, middle, "middle", Escaped(chart.y.label),
             absl::StrFormat(" transform=\"rotate(-90 %g %g)\"", x + 14, middle));
    for (size_t k = 0; k < chart.curves.size(); ++k) {
      const Curve& curve = chart.curves[k];
      const std::string pen = PenOf(curve.name);
      DrawCurve(chart, curve, x_ruler, y_ruler, left, bottom, pen);
      const double line = bottom + kAxis + kLegendLine * static_cast<double>(k);
      absl::StrAppendFormat(&body_, "<line x1=\"%g\" y1=\"%g\" x2=\"%g\" y2=\"%g\"%s/>\n", left,
                            line, left + 24, line, pen);
      DrawText(left + 32, line + 4, "start", Escaped(curve.name));
    }
  }

  void DrawCurve(const Chart& chart, const Curve& curve, const Ruler& x_ruler, const Ruler& y_ruler,
                 double left, double bottom, const std::string& pen) {
    std::string points;
    std::string markers;
    for (size_t i = 0; i < curve.x.size(); ++i) {
      if (!Shows(curve.x[i], chart.x.scale) || !Shows(curve.y[i], chart.y.scale)) continue;
      const double x = left + kInnerWidth * x_ruler.At(curve.x[i]);
      const double y = bottom - kInnerHeight * y_ruler.At(curve.y[i]);
      absl::StrAppendFormat(&points, "%.1f,%.1f ", x, y);
      if (curve.x.size() > kMostMarkers) continue;
      // What a viewer says of a point.
      absl::StrAppendFormat(&markers,
                            "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"3\"%s><title>%s: %s, %s</title>"
                            "</circle>\n",
                            x, y, pen, Escaped(curve.name), x_ruler.TextOf(curve.x[i]),
                            y_ruler.TextOf(curve.y[i]));
    }
    absl::StrAppend(&body_, "<polyline", pen, " points=\"", points, "\"><title>",
                    Escaped(curve.name), "</title></polyline>\n", markers);
  }

  void DrawLine(double x1, double y1, double x2, double y2) {
    absl::StrAppendFormat(&body_,
                          "<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" "
                          "stroke=\"#dddddd\"/>\n",
                          x1, y1, x2, y2);
  }

  // `text` is escaped.
  void DrawText(double x, double y, const char* anchor, const std::string& text,
                const std::string& attributes = "") {
    absl::StrAppendFormat(
        &body_, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\" fill=\"black\"%s>%s</text>\n", x, y,
        anchor, attributes, text);
  }

  // Attributes of the lines of that name's curves.
  std::string PenOf(const std::string& name) {
    const auto row = std::find(names_.begin(), names_.end(), name);
    const auto k = static_cast<size_t>(row - names_.begin());
    if (row == names_.end()) names_.push_back(name);
    const char* const dashes = kDashes[k / std::size(kColours) % std::size(kDashes)];
    return absl::StrCat(" fill=\"none\" stroke=\"", kColours[k % std::size(kColours)],
                        "\" stroke-width=\"1.5\"",
                        *dashes == '\0' ? "" : absl::StrCat(" stroke-dasharray=\"", dashes, "\""));
  }

  std::string body_;
  std::vector<std::string> names_;  // of curves so far
};

}  // namespace

std::string Svg(const std::vector<Chart>& charts, int columns) {
  return Drawing().Whole(charts, columns);
}

std::string Text(const Curve& curve, int columns, int rows) {
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

}  // namespace plot
}  // namespace chorus
