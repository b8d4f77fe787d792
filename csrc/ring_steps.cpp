#include "ring_steps.h"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <stdexcept>
#include <string>

#include "checked_math.h"

namespace meshverse {
namespace {

using Integers = std::vector<std::int64_t>;

// Returns the largest of values that must lie between 0 and `end`, exclusive; -1 if there are none.
std::int64_t largest(const char* what, const Integers& values, std::int64_t end) {
  std::int64_t most = -1;
  for (const std::int64_t value : values) {
    if (value < 0 || value >= end) {
      throw std::invalid_argument(std::string(what) + " " + std::to_string(value) +
                                  ": there are only those from 0 to " + std::to_string(end - 1));
    }
    most = std::max(most, value);
  }
  return most;
}

// Counts the steps of the groups of one axis, with `stride` positions between their members.
// `seen` has the last group that was seen on each part. Groups are numbered from `first` on, which
// is above the numbers of all groups in it.
std::int64_t steps_of_axis(const Integers& part_of_spot, const Integers& placement,
                           std::int64_t size, std::int64_t stride, std::int64_t first,
                           Integers& seen) {
  std::int64_t steps = 0, group = first;
  const auto n = static_cast<std::int64_t>(placement.size());
  for (std::int64_t block = 0; block < n; block += size * stride) {
    for (std::int64_t start = block; start < block + stride; ++start, ++group) {
      std::int64_t parts = 0;
      for (std::int64_t i = 0; i < size; ++i) {
        const std::int64_t spot = placement[static_cast<std::size_t>(start + i * stride)];
        std::int64_t& last =
            seen[static_cast<std::size_t>(part_of_spot[static_cast<std::size_t>(spot)])];
        parts += last != group;
        last = group;
      }
      if (parts > 1) steps += parts;
    }
  }
  return steps;
}

}  // namespace

Integers ring_steps(const Integers& shape, const std::vector<Integers>& part_of_spot,
                    const Integers& placement) {
  const auto n = static_cast<std::int64_t>(placement.size());
  std::int64_t positions = 1;
  for (const std::int64_t size : shape) {
    if (size < 1) throw std::invalid_argument("an axis of size " + std::to_string(size));
    positions = checked_multiply(positions, size, "the size of a mesh");
  }
  if (positions != n) {
    throw std::invalid_argument("a placement of " + std::to_string(n) +
                                " positions for a mesh of " + std::to_string(positions));
  }
  std::int64_t n_spots = std::numeric_limits<std::int64_t>::max();
  if (!part_of_spot.empty()) n_spots = static_cast<std::int64_t>(part_of_spot[0].size());
  largest("spot", placement, n_spots);
  Integers steps(shape.size() * part_of_spot.size());
  for (std::size_t level = 0; level < part_of_spot.size(); ++level) {
    const Integers& parts = part_of_spot[level];
    if (static_cast<std::int64_t>(parts.size()) != n_spots) {
      throw std::invalid_argument("level " + std::to_string(level) + " has the parts of " +
                                  std::to_string(parts.size()) + " spots, and level 0 of " +
                                  std::to_string(n_spots));
    }
    // Parts are numbered from 0 on, and there are at most as many as spots.
    Integers seen(static_cast<std::size_t>(largest("part", parts, n_spots) + 1), -1);
    std::int64_t stride = n, first = 0;
    for (std::size_t axis = 0; axis < shape.size(); ++axis) {
      stride /= shape[axis];
      steps[axis * part_of_spot.size() + level] =
          steps_of_axis(parts, placement, shape[axis], stride, first, seen);
      first += n / shape[axis];
    }
  }
  return steps;
}

}  // namespace meshverse
