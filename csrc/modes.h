// Modes: the pairs of size and stride that make up layouts.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace meshverse {

// One mode of an axis layout: `size` indices whose positions are `stride` apart.
struct Mode {
  std::int64_t size;
  std::int64_t stride;

  friend bool operator==(const Mode& a, const Mode& b) {
    return a.size == b.size && a.stride == b.stride;
  }
};

// One mode for each (size, stride). Throws std::invalid_argument unless they are equally many.
std::vector<Mode> zip_modes(const std::vector<std::int64_t>& sizes,
                            const std::vector<std::int64_t>& strides);

// One mode for each size, the rightmost of stride 1. Throws std::overflow_error as AxisLayout does.
std::vector<Mode> row_major_modes(const std::vector<std::int64_t>& sizes);

// "(2,4,1)": the form of integer lists in the messages of this library.
std::string join(const std::vector<std::int64_t>& values);

}  // namespace meshverse
