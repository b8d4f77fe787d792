#include "rank_groups.h"

#include <stdexcept>
#include <utility>

#include "checked_math.h"

namespace meshverse {

RankGroups::RankGroups(AxisLayout axis, RankMap::Ptr rank_map)
    : axis_(std::move(axis)),
      rank_map_(std::move(rank_map)),
      offsets_(axis_.complement(rank_map_->size())) {}

std::int64_t RankGroups::group_index(std::int64_t position) const {
  check_position(position);
  return offsets_.index_of(position);
}

std::int64_t RankGroups::coordinate(std::int64_t position) const {
  check_position(position);
  return axis_.index_of(position);
}

std::vector<std::int64_t> RankGroups::ranks_of(std::int64_t position) const {
  const std::int64_t offset = offsets_(group_index(position));
  std::vector<std::int64_t> ranks = axis_.positions();
  for (std::int64_t& rank : ranks) rank = rank_map_->rank_at(offset + rank);
  return ranks;
}

Fingerprint RankGroups::fingerprint_of(std::int64_t position, std::string_view salt) const {
  return fingerprint_of_ranks(ranks_of(position), salt);
}

Fingerprint RankGroups::fingerprint_of_ranks(const std::vector<std::int64_t>& ranks,
                                             std::string_view salt) {
  FingerprintBuilder builder;
  builder.add(salt);
  for (const std::int64_t rank : ranks) builder.add(rank);
  return builder.finish();
}

RankArray RankGroups::all() const {
  const std::vector<std::int64_t> within = axis_.positions();
  std::vector<std::int64_t> ranks = with_room_for(rank_map_->size());
  for (const std::int64_t offset : offsets_.positions()) {
    for (const std::int64_t position : within)
      ranks.push_back(rank_map_->rank_at(offset + position));
  }
  return RankArray(n_groups(), group_size(), std::move(ranks));
}

void RankGroups::check_position(std::int64_t position) const {
  if (position >= 0 && position < rank_map_->size()) return;
  throw std::out_of_range("position " + std::to_string(position) + " among the groups of axis " +
                          axis_.to_string() + ": positions run from 0 to " +
                          std::to_string(rank_map_->size() - 1) +
                          "; a rank outside the rank map belongs to no group");
}

}  // namespace meshverse
