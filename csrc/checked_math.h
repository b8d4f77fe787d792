// 64-bit arithmetic that raises instead of wrapping around.
#pragma once

#include <cstdint>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

namespace meshverse {

[[noreturn]] inline void throw_overflow(std::int64_t a, const char* sign, std::int64_t b,
                                        const char* what) {
  throw std::overflow_error("computing " + std::string(what) + " needs " + std::to_string(a) +
                            sign + std::to_string(b) +
                            ", which does not fit a signed 64-bit integer; use smaller sizes or "
                            "strides");
}

// a * b, or std::overflow_error naming `what` was being computed.
inline std::int64_t checked_multiply(std::int64_t a, std::int64_t b, const char* what) {
  std::int64_t product = 0;
  if (__builtin_mul_overflow(a, b, &product)) throw_overflow(a, " * ", b, what);
  return product;
}

// a + b, or std::overflow_error naming `what` was being computed.
inline std::int64_t checked_add(std::int64_t a, std::int64_t b, const char* what) {
  std::int64_t sum = 0;
  if (__builtin_add_overflow(a, b, &sum)) throw_overflow(a, " + ", b, what);
  return sum;
}

// An empty vector with room for n integers; std::bad_alloc if there is not enough memory, whatever
// n is.
inline std::vector<std::int64_t> with_room_for(std::int64_t n) {
  std::vector<std::int64_t> values;
  if (static_cast<std::uint64_t>(n) > values.max_size()) throw std::bad_alloc();
  values.reserve(static_cast<std::size_t>(n));
  return values;
}

}  // namespace meshverse
