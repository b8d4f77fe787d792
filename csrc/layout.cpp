#include "layout.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "checked_math.h"
#include "fingerprint.h"

namespace meshverse {
namespace {

using Integers = std::vector<std::int64_t>;

void check_domain(const AxisLayout& outer, const Layout& inner) {
  if (inner.cosize() <= outer.size()) return;
  throw std::invalid_argument("compose " + outer.to_string() + " with " + inner.to_string() +
                              ": the inner layout reaches index " +
                              std::to_string(inner.cosize() - 1) + ", but the outer one has only " +
                              std::to_string(outer.size()) +
                              " indices; choose an inner layout that stays below that");
}

// Composes inner layouts with one outer layout, mode by mode. A digit is the index within one mode
// of the outer layout.
class Composer {
 public:
  explicit Composer(const AxisLayout& outer) : outer_(outer), used_(outer.modes().size(), 0) {}

  AxisLayout compose(const AxisLayout& inner) {
    std::vector<Mode> composed;
    for (auto mode = inner.modes().rbegin(); mode != inner.modes().rend(); ++mode) {
      append_mode(*mode, inner, composed);
    }
    std::reverse(composed.begin(), composed.end());
    return AxisLayout(composed);
  }

 private:
  // Appends, rightmost first, the modes of outer_(i * mode.stride) for i in 0..mode.size-1.
  void append_mode(const Mode& mode, const AxisLayout& inner, std::vector<Mode>& composed) {
    if (mode.stride == 0) return composed.push_back(mode);
    std::int64_t count = mode.size;
    std::int64_t step = mode.stride;
    for (std::size_t digit = outer_.modes().size(); digit-- > 0 && count > 1;) {
      const auto [size, stride] = outer_.modes()[digit];
      if (step >= size) {
        if (step % size != 0) refuse(inner);
        step /= size;
        continue;
      }
      const std::int64_t taken = (count - 1) * step < size ? count : size / step;
      if (taken < count && (size % step != 0 || count % taken != 0)) refuse(inner);
      use(digit, (taken - 1) * step, inner);
      composed.push_back({taken, step * stride});
      count /= taken;
      step = 1;
    }
  }

  // Two inner modes may share a digit of outer_, if their sum never carries into the next digit.
  void use(std::size_t digit, std::int64_t largest, const AxisLayout& inner) {
    used_[digit] = checked_add(used_[digit], largest, "a composition");
    if (used_[digit] >= outer_.modes()[digit].size) refuse(inner);
  }

  [[noreturn]] void refuse(const AxisLayout& inner) const {
    throw std::invalid_argument("compose " + outer_.to_string() + " with " + inner.to_string() +
                                ": the result is not a layout, because the inner layout steps "
                                "across digits of the outer one; each inner stride must divide, or "
                                "be a multiple of, every outer size that it crosses");
  }

