#include "benchmarks/plots.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "benchmarks/report.h"

namespace chorus {
namespace bench {
namespace {

// In a row: the usual numbers of ranks.
constexpr int kColumns = 3;

plot::Axis XAxis(Plots::Along along) {
  plot::Axis axis;
  axis.scale = plot::Axis::Scale::kLog10;
  switch (along) {
    case Plots::Along::kBytes:
      axis.label = "bytes of a rank's result";
      axis.scale = plot::Axis::Scale::kLog2;
      axis.text = [](double value) { return BytesText(static_cast<int64_t>(value)); };
      break;
    case Plots::Along::kRanks:
      axis.label = "ranks";
      axis.scale = plot::Axis::Scale::kLog2;
      break;
    case Plots::Along::kNodes:
      axis.label = "nodes of the graph";
      break;
    case Plots::Along::kSessions:
      axis.label = "idle sessions";
      break;
  }
  return axis;
}

// Three digits without noughts behind the point, unlike a table's.
std::string ShortTimeText(double nanos) {
  const char* const units[] = {"ns", "us", "ms", "s"};
  int unit = 0;
  for (; nanos >= 1000 && unit < 3; ++unit) nanos /= 1000;
  return absl::StrFormat("%.3g %s", nanos, units[unit]);
}

plot::Axis YAxis(Plots::Value value) {
  plot::Axis axis;
  axis.scale = plot::Axis::Scale::kLog10;
  switch (value) {
    case Plots::Value::kTime:
      axis.label = "time";
      axis.text = &ShortTimeText;
      break;
    case Plots::Value::kBandwidth:
      axis.label = "memory traffic, GB/s";
      break;
    case Plots::Value::kRate:
      axis.label = "steps/s";
      break;
  }
  return axis;
}

template <typename T>
T& FindOrAdd(std::vector<T>* all, std::string T::*key, const std::string& name) {
  const auto row =
      std::find_if(all->begin(), all->end(), [&](const T& one) { return one.*key == name; });
  if (row != all->end()) return *row;
  all->emplace_back();
  all->back().*key = name;
  return all->back();
}

}  // namespace

void Plots::Add(const Which& which, double x, const std::vector<Measured>& measured,
                double moved_bytes) {
  for (const Measured& one : measured) {
    const double time = one.summary.p50;
    const double y = which.value == Value::kTime   ? time
                     : which.value == Value::kRate ? 1e9 / time
                                                   : moved_bytes / time;
    AddPoint(which, one.name, x, y);
  }
}

void Plots::AddPoint(const Which& which, const std::string& curve, double x, double y) {
  plot::Chart& chart = FindOrAdd(&charts_[which.suite], &plot::Chart::title, which.title);
  chart.x = XAxis(which.along);
  chart.y = YAxis(which.value);
  plot::Curve& line = FindOrAdd(&chart.curves, &plot::Curve::name, curve);
  line.x.push_back(x);
  line.y.push_back(y);
}

absl::Status Plots::Write(const std::string& directory) const {
  if (mkdir(directory.c_str(), 0777) != 0 && errno != EEXIST) {
    return absl::PermissionDeniedError(absl::StrCat("cannot make ", directory));
  }
  for (const auto& suite : charts_) {
    const std::string path = absl::StrCat(directory, "/", suite.first, ".svg");
    std::ofstream file(path);
    file << plot::Svg(suite.second, kColumns);
    file.close();
    if (!file) return absl::PermissionDeniedError(absl::StrCat("cannot write ", path));
  }
  return absl::OkStatus();
}

}  // namespace bench
}  // namespace chorus
