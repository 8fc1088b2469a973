#include "chorus/data/plot.h"

#include <limits>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace chorus {
namespace plot {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

// Of well-formed XML without comments and declarations; otherwise what is wrong with it.
std::string XmlError(absl::string_view xml) {
  std::vector<std::string> open;
  size_t at = 0;
  while (at < xml.size()) {
    const char c = xml[at];
    if ((c < ' ' && c != '\n') || c > '~') return absl::StrCat("a character at ", at);
    if (c == '&') {
      bool known = false;
      for (const char* entity : {"&amp;", "&lt;", "&gt;", "&quot;"}) {
        known = known || absl::StartsWith(xml.substr(at), entity);
      }
      if (!known) return absl::StrCat("a bare & at ", at);
    }
    if (c != '<') {
      ++at;
      continue;
    }
    const size_t end = xml.find('>', at);
    if (end == absl::string_view::npos) return absl::StrCat("an open tag at ", at);
    const absl::string_view tag = xml.substr(at + 1, end - at - 1);
    const std::string name(tag.substr(0, tag.find(' ')));
    if (absl::StrContains(tag, "<")) return absl::StrCat("a bare < in ", tag);
    size_t quotes = 0;
    for (const char one : tag) quotes += one == '"' ? 1 : 0;
    if (quotes % 2 != 0) return absl::StrCat("an odd quote in ", tag);
    if (tag.front() == '/') {
      if (open.empty() || "/" + open.back() != name) return absl::StrCat("unexpected ", tag);
      open.pop_back();
    } else if (tag.back() != '/') {
      open.push_back(name);
    }
    at = end + 1;
  }
  return open.empty() ? "" : "not closed: " + open.back();
}

int Count(const std::string& text, const std::string& part) {
  int count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

Chart ChartOf(std::vector<Curve> curves, Axis::Scale x = Axis::Scale::kLinear,
              Axis::Scale y = Axis::Scale::kLinear) {
  Chart chart;
  chart.title = "the title";
  chart.x.label = "the x";
  chart.x.scale = x;
  chart.y.label = "the y";
  chart.y.scale = y;
  chart.curves = std::move(curves);
  return chart;
}

TEST(XmlErrorTest, FindsWhatIsNoXml) {
  EXPECT_EQ(XmlError("<a b=\"c\"><d/>x &amp; y\n</a>\n"), "");
  for (const char* wrong : {"<a>", "</a>", "<a></b>", "<a>&</a>", "<a>&nbsp;</a>", "<a b=\"></a>",
                            "<a", "<a><b></a></b>", "<a>\x01</a>"}) {
    EXPECT_NE(XmlError(wrong), "") << wrong;
  }
}

TEST(SvgTest, HasEveryCurveAndText) {
  const std::string svg =
      Svg({ChartOf({{"first", {0, 10}, {0, 5}}, {"second", {0, 5, 10}, {5, 2.5, 0}}})});
  EXPECT_EQ(XmlError(svg), "");
  for (const char* text : {">the title<", ">the x<", ">the y<", ">first<", ">second<",
                           "fill=\"white\"", ">10<", ">4<", ">first: 10, 5<"}) {
    EXPECT_THAT(svg, HasSubstr(text));
  }
  EXPECT_EQ(Count(svg, "<polyline"), 2);
  EXPECT_EQ(Count(svg, "<circle"), 5);
  // From corner to corner.
  EXPECT_THAT(svg, HasSubstr("points=\"76.0,254.0 456.0,34.0 \""));
  EXPECT_THAT(svg, HasSubstr("points=\"76.0,34.0 266.0,144.0 456.0,254.0 \""));
}

TEST(SvgTest, ColoursBelongToNames) {
  const std::string svg = Svg({ChartOf({{"a", {1}, {1}}, {"b", {1}, {1}}}),
                               ChartOf({{"b", {1}, {1}}}), ChartOf({{"c", {1}, {1}}})},
                              2);
  EXPECT_EQ(XmlError(svg), "");
  EXPECT_EQ(Count(svg, "<polyline fill=\"none\" stroke=\"#0072b2\""), 1);
  EXPECT_EQ(Count(svg, "<polyline fill=\"none\" stroke=\"#d55e00\""), 2);
  EXPECT_EQ(Count(svg, "<polyline fill=\"none\" stroke=\"#009e73\""), 1);
}

TEST(SvgTest, MoreCurvesThanColoursAreDashed) {
  std::vector<Curve> curves;
  for (int k = 0; k < 9; ++k) curves.push_back({absl::StrCat("curve ", k), {1, 2}, {1, 2}});
  const std::string svg = Svg({ChartOf(curves)});
  EXPECT_EQ(Count(svg, "<polyline"), 9);
  EXPECT_EQ(Count(svg, "stroke=\"#0072b2\" stroke-width=\"1.5\" stroke-dasharray=\"6 3\" points"),
            1);
}

TEST(SvgTest, LogAxesBeginAndEndAtTicks) {
  Chart chart = ChartOf({{"a", {4, 1 << 20}, {85, 1200}}}, Axis::Scale::kLog2, Axis::Scale::kLog10);
  chart.x.text = [](double value) { return absl::StrCat("<", value, ">"); };
  const std::string svg = Svg({chart});
  EXPECT_EQ(XmlError(svg), "");
  for (const char* tick : {">50<", ">100<", ">200<", ">500<", ">1000<", ">2000<", "&lt;4&gt;",
                           "&lt;32&gt;", "&lt;16384&gt;"}) {
    EXPECT_THAT(svg, HasSubstr(tick));
  }
  EXPECT_THAT(svg, Not(HasSubstr(">20<")));
  EXPECT_THAT(svg, Not(HasSubstr(">5000<")));
  // log(85 / 50) / log(2000 / 50) of the height.
  EXPECT_THAT(svg, HasSubstr("points=\"76.0,222.4 456.0,64.5 \""));
  // Many decades: only they.
  const std::string wide =
      Svg({ChartOf({{"a", {1, 2}, {1, 1e6}}}, Axis::Scale::kLinear, Axis::Scale::kLog10)});
  EXPECT_THAT(wide, HasSubstr(">10000<"));
  EXPECT_THAT(wide, Not(HasSubstr(">2000<")));
}

TEST(SvgTest, LinearTicksAreRound) {
  const std::string svg = Svg({ChartOf({{"a", {0, 700}, {-0.3, 0.61}}})});
  for (const char* tick : {">0<", ">200<", ">400<", ">600<", ">-0.2<", ">0.2<", ">0.4<", ">0.6<"}) {
    EXPECT_THAT(svg, HasSubstr(tick));
  }
  EXPECT_THAT(svg, Not(HasSubstr(">-0<")));
}

TEST(SvgTest, WhatCannotBeShownIsLeftOut) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double inf = std::numeric_limits<double>::infinity();
  const std::string svg = Svg({ChartOf({{"a", {1, 2, 3, 4, 5, 6}, {1, nan, 0, -1, inf, 10}}},
                                       Axis::Scale::kLinear, Axis::Scale::kLog10)});
  EXPECT_EQ(XmlError(svg), "");
  EXPECT_THAT(svg, HasSubstr("points=\"76.0,254.0 456.0,34.0 \""));
  EXPECT_THAT(svg, Not(HasSubstr("nan")));
  EXPECT_THAT(svg, Not(HasSubstr("inf")));
}

TEST(SvgTest, NoPointOnePointAndEqualPoints) {
  for (const auto scale : {Axis::Scale::kLinear, Axis::Scale::kLog2, Axis::Scale::kLog10}) {
    for (const std::vector<double>& values : std::vector<std::vector<double>>{
             {}, {3}, {7, 7}, {1}, {1e-9}, {1e300}, {1e300, 1e300}, {1024}}) {
      const std::string svg = Svg({ChartOf({{"only", values, values}}, scale, scale)});
      EXPECT_EQ(XmlError(svg), "");
      EXPECT_EQ(Count(svg, "<circle"), static_cast<int>(values.size()));
      EXPECT_THAT(svg, Not(HasSubstr("nan")));
      EXPECT_THAT(svg, Not(HasSubstr("inf")));
      EXPECT_THAT(svg, HasSubstr(">only<"));
    }
  }
  // An axis of some length begins at the only value.
  const std::string one = Svg({ChartOf({{"only", {3}, {7}}})});
  for (const char* tick : {">3<", ">4<", ">7<", ">8<"}) EXPECT_THAT(one, HasSubstr(tick));
  EXPECT_EQ(XmlError(Svg({})), "");
  EXPECT_EQ(XmlError(Svg({ChartOf({})})), "");
}

TEST(SvgTest, HostileTextsAreEscaped) {
  const std::string hostile = "</text><script>\"&'\x01\xff\n]]>";
  Chart chart = ChartOf({{hostile, {1, 2}, {1, 2}}});
  chart.title = chart.x.label = chart.y.label = hostile;
  chart.x.text = chart.y.text = [&](double) { return hostile; };
  const std::string svg = Svg({chart});
  EXPECT_EQ(XmlError(svg), "");
  EXPECT_THAT(svg, HasSubstr("&lt;/text&gt;&lt;script&gt;&quot;&amp;'???]]&gt;"));
  EXPECT_THAT(svg, Not(HasSubstr("<script")));
}

TEST(SvgTest, ChartsStandInRows) {
  const Chart chart = ChartOf({{"a", {1}, {1}}});
  const std::string svg = Svg({chart, chart, chart}, 2);
  EXPECT_EQ(XmlError(svg), "");
  EXPECT_THAT(svg, HasSubstr("width=\"960\" height=\"664\""));
  EXPECT_EQ(Count(svg, ">the title<"), 3);
}

TEST(TextTest, CurvesKeepTheirShape) {
  const Curve curve{"a<b", {0, 1, 2, 3}, {4, 2, std::numeric_limits<double>::quiet_NaN(), 0}};
  EXPECT_EQ(Text(curve, 4, 3),
            "a<b, 0 to 4\n"
            "|*   \n"
            "| *  \n"
            "|   *\n"
            "+----\n");
}

}  // namespace
}  // namespace plot
}  // namespace chorus
