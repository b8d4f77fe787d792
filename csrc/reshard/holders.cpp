#include "reshard/holders.h"

#include <stdexcept>
#include <string>
#include <utility>

namespace meshverse::reshard {

Holders::Holders(RankMap::Ptr rank_map, std::int64_t base, Layout axes)
    : rank_map_(std::move(rank_map)), base_(base), axes_(std::move(axes)) {
  if (!axes_.is_orthogonal()) {
    throw std::invalid_argument("The axes " + axes_.to_string() +
                                " overlap or are not nested: give ranks in row-major order");
  }
  if (base < 0 || base > rank_map_->size() - axes_.cosize()) {
    throw std::invalid_argument("The axes " + axes_.to_string() + " from position " +
                                std::to_string(base) + " leave " + rank_map_->to_string());
  }
  if (rank_map_->is_sorted()) {
    bounds_ = {rank_map_->rank_at(base_), rank_map_->rank_at(base_ + axes_.cosize() - 1)};
  } else {
    bounds_ = rank_map_->bounds();
  }
}

std::optional<std::vector<std::int64_t>> Holders::coordinates_of(std::int64_t rank) const {
  const auto position = rank_map_->position_of(rank);
  if (!position || *position < base_) return std::nullopt;
  const std::int64_t offset = *position - base_;
  if (offset >= axes_.cosize() || axes_.base(offset) != 0) return std::nullopt;
  return axes_.coordinate(offset);
}

Replicas::Replicas(const Holders& holders, std::vector<std::size_t> free_axes, std::int64_t offset)
    : holders_(&holders), free_axes_(std::move(free_axes)), offset_(offset) {
  for (const std::size_t axis : free_axes_) size_ *= holders_->axes().axes()[axis].size();
}

std::int64_t Replicas::rank_at(std::int64_t index) const {
  std::int64_t offset = offset_;
  for (const std::size_t axis : free_axes_) {
    const AxisLayout& layout = holders_->axes().axes()[axis];
    offset += layout(index % layout.size());
    index /= layout.size();
  }
  return holders_->rank_at(offset);
}

std::optional<std::int64_t> Replicas::index_of(std::int64_t rank) const {
  const auto coordinates = holders_->coordinates_of(rank);
  if (!coordinates) return std::nullopt;
  std::int64_t index = 0, place = 1, free_offset = 0;
  for (const std::size_t axis : free_axes_) {
    const AxisLayout& layout = holders_->axes().axes()[axis];
    const std::int64_t coordinate = (*coordinates)[axis];
    index += coordinate * place;
    place *= layout.size();
    free_offset += layout(coordinate);
  }
  std::int64_t offset = 0;
  for (std::size_t axis = 0; axis < coordinates->size(); ++axis) {
    offset += holders_->axes().axes()[axis]((*coordinates)[axis]);
  }
  if (offset - free_offset != offset_) return std::nullopt;
  return index;
}

}  // namespace meshverse::reshard
