// The groups of one mesh axis: ranks whose coordinates differ along this axis only.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "axis_layout.h"
#include "fingerprint.h"
#include "rank_array.h"
#include "rank_map.h"

namespace meshverse {

// The groups of `axis` partition the positions of a rank map. Immutable.
//
// Group g holds the positions offsets()(g) + axis()(i) for i in 0..group_size-1.
class RankGroups {
 public:
  // Throws std::invalid_argument unless copies of `axis` tile the rank map's positions.
  RankGroups(AxisLayout axis, RankMap::Ptr rank_map);

  const AxisLayout& axis() const { return axis_; }
  const AxisLayout& offsets() const { return offsets_; }
  const RankMap::Ptr& rank_map() const { return rank_map_; }
  std::int64_t n_groups() const { return offsets_.size(); }
  std::int64_t group_size() const { return axis_.size(); }

  // position == offsets()(group_index(position)) + axis()(coordinate(position)). O(modes).
  // Both throw std::out_of_range for a position outside the rank map.
  std::int64_t group_index(std::int64_t position) const;
  std::int64_t coordinate(std::int64_t position) const;

  // The global ranks of the group of `position`, in the order of the axis. O(group_size).
  // Throws std::out_of_range for a position outside the rank map.
  std::vector<std::int64_t> ranks_of(std::int64_t position) const;

  // Hash of the ranks of the group of `position`, in the order of the axis, and of `salt`. Equal on
  // all members, and for every axis with the same ranks. Throws as ranks_of() does. O(group_size).
  Fingerprint fingerprint_of(std::int64_t position, std::string_view salt) const;

  // fingerprint_of() for the group with these ranks.
  static Fingerprint fingerprint_of_ranks(const std::vector<std::int64_t>& ranks,
                                          std::string_view salt);

  // The global ranks of all groups, as int64 of shape (n_groups, group_size). O(world size).
  RankArray all() const;

 private:
  void check_position(std::int64_t position) const;

  AxisLayout axis_;
  RankMap::Ptr rank_map_;
  AxisLayout offsets_;
};

}  // namespace meshverse
