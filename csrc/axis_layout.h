// The layout of one axis, which maps indices to positions, and its algebra.
//
// An axis layout maps indices 0..size-1 to positions. It consists of modes, pairs of a size and a
// stride, written sizes:strides; the rightmost mode varies fastest: (2,4):(8,1) maps index
// 5 = 1*4 + 1 to 1*8 + 1*1 = 9.
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

  // The map of these modes, coalesced.
  // Throws std::invalid_argument unless every size >= 1 and every stride >= 0;
  // std::overflow_error if the size or the largest position needs more than 63 bits.
  explicit AxisLayout(const std::vector<Mode>& modes);

  // The map of these sizes and strides, which must be equally many.
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

  // The ascending layout for which {self(i) + complement(n)(j)} is 0..n-1, each exactly once.
  // Throws std::invalid_argument if there is no such layout, also std::overflow_error if the span
  // (size * stride) of a mode needs more than 63 bits.
  AxisLayout complement(std::int64_t n) const;

  // Whether each stride, in ascending order, is a multiple of the span (size * stride) of the mode
  // before it. Then no two indices share a position.
  bool is_orthogonal() const;

  // Whether no stride is greater than the one to its left.
  bool is_sorted() const;

  // The same set of positions, in ascending order.
  // Throws std::invalid_argument if sorting the modes by stride does not sort the positions.
  AxisLayout sorted() const;

  // The index whose position agrees with `position` in all modes of this layout: index_of(self(i) +
  // any position of complement(n)) == i. O(modes).
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
