#include "core/ops/testing/value.h"

#include <type_traits>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace chorus {
namespace testing {

Value FromDoubles(const TensorType& type, const std::vector<double>& elements) {
  return Dispatch(type.dtype, [&](auto t) {
    using T = decltype(t);
    std::vector<T> converted;
    for (const double element : elements) {
      if constexpr (std::is_integral<T>::value) {
        converted.push_back(static_cast<T>(static_cast<int64_t>(element)));
      } else if constexpr (sizeof(T) == 2) {
        converted.push_back(T(static_cast<float>(element)));
      } else {
        converted.push_back(static_cast<T>(element));
      }
    }
    return MakeValue<T>(type, converted);
  });
}

std::vector<double> ToDoubles(const Value& value) {
  return Dispatch(value.type.dtype, [&](auto t) {
    std::vector<double> converted;
    for (const auto element : Elements<decltype(t)>(value)) {
      converted.push_back(static_cast<double>(element));
    }
    return converted;
  });
}

Value Zeros(const TensorType& type) {
  return Value{type, std::string(static_cast<size_t>(type.num_bytes()), '\0')};
}

Value RandomWhole(const TensorType& type, int64_t least, int64_t most, std::mt19937_64* random) {
  std::uniform_int_distribution<int64_t> whole(least, most);
  std::vector<double> elements(type.num_elements());
  for (double& element : elements) element = static_cast<double>(whole(*random));
  return FromDoubles(type, elements);
}

Value RandomNormal(const TensorType& type, std::mt19937_64* random) {
  std::normal_distribution<double> normal;
  std::vector<double> elements(type.num_elements());
  for (double& element : elements) element = normal(*random);
  return FromDoubles(type, elements);
}

double Dot(const Value& a, const Value& b) {
  const std::vector<double> x = ToDoubles(a);
  const std::vector<double> y = ToDoubles(b);
  double sum = 0;
  for (size_t i = 0; i < x.size(); ++i) sum += x[i] * y[i];
  return sum;
}

Value AddScaled(const Value& a, double scale, const Value& b) {
  std::vector<double> x = ToDoubles(a);
  const std::vector<double> y = ToDoubles(b);
  for (size_t i = 0; i < x.size(); ++i) x[i] += scale * y[i];
  return FromDoubles(a.type, x);
}

std::string ToString(const Value& value) {
  return absl::StrCat(value.type.ToString(), "{", absl::StrJoin(ToDoubles(value), ", "), "}");
}

}  // namespace testing
}  // namespace chorus
