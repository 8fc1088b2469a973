// A number of the trainer's beside tensors.
//
// Threads: plain data. Ownership: none. Errors: none here; where it meets a dtype that has no such
// value.
#ifndef CHORUS_CLIENT_NUMBER_H_
#define CHORUS_CLIENT_NUMBER_H_

#include <cstdint>
#include <limits>
#include <type_traits>

namespace chorus {

// As it was written: a whole number of 2^53 and more would be another one as a double.
class Number {
 public:
  template <typename T, typename = std::enable_if_t<std::is_arithmetic<T>::value>>
  Number(T value) : value_(static_cast<double>(value)) {  // implicit
    if constexpr (std::is_integral<T>::value) {
      using Limits = std::numeric_limits<int64_t>;
      is_whole_ =
          std::is_signed<T>::value || static_cast<uint64_t>(value) <= uint64_t{Limits::max()};
      if (is_whole_) whole_ = static_cast<int64_t>(value);
    }
  }

  // Nearest to it, if it is a whole one that no double is.
  double value() const { return value_; }
  // Of an integer type, and an i64: then whole() is that.
  bool is_whole() const { return is_whole_; }
  int64_t whole() const { return whole_; }

 private:
  double value_ = 0;
  int64_t whole_ = 0;
  bool is_whole_ = false;
};

}  // namespace chorus

#endif  // CHORUS_CLIENT_NUMBER_H_
