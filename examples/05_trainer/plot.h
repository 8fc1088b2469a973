// Curves as an SVG file and as lines of text.
#ifndef CHORUS_EXAMPLES_TRAINER_PLOT_H_
#define CHORUS_EXAMPLES_TRAINER_PLOT_H_

#include <string>
#include <vector>

namespace trainer {

struct Curve {
  std::string name;
  std::vector<double> x;  // ascending
  std::vector<double> y;  // as many; what is not finite is left out
};

// The curves one above the other, each with axes of its own. Names are escaped.
std::string SvgPlot(const std::vector<Curve>& curves);

// One curve as `rows` lines of `columns` characters, its name and range above.
std::string TextPlot(const Curve& curve, int columns, int rows);

}  // namespace trainer

#endif  // CHORUS_EXAMPLES_TRAINER_PLOT_H_
