#include "layout.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "checked_math.h"
#include "fingerprint.h"

namespace meshverse {
namespace {

using Integers = std::vector<std::int64_t>;

std::vector<Mode> zip_modes(const Integers& sizes, const Integers& strides) {
  if (sizes.size() != strides.size()) {
    throw std::invalid_argument("layout of sizes " + join(sizes) + " and strides " + join(strides) +
                                ": every size needs one stride; give as many strides as sizes, or "
                                "none for row-major order");
  }
  std::vector<Mode> modes;
  modes.reserve(sizes.size());
  for (std::size_t i = 0; i < sizes.size(); ++i) modes.push_back({sizes[i], strides[i]});
  return modes;
}

std::vector<Mode> row_major_modes(const Integers& sizes) {
  std::vector<Mode> modes(sizes.size());
  std::int64_t stride = 1;
  for (std::size_t i = sizes.size(); i-- > 0;) {
    modes[i] = {sizes[i], stride};
    if (sizes[i] > 1) stride = checked_multiply(stride, sizes[i], "a row-major stride");
  }
  return modes;
}

void check_mode(const Mode& mode) {
  if (mode.size >= 1 && mode.stride >= 0) return;
  throw std::invalid_argument("layout with size " + std::to_string(mode.size) + " and stride " +
                              std::to_string(mode.stride) +
                              ": sizes must be at least 1 and strides at least 0");
}

// coalesce(modes) is the same map, with no size 1 and no mode that continues its right neighbour.
std::vector<Mode> coalesce(const std::vector<Mode>& modes) {
  std::vector<Mode> coalesced;
  coalesced.reserve(modes.size());
  for (auto mode = modes.rbegin(); mode != modes.rend(); ++mode) {
    check_mode(*mode);
    if (mode->size == 1) continue;
    Mode* right = coalesced.empty() ? nullptr : &coalesced.back();
    if (right && mode->stride == checked_multiply(right->size, right->stride, "a mode's span")) {
      right->size = checked_multiply(right->size, mode->size, "a layout's size");
    } else {
      coalesced.push_back(*mode);
    }
  }
  std::reverse(coalesced.begin(), coalesced.end());
  return coalesced;
}

std::vector<Mode> by_ascending_stride(std::vector<Mode> modes) {
  std::sort(modes.begin(), modes.end(), [](const Mode& a, const Mode& b) {
    return a.stride != b.stride ? a.stride < b.stride : a.size < b.size;
  });
  return modes;
}

void check_domain(const AxisLayout& outer, const std::string& inner, std::int64_t inner_cosize) {
  if (inner_cosize <= outer.size()) return;
  throw std::invalid_argument(
      "compose " + outer.to_string() + " with " + inner + ": the inner layout reaches index " +
      std::to_string(inner_cosize - 1) + ", but the outer one has only " +
      std::to_string(outer.size()) + " indices; choose an inner layout that stays below that");
}

// Composes the modes of one or more inner layouts with one outer layout, digit by digit.
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

  // Two modes may share a digit of outer_ as long as their sum never carries into the next one.
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
  Integers used_;  // the largest value that every digit of outer_ can take, so far
};

}  // namespace

std::string join(const Integers& values) {
  std::string text = "(";
  for (const std::int64_t value : values) {
    if (text.size() > 1) text += ",";
    text += std::to_string(value);
  }
  return text + ")";
}

AxisLayout::AxisLayout(const std::vector<Mode>& modes) : modes_(coalesce(modes)) {
  for (const Mode& mode : modes_) {
    const std::int64_t reach = checked_multiply(mode.size - 1, mode.stride, "a layout's position");
    size_ = checked_multiply(size_, mode.size, "a layout's size");
    cosize_ = checked_add(cosize_, reach, "a layout's position");
  }
}

AxisLayout::AxisLayout(const Integers& sizes, const Integers& strides)
    : AxisLayout(zip_modes(sizes, strides)) {}

AxisLayout AxisLayout::row_major(const Integers& sizes) {
  return AxisLayout(row_major_modes(sizes));
}

std::int64_t AxisLayout::operator()(std::int64_t index) const {
  if (index < 0 || index >= size_) {
    throw std::out_of_range("index " + std::to_string(index) + " of layout " + to_string() +
                            ": indices run from 0 to " + std::to_string(size_ - 1));
  }
  std::int64_t position = 0;
  for (auto mode = modes_.rbegin(); mode != modes_.rend(); ++mode) {
    position += index % mode->size * mode->stride;
    index /= mode->size;
  }
  return position;
}

