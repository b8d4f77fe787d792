// Ranks that hold the sources, or the targets, of a reshard: a grid of mesh axes over a rank map.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "layout.h"
#include "rank_map.h"

namespace meshverse::reshard {

// The ranks at positions base + axes(coordinates) of a rank map.
class Holders {
 public:
  // Throws std::invalid_argument unless the axes are orthogonal and stay within the rank map.
  Holders(RankMap::Ptr rank_map, std::int64_t base, Layout axes);

  const Layout& axes() const { return axes_; }

  // The rank at a position relative to the base.
  std::int64_t rank_at(std::int64_t offset) const { return rank_map_->rank_at(base_ + offset); }

  // The lowest and the highest rank.
  std::pair<std::int64_t, std::int64_t> bounds() const { return bounds_; }

  // The index of a rank along each axis; nullopt if it is not one of these ranks.
  std::optional<std::vector<std::int64_t>> coordinates_of(std::int64_t rank) const;

 private:
  RankMap::Ptr rank_map_;
  std::int64_t base_;
  Layout axes_;
  std::pair<std::int64_t, std::int64_t> bounds_;
};

// The ranks that hold the same shard: those that differ along the free axes only.
class Replicas {
 public:
  // Pre-condition: `offset` is the position, relative to the base, of the shard's coordinates along
  // all other axes.
  Replicas(const Holders& holders, std::vector<std::size_t> free_axes, std::int64_t offset);

  std::int64_t size() const { return size_; }
  std::int64_t offset() const { return offset_; }
  std::int64_t rank_at(std::int64_t index) const;
  // The lowest and highest rank of all holders, not only of these replicas.
  std::pair<std::int64_t, std::int64_t> bounds() const { return holders_->bounds(); }
  // The index of a rank among the replicas; nullopt if it does not hold this shard.
  std::optional<std::int64_t> index_of(std::int64_t rank) const;

 private:
  const Holders* holders_;
  std::vector<std::size_t> free_axes_;
  std::int64_t offset_;
  std::int64_t size_ = 1;
};

}  // namespace meshverse::reshard
