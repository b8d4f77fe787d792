// The layout of a mesh: its axis layouts, in order.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "axis_layout.h"

namespace meshverse {

// The ordered axis layouts of a mesh. Immutable.
class Layout {
 public:
  // No axes: the layout of a single position.
  Layout() = default;

  // Throws std::overflow_error if the size or the largest position of all axes together needs more
  // than 63 bits.
  explicit Layout(std::vector<AxisLayout> axes);

  // One axis for each size, row-major: collapse()(i) == i.
  static Layout row_major(const std::vector<std::int64_t>& sizes);
  // One axis for each (size, stride).
  static Layout from_shape(const std::vector<std::int64_t>& sizes,
                           const std::vector<std::int64_t>& strides);

  const std::vector<AxisLayout>& axes() const { return axes_; }
  // The size of every axis.
  std::vector<std::int64_t> shape() const;
  std::int64_t size() const { return size_; }
  // The largest position + 1.
  std::int64_t cosize() const { return cosize_; }

  // All axes as one: maps the row-major index over shape() to positions.
  AxisLayout collapse() const;

  // axes[:start] + layout.axes + axes[stop:]; std::out_of_range unless 0 <= start <= stop <= len.
  Layout splice(std::int64_t start, std::int64_t stop, const Layout& layout) const;

  // This layout with the axis at `index` split into row-major axes of these sizes.
  // Throws std::out_of_range if there is no such axis, std::invalid_argument unless the sizes are
  // positive and multiply out to the axis's size.
  Layout unflatten(std::int64_t index, const std::vector<std::int64_t>& sizes) const;

  // The axes at these indices, in this order; negative ones count from the end.
  Layout select(const std::vector<std::int64_t>& indices) const;

  // select(indices) if it is sorted and orthogonal, so that a mesh can be sliced to these axes;
  // else nullopt.
  std::optional<Layout> slice(const std::vector<std::int64_t>& indices) const;

  // axes + other.axes.
  Layout concatenate(const Layout& other) const;

  // The properties of the collapsed layout.
  bool is_orthogonal() const;
  bool is_sorted() const;

  // The index of `position` along each axis, in the copy of this layout that contains it. O(modes).
  // Throws std::invalid_argument unless is_orthogonal(), std::out_of_range for a negative position.
  std::vector<std::int64_t> coordinate(std::int64_t position) const;

  // The position of coordinate (0, ..., 0) in that copy:
  // position == base(position) + the position of coordinate(position) in this layout. O(modes).
  // Throws as coordinate() does.
  std::int64_t base(std::int64_t position) const;

  // The axis at `index`; negative ones count from the end. std::out_of_range if there is none.
  const AxisLayout& axis(std::int64_t index) const;

  // "(2:4, (2,2):(8,1))".
  std::string to_string() const;
  std::uint64_t hash() const;

  friend bool operator==(const Layout& a, const Layout& b) { return a.axes_ == b.axes_; }

 private:
  std::vector<AxisLayout> axes_;
  std::int64_t size_ = 1;
  std::int64_t cosize_ = 1;
};

// Each axis of `inner`, mapped by `outer`: compose(outer, inner).axis(k)(i) ==
// outer(inner.axis(k)(i)),
// and compose(outer, inner).collapse()(i) == outer(inner.collapse()(i)).
// Throws std::invalid_argument if `inner` reaches an index that `outer` lacks, or if its strides
// cross the modes of `outer` in a way that no layout expresses.
Layout compose(const AxisLayout& outer, const Layout& inner);

}  // namespace meshverse
