// The layout algebra against enumeration: any modes, also overlapping, broadcast and huge ones.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <stdexcept>
#include <vector>

#include "input.h"
#include "layout.h"

namespace meshverse {
namespace {

__extension__ using Wide = __int128;

constexpr std::int64_t kMost = 3000;  // indices of one layout
constexpr Wide kLargest = std::numeric_limits<std::int64_t>::max();

std::int64_t read_stride(Input& input) {
  const std::uint8_t kind = input.byte();
  if (kind < 8) return std::int64_t{1} << input.of(0, 62);
  if (kind < 10) return static_cast<std::int64_t>(input.word() >> 1);
  return kind % 65;
}

std::vector<Mode> read_modes(Input& input) {
  std::vector<Mode> modes;
  std::int64_t size = 1;
  for (std::int64_t count = input.of(0, 4); count > 0; --count) {
    const Mode mode{input.of(1, 7), read_stride(input)};
    if (size * mode.size > kMost) break;
    size *= mode.size;
    modes.push_back(mode);
  }
  return modes;
}

// The positions that modes spell, the rightmost fastest.
std::vector<Wide> spell(const std::vector<Mode>& modes) {
  std::vector<Wide> positions{0};
  for (const Mode& mode : modes) {
    std::vector<Wide> longer;
    for (const Wide position : positions) {
      for (std::int64_t i = 0; i < mode.size; ++i)
        longer.push_back(position + Wide(i) * mode.stride);
    }
    positions = longer;
  }
  return positions;
}

Wide largest(const std::vector<Wide>& positions) {
  return *std::max_element(positions.begin(), positions.end());
}

Integers narrow(const std::vector<Wide>& positions) {
  Integers narrowed;
  for (const Wide position : positions) narrowed.push_back(static_cast<std::int64_t>(position));
  return narrowed;
}

// The layout of these modes; nullopt if its positions do not fit.
std::optional<AxisLayout> make(const std::vector<Mode>& modes) {
  const std::vector<Wide> positions = spell(modes);
  if (largest(positions) >= kLargest) {  // cosize is one more
    LAW(throws<std::overflow_error>([&] { AxisLayout{modes}; }));
    return std::nullopt;
  }
  AxisLayout layout(modes);
  LAW(layout.positions() == narrow(positions));
  LAW(layout.size() == static_cast<std::int64_t>(positions.size()));
  LAW(layout.cosize() == largest(positions) + 1);
  return layout;
}

// The offsets at which copies of `positions` tile 0..n-1, smallest gap first.
std::optional<Integers> tile(const Integers& positions, std::int64_t n) {
  std::vector<bool> covered(static_cast<std::size_t>(n), false);
  Integers offsets;
  for (std::int64_t gap = 0; gap < n; ++gap) {
    if (covered[static_cast<std::size_t>(gap)]) continue;
    offsets.push_back(gap);
    for (const std::int64_t position : positions) {
      if (position >= n - gap || covered[static_cast<std::size_t>(gap + position)]) {
        return std::nullopt;
      }
      covered[static_cast<std::size_t>(gap + position)] = true;
    }
  }
  return offsets;
}

void check_map(const AxisLayout& layout, const Integers& positions) {
  for (std::size_t i = 0; i < positions.size(); ++i) {
    const auto index = static_cast<std::int64_t>(i);
    LAW(layout(index) == positions[i]);
    LAW(!layout.is_orthogonal() || layout.index_of(positions[i]) == index);
  }
  LAW(throws<std::out_of_range>([&] { layout(-1); }));
  LAW(throws<std::out_of_range>([&] { layout(layout.size()); }));
}

void check_order(const AxisLayout& layout, Integers positions) {
  std::sort(positions.begin(), positions.end());
  const bool repeats = std::adjacent_find(positions.begin(), positions.end()) != positions.end();
  LAW(!layout.is_orthogonal() || !repeats);
  if (throws<std::invalid_argument>([&] { layout.sorted(); })) {
    LAW(!layout.is_orthogonal());
  } else {
    LAW(!repeats && layout.sorted().positions() == positions && layout.sorted().is_sorted());
  }
}

void check_complement(const AxisLayout& layout, const Integers& positions, std::int64_t n) {
  std::optional<AxisLayout> complement;
  try {
    complement = layout.complement(n);
  } catch (const std::invalid_argument&) {
  } catch (const std::overflow_error&) {  // a span beyond 64 bits tiles no n
  }
  const std::optional<Integers> offsets = tile(positions, n);
  LAW(complement.has_value() == offsets.has_value());
  LAW(!complement || complement->positions() == *offsets);
}

// Equal maps <=> equal objects.
void check_equality(const AxisLayout& one, const AxisLayout& other) {
  const bool same = one.positions() == other.positions();
  LAW((one == other) == same && (one.to_string() == other.to_string()) == same);
  LAW(!same || one.hash() == other.hash());
}

void check_composition(const AxisLayout& outer, const Layout& inner) {
  Layout composed;
  try {
    composed = compose(outer, inner);
  } catch (const std::invalid_argument&) {
    return;
  }
  LAW(inner.cosize() <= outer.size());
  LAW(composed.shape() == inner.shape());
  Integers applied = inner.collapse().positions();
  for (std::int64_t& position : applied) position = outer(position);
  LAW(composed.collapse().positions() == applied);
  for (std::size_t axis = 0; axis < inner.axes().size(); ++axis) {
    Integers alone = inner.axes()[axis].positions();
    for (std::int64_t& position : alone) position = outer(position);
    LAW(composed.axes()[axis].positions() == alone);
  }
}

void check_coordinates(const Layout& layout) {
  const Integers positions = layout.collapse().positions();
  LAW(layout.size() == static_cast<std::int64_t>(positions.size()));
  LAW(layout.cosize() == *std::max_element(positions.begin(), positions.end()) + 1);
  if (!layout.is_orthogonal()) {
    LAW(throws<std::invalid_argument>([&] { layout.coordinate(0); }));
    return;
  }
  for (std::size_t i = 0; i < positions.size(); ++i) {
    std::int64_t index = 0;
    const Integers coordinate = layout.coordinate(positions[i]);
    for (std::size_t axis = 0; axis < coordinate.size(); ++axis) {
      index = index * layout.axes()[axis].size() + coordinate[axis];
    }
    LAW(index == static_cast<std::int64_t>(i) && layout.base(positions[i]) == 0);
  }
}

void check_unflatten(const AxisLayout& whole, Input& input) {
  const Layout layout({AxisLayout({2}, {3}), whole});
  Integers sizes;
  std::int64_t size = 1;
  for (std::int64_t count = input.of(0, 3); count > 0; --count) {
    sizes.push_back(input.of(0, 6));
    size *= sizes.back();
  }
  Layout split;
  try {
    split = layout.unflatten(input.of(0, 1) == 0 ? 1 : -1, sizes);
  } catch (const std::invalid_argument&) {
    LAW(size != whole.size() || !whole.is_orthogonal() || whole.modes().size() > 1);
    return;
  }
  LAW(size == whole.size());
  LAW(split.select({0}).axis(0) == layout.axis(0));
  LAW(split.collapse().positions() == layout.collapse().positions());
  Integers shape{2};
  shape.insert(shape.end(), sizes.begin(), sizes.end());
  LAW(split.shape() == shape);
}

void check(Input& input) {
  const std::vector<Mode> modes = read_modes(input);
  const std::optional<AxisLayout> one = make(modes);
  const std::optional<AxisLayout> other = make(read_modes(input));
  const std::optional<AxisLayout> third = make(read_modes(input));
  if (!one || !other || !third) return;
  const Integers positions = one->positions();
  check_map(*one, positions);
  check_order(*one, positions);
  check_complement(*one, positions, 1 + input.of(0, 95));
  check_equality(*one, *other);
  check_unflatten(*one, input);
  if (other->size() * third->size() > kMost) return;
  const Wide cosize = Wide(other->cosize()) + third->cosize() - 1;
  if (cosize > kLargest) {
    LAW(throws<std::overflow_error>([&] { Layout({*other, *third}); }));
    return;
  }
  const Layout both({*other, *third});
  check_composition(*one, both);
  check_coordinates(both);
}

}  // namespace
}  // namespace meshverse

FUZZ(meshverse::check)