  const AxisLayout& outer_;
  Integers used_;  // the largest value of each digit of outer_ so far
};

}  // namespace

Layout::Layout(std::vector<AxisLayout> axes) : axes_(std::move(axes)) {
  for (const AxisLayout& axis : axes_) {
    size_ = checked_multiply(size_, axis.size(), "a mesh's size");
    cosize_ = checked_add(cosize_, axis.cosize() - 1, "a mesh's position");
  }
}

Layout Layout::row_major(const Integers& sizes) {
  std::vector<AxisLayout> axes;
  axes.reserve(sizes.size());
  for (const Mode& mode : row_major_modes(sizes)) axes.emplace_back(std::vector<Mode>{mode});
  return Layout(std::move(axes));
}

Layout Layout::from_shape(const Integers& sizes, const Integers& strides) {
  std::vector<AxisLayout> axes;
  axes.reserve(sizes.size());
  for (const Mode& mode : zip_modes(sizes, strides)) axes.emplace_back(std::vector<Mode>{mode});
  return Layout(std::move(axes));
}

Integers Layout::shape() const {
  Integers shape;
  shape.reserve(axes_.size());
  for (const AxisLayout& axis : axes_) shape.push_back(axis.size());
  return shape;
}

AxisLayout Layout::collapse() const {
  std::vector<Mode> modes;
  modes.reserve(2 * axes_.size());
  for (const AxisLayout& axis : axes_) {
    modes.insert(modes.end(), axis.modes().begin(), axis.modes().end());
  }
  return AxisLayout(modes);
}

Layout Layout::splice(std::int64_t start, std::int64_t stop, const Layout& layout) const {
  const auto length = static_cast<std::int64_t>(axes_.size());
  if (start < 0 || start > stop || stop > length) {
    throw std::out_of_range(
        "splice axes " + std::to_string(start) + ":" + std::to_string(stop) + " of layout " +
        to_string() + ": the range must satisfy 0 <= start <= stop <= " + std::to_string(length));
  }
  std::vector<AxisLayout> axes;
  axes.reserve(axes_.size() + layout.axes_.size());
  axes.insert(axes.end(), axes_.begin(), axes_.begin() + start);
  axes.insert(axes.end(), layout.axes_.begin(), layout.axes_.end());
  axes.insert(axes.end(), axes_.begin() + stop, axes_.end());
  return Layout(std::move(axes));
}

Layout Layout::unflatten(std::int64_t index, const std::vector<std::int64_t>& sizes) const {
  const AxisLayout& whole = axis(index);
  const Layout inner = row_major(sizes);
  if (inner.size() != whole.size()) {
    throw std::invalid_argument("unflatten axis " + whole.to_string() + " into " +
                                inner.to_string() + ": " + std::to_string(inner.size()) +
                                " indices are not " + std::to_string(whole.size()));
  }
  const std::int64_t start = index < 0 ? index + static_cast<std::int64_t>(axes_.size()) : index;
  return splice(start, start + 1, compose(whole, inner));
}

Layout Layout::select(const Integers& indices) const {
  std::vector<AxisLayout> axes;
  axes.reserve(indices.size());
  for (const std::int64_t index : indices) axes.push_back(axis(index));
  return Layout(std::move(axes));
}

std::optional<Layout> Layout::slice(const Integers& indices) const {
  Layout part = select(indices);
  const AxisLayout whole = part.collapse();
  if (!whole.is_sorted() || !whole.is_orthogonal()) return std::nullopt;
  return part;
}

Layout Layout::concatenate(const Layout& other) const {
  const auto end = static_cast<std::int64_t>(axes_.size());
  return splice(end, end, other);
}

bool Layout::is_orthogonal() const { return collapse().is_orthogonal(); }

bool Layout::is_sorted() const { return collapse().is_sorted(); }

Integers Layout::coordinate(std::int64_t position) const {
  if (position < 0) {
    throw std::out_of_range("coordinate of position " + std::to_string(position) + " in layout " +
                            to_string() + ": positions start at 0");
  }
  if (!is_orthogonal()) {
    throw std::invalid_argument("coordinate of position " + std::to_string(position) +
                                " in layout " + to_string() +
                                ": axes overlap, so a position has no single coordinate; every "
                                "stride must be a multiple of the span of the smaller ones");
  }
  Integers coordinate;
  coordinate.reserve(axes_.size());
  for (const AxisLayout& axis : axes_) coordinate.push_back(axis.index_of(position));
  return coordinate;
}

std::int64_t Layout::base(std::int64_t position) const {
  const Integers indices = coordinate(position);
  for (std::size_t i = 0; i < axes_.size(); ++i) position -= axes_[i](indices[i]);
  return position;
}

const AxisLayout& Layout::axis(std::int64_t index) const {
  const auto length = static_cast<std::int64_t>(axes_.size());
  if (index < -length || index >= length) {
    throw std::out_of_range("axis " + std::to_string(index) + " of layout " + to_string() +
                            ": it has " + std::to_string(length) + " axes, numbered from 0");
  }
  return axes_[static_cast<std::size_t>(index < 0 ? index + length : index)];
}

std::string Layout::to_string() const {
  std::string text = "(";
  for (const AxisLayout& axis : axes_) {
    if (text.size() > 1) text += ", ";
    text += axis.to_string();
  }
  return text + ")";
}

std::uint64_t Layout::hash() const {
  std::uint64_t hash = axes_.size();
  for (const AxisLayout& axis : axes_) hash = hash_combine(hash, axis.hash());
  return hash;
}

Layout compose(const AxisLayout& outer, const Layout& inner) {
  check_domain(outer, inner);
  Composer composer(outer);
  std::vector<AxisLayout> axes;
  axes.reserve(inner.axes().size());
  for (const AxisLayout& axis : inner.axes()) axes.push_back(composer.compose(axis));
  return Layout(std::move(axes));
}

}  // namespace meshverse
