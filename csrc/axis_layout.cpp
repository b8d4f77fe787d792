#include "axis_layout.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "checked_math.h"
#include "fingerprint.h"

namespace meshverse {
namespace {

using Integers = std::vector<std::int64_t>;

void check_mode(const Mode& mode) {
  if (mode.size >= 1 && mode.stride >= 0) return;
  throw std::invalid_argument("layout with size " + std::to_string(mode.size) + " and stride " +
                              std::to_string(mode.stride) +
                              ": sizes must be at least 1 and strides at least 0");
}

// Whether `left`'s stride is the span of `right`. A span beyond 63 bits is no mode's stride.
bool continues(const Mode& left, const Mode& right) {
  std::int64_t span = 0;
  return !__builtin_mul_overflow(right.size, right.stride, &span) && left.stride == span;
}

// coalesce(modes) is the same map, with no size 1 and no mode that continues its right neighbor.
std::vector<Mode> coalesce(const std::vector<Mode>& modes) {
  std::vector<Mode> coalesced;
  coalesced.reserve(modes.size());
  for (auto mode = modes.rbegin(); mode != modes.rend(); ++mode) {
    check_mode(*mode);
    if (mode->size == 1) continue;
    Mode* right = coalesced.empty() ? nullptr : &coalesced.back();
    if (right && continues(*mode, *right)) {
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

}  // namespace

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
  Integers positions = with_room_for(size_);
  positions.push_back(0);
  for (auto mode = modes_.rbegin(); mode != modes_.rend(); ++mode) {
    const std::size_t block = positions.size();
    for (std::int64_t i = 1; i < mode->size; ++i) {
      for (std::size_t j = 0; j < block; ++j) positions.push_back(positions[j] + i * mode->stride);
    }
  }
  return positions;
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
    // Only the largest stride's span can exceed 63 bits, and it is compared with nothing.
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

}  // namespace meshverse