Integers AxisLayout::positions() const {
  Integers positions{0};
  positions.reserve(static_cast<std::size_t>(size_));
  for (auto mode = modes_.rbegin(); mode != modes_.rend(); ++mode) {
    const std::size_t block = positions.size();
    for (std::int64_t i = 1; i < mode->size; ++i) {
      for (std::size_t j = 0; j < block; ++j) positions.push_back(positions[j] + i * mode->stride);
    }
  }
  return positions;
}

AxisLayout AxisLayout::compose(const AxisLayout& inner) const {
  check_domain(*this, inner.to_string(), inner.cosize());
  return Composer(*this).compose(inner);
}

Layout AxisLayout::compose(const Layout& inner) const {
  check_domain(*this, inner.to_string(), inner.cosize());
  Composer composer(*this);
  std::vector<AxisLayout> axes;
  axes.reserve(inner.axes().size());
  for (const AxisLayout& axis : inner.axes()) axes.push_back(composer.compose(axis));
  return Layout(std::move(axes));
}

AxisLayout AxisLayout::complement(std::int64_t n) const {
  const auto refuse = [&](const std::string& rule) {
    throw std::invalid_argument("complement of " + to_string() + " in " + std::to_string(n) +
                                " positions: " + rule +
                                "; choose sizes and strides that tile the positions evenly");
  };
  std::vector<Mode> gaps;
  std::int64_t span = 1;
  for (const Mode& mode : by_ascending_stride(modes_)) {
    if (mode.stride == 0 || mode.stride % span != 0) {
      refuse("stride " + std::to_string(mode.stride) + " is not a positive multiple of " +
             std::to_string(span) + ", the span of the smaller strides");
    }
    gaps.push_back({mode.stride / span, span});
    span = checked_multiply(mode.size, mode.stride, "a layout's span");
  }
  if (n < 1 || n % span != 0) {
    refuse("the number of positions is not a positive multiple of " + std::to_string(span) +
           ", the span of the layout");
  }
  gaps.push_back({n / span, span});
  std::reverse(gaps.begin(), gaps.end());
  return AxisLayout(gaps);
}

bool AxisLayout::is_orthogonal() const {
  std::int64_t span = 1;
  for (const Mode& mode : by_ascending_stride(modes_)) {
    if (mode.stride == 0 || (span > 1 && mode.stride % span != 0)) return false;
    // A span beyond 64 bits is that of the largest stride: it is compared with nothing.
    if (__builtin_mul_overflow(mode.size, mode.stride, &span)) break;
  }
  return true;
}

bool AxisLayout::is_sorted() const {
  return std::is_sorted(modes_.begin(), modes_.end(),
                        [](const Mode& a, const Mode& b) { return a.stride > b.stride; });
}

AxisLayout AxisLayout::sorted() const {
  std::vector<Mode> modes = by_ascending_stride(modes_);
  std::int64_t reach = 0;
  for (const Mode& mode : modes) {
    if (mode.stride <= reach) {
      throw std::invalid_argument(
          "sort " + to_string() + ": stride " + std::to_string(mode.stride) +
          " does not step over position " + std::to_string(reach) +
          ", which the smaller strides reach, so that positions repeat or interleave; only a "
          "layout without overlap can be sorted");
    }
    reach += (mode.size - 1) * mode.stride;
  }
  std::reverse(modes.begin(), modes.end());
  return AxisLayout(modes);
}

std::int64_t AxisLayout::index_of(std::int64_t position) const {
  std::int64_t index = 0;
  for (const Mode& mode : modes_) index = index * mode.size + position / mode.stride % mode.size;
  return index;
}

std::string AxisLayout::to_string() const {
  if (modes_.empty()) return "1:0";
  if (modes_.size() == 1) {
    return std::to_string(modes_[0].size) + ":" + std::to_string(modes_[0].stride);
  }
  Integers sizes;
  Integers strides;
  for (const Mode& mode : modes_) {
    sizes.push_back(mode.size);
    strides.push_back(mode.stride);
  }
  return join(sizes) + ":" + join(strides);
}

std::uint64_t AxisLayout::hash() const {
  std::uint64_t hash = modes_.size();
  for (const Mode& mode : modes_) {
    hash = hash_combine(hash, static_cast<std::uint64_t>(mode.size));
    hash = hash_combine(hash, static_cast<std::uint64_t>(mode.stride));
  }
  return hash;
}

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

Layout Layout::select(const Integers& indices) const {
  std::vector<AxisLayout> axes;
  axes.reserve(indices.size());
  for (const std::int64_t index : indices) axes.push_back(axis(index));
  return Layout(std::move(axes));
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

}  // namespace meshverse
