// Curves as an SVG file and as lines of text, for what a training or a benchmark shows of itself.
//
// Threads: pure functions. Ownership: copies. Errors: none.
#ifndef CHORUS_CLIENT_DATA_PLOT_H_
#define CHORUS_CLIENT_DATA_PLOT_H_

#include <functional>
#include <string>
#include <vector>

namespace chorus {
namespace plot {

struct Curve {
  std::string name;
  std::vector<double> x;  // ascending
  std::vector<double> y;  // as many; what is not finite is left out, on a log axis also <= 0
};

struct Axis {
  // A log axis has its ticks at powers of 2, or at 1, 2 and 5 times powers of 10.
  enum class Scale { kLinear, kLog2, kLog10 };

  std::string label;  // with the unit
  Scale scale = Scale::kLinear;
  std::function<std::string(double)> text = nullptr;  // of a value; null: five digits
};

struct Chart {
  std::string title;
  Axis x;
  Axis y;
  std::vector<Curve> curves;
};

// The charts, `columns` in a row. A curve has the same colour in all charts that have one of its
// name. Texts may hold anything; what is not printable ASCII becomes '?'.
std::string Svg(const std::vector<Chart>& charts, int columns = 1);

// One curve as `rows` lines of `columns` characters, its name and range above.
std::string Text(const Curve& curve, int columns, int rows);

}  // namespace plot
}  // namespace chorus

#endif  // CHORUS_CLIENT_DATA_PLOT_H_
