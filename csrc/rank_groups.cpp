#include "rank_groups.h"

#include <limits>
#include <stdexcept>
#include <utility>

namespace meshverse {
namespace {

template <class Rank>
Rank narrow(std::int64_t rank) {
  if (rank > std::numeric_limits<Rank>::max()) {
    throw std::invalid_argument("all groups as int32: rank " + std::to_string(rank) +
                                " is not below 2**31; ask for int64");
  }
  return static_cast<Rank>(rank);
}

template <class Rank>
std::vector<Rank> ranks_of_all_groups(const RankGroups& groups) {
  const std::vector<std::int64_t> within = groups.axis().positions();
  std::vector<Rank> ranks;
  ranks.reserve(static_cast<std::size_t>(groups.rank_map()->size()));
  for (const std::int64_t offset : groups.offsets().positions()) {
    for (const std::int64_t position : within) {
      ranks.push_back(narrow<Rank>(groups.rank_map()->rank_at(offset + position)));
    }
  }
  return ranks;
}

}  // namespace

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
  FingerprintBuilder builder;
  builder.add(salt).add(axis_.to_string());
  for (const std::int64_t rank : ranks_of(position)) builder.add(rank);
  return builder.finish();
}

RankArray RankGroups::all(RankType type) const {
  if (type == RankType::kInt32) {
    return RankArray(n_groups(), group_size(), ranks_of_all_groups<std::int32_t>(*this));
  }
  return RankArray(n_groups(), group_size(), ranks_of_all_groups<std::int64_t>(*this));
}

void RankGroups::check_position(std::int64_t position) const {
  if (position >= 0 && position < rank_map_->size()) return;
  throw std::out_of_range("position " + std::to_string(position) + " among the groups of axis " +
                          axis_.to_string() + ": positions run from 0 to " +
                          std::to_string(rank_map_->size() - 1) +
                          "; a rank outside the rank map belongs to no group");
}

}  // namespace meshverse
