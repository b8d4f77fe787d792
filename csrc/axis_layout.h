// The layout of one axis, and its algebra: how an index becomes a position.
//
// An axis layout is a map from indices 0..size-1 to positions. It is written as modes, sizes over
// strides, and the rightmost mode varies fastest: (2,4):(8,1) maps index 5 = 1*4 + 1 to 1*8 + 1*1
// = 9.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "modes.h"

namespace meshverse {

// An immutable map 0..size-1 -> positions, in canonical form: equal maps <=> equal objects.
class AxisLayout {
 public:
  // The layout of one point: index 0 at position 0.
  AxisLayout() = default;

  // The map that these modes spell, coalesced.
  // Throws std::invalid_argument unless every size >= 1 and every stride >= 0;
  // std::overflow_error if the size or the largest position needs more than 63 bits.
  explicit AxisLayout(const std::vector<Mode>& modes);

  // The same from separate sizes and strides, which must be equally many.
  AxisLayout(const std::vector<std::int64_t>& sizes, const std::vector<std::int64_t>& strides);

  // Row-major: index i is at position i.
  static AxisLayout row_major(const std::vector<std::int64_t>& sizes);

  // Coalesced: no size is 1, and no mode continues the one to its right.
  const std::vector<Mode>& modes() const { return modes_; }
  std::int64_t size() const { return size_; }
  // The largest position + 1.
  std::int64_t cosize() const { return cosize_; }

  // The position at `index`; std::out_of_range unless 0 <= index < size.
  std::int64_t operator()(std::int64_t index) const;

  // The position at every index, in order of index. O(size).
  std::vector<std::int64_t> positions() const;

  // {self(i) + complement(n)(j)} is 0..n-1, each exactly once; the complement is ascending.
  // Throws std::invalid_argument where no such layout exists, std::overflow_error where the span
  // (size * stride) of a mode needs more than 63 bits, so that none does either.
  AxisLayout complement(std::int64_t n) const;

  // Sorted by stride, each stride is a multiple of the span (size * stride) of the mode before it.
  // Implies that no two indices share a position.
  bool is_orthogonal() const;

  // No stride is greater than the one to its left.
  bool is_sorted() const;

  // The same set of positions, in ascending order.
  // Throws std::invalid_argument where ordering the modes by stride does not order the positions.
  AxisLayout sorted() const;

  // index_of(self(i) + anything the other digits may hold) == i. O(modes).
  // Pre-condition: is_orthogonal() and position >= 0 (not checked).
  std::int64_t index_of(std::int64_t position) const;

  // "(2,4):(8,1)"; "4:1" for one mode, "1:0" for one point.
  std::string to_string() const;
  std::uint64_t hash() const;

  friend bool operator==(const AxisLayout& a, const AxisLayout& b) { return a.modes_ == b.modes_; }

 private:
  std::vector<Mode> modes_;
  std::int64_t size_ = 1;
  std::int64_t cosize_ = 1;
};

}  // namespace meshverse
