// Rank maps and rank groups against lists of ranks.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <set>
#include <stdexcept>
#include <utility>
#include <variant>
#include <vector>

#include "input.h"
#include "rank_groups.h"
#include "rank_map.h"

namespace meshverse {
namespace {

Integers read_ranks(Input& input) {
  const bool starts_with_identity = input.of(0, 1) == 1;
  Integers ranks;
  for (std::int64_t i = 0, count = input.of(0, 24); i < count; ++i) {
    const std::uint8_t kind = starts_with_identity ? 0 : input.byte();
    if (kind == 255) {
      ranks.push_back(static_cast<std::int64_t>(input.word()));
    } else {
      ranks.push_back(starts_with_identity ? i : kind % 60);
    }
  }
  for (std::int64_t swaps = input.of(0, 2); swaps > 0 && ranks.size() > 1; --swaps) {
    const auto last = static_cast<std::int64_t>(ranks.size()) - 1;
    std::swap(ranks[static_cast<std::size_t>(input.of(0, last))],
              ranks[static_cast<std::size_t>(input.of(0, last))]);
  }
  return ranks;
}

bool is_valid(const Integers& ranks) {
  const std::set<std::int64_t> different(ranks.begin(), ranks.end());
  return !ranks.empty() && different.size() == ranks.size() && *different.begin() >= 0;
}

RankMap::Ptr make(const Integers& ranks) {
  if (!is_valid(ranks)) {
    LAW(throws<std::invalid_argument>([&] { RankMap::from_ranks(ranks); }));
    return nullptr;
  }
  return RankMap::from_ranks(ranks);
}

void check_map(const RankMap::Ptr& map, const Integers& ranks) {
  const auto size = static_cast<std::int64_t>(ranks.size());
  LAW(map->size() == size);
  Integers ascending = ranks;
  std::sort(ascending.begin(), ascending.end());
  LAW(map->is_sorted() == (ascending == ranks));
  LAW(map->sorted() == RankMap::from_ranks(ascending));
  LAW((map == RankMap::identity(size)) == map->is_identity());
  for (std::int64_t position = 0; position < size; ++position) {
    const std::int64_t rank = ranks[static_cast<std::size_t>(position)];
    LAW(map->rank_at(position) == rank && map->position_of(rank) == position);
    LAW(map->is_identity() ? rank == position : true);
  }
  for (std::int64_t rank = -1; rank < 61; ++rank) {
    const bool held = std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
    LAW(map->position_of(rank).has_value() == held);
  }
  LAW(throws<std::out_of_range>([&] { map->rank_at(-1); }));
  LAW(throws<std::out_of_range>([&] { map->rank_at(size); }));
  LAW(!map->to_string().empty() && !map->in_words().empty());
  if (ascending.back() > std::numeric_limits<std::int32_t>::max()) {
    LAW(throws<std::invalid_argument>([&] { map->ranks(); }));
  } else {
    const RankArray array = map->ranks();
    const auto& values = std::get<std::vector<std::int32_t>>(array.values);
    LAW(Integers(values.begin(), values.end()) == ranks);
  }
}

// Equal content is one object, with one fingerprint.
void check_interning(const RankMap::Ptr& one, const RankMap::Ptr& other, bool same) {
  LAW((one == other) == same);
  LAW((one->fingerprint() == other->fingerprint()) == same);
}

AxisLayout read_axis(Input& input) {
  std::vector<Mode> modes;
  for (std::int64_t count = input.of(0, 2); count > 0; --count) {
    modes.push_back({input.of(1, 4), input.of(0, 12)});
  }
  return AxisLayout(modes);
}

void check_groups(const AxisLayout& axis, const RankMap::Ptr& map, const Integers& ranks) {
  std::optional<RankGroups> made;
  try {
    made.emplace(axis, map);
  } catch (const std::invalid_argument&) {
    LAW(throws<std::invalid_argument>([&] { axis.complement(map->size()); }));
    return;
  }
  const RankGroups& groups = *made;
  LAW(groups.n_groups() * groups.group_size() == map->size());
  const RankArray array = groups.all();
  const auto& all = std::get<Integers>(array.values);
  LAW(array.shape == (Integers{groups.n_groups(), groups.group_size()}));
  LAW(std::set<std::int64_t>(all.begin(), all.end()).size() == ranks.size());
  for (std::int64_t position = 0; position < map->size(); ++position) {
    const std::int64_t group = groups.group_index(position);
    const std::int64_t place = groups.coordinate(position);
    LAW(groups.offsets()(group) + axis(place) == position);
    const Integers members = groups.ranks_of(position);
    LAW(members[static_cast<std::size_t>(place)] == ranks[static_cast<std::size_t>(position)]);
    const auto first = all.begin() + group * groups.group_size();
    LAW(std::equal(members.begin(), members.end(), first, first + groups.group_size()));
    const std::int64_t neighbor = groups.offsets()(group);
    LAW(groups.fingerprint_of(position, "a") == groups.fingerprint_of(neighbor, "a"));
    LAW(!(groups.fingerprint_of(position, "a") == groups.fingerprint_of(position, "b")));
  }
  LAW(throws<std::out_of_range>([&] { groups.group_index(map->size()); }));
  LAW(throws<std::out_of_range>([&] { groups.ranks_of(-1); }));
}

void check(Input& input) {
  const Integers ranks = read_ranks(input);
  const Integers others = read_ranks(input);
  const RankMap::Ptr map = make(ranks);
  const RankMap::Ptr other = make(others);
  if (!map) return;
  check_map(map, ranks);
  if (other) check_interning(map, other, ranks == others);
  check_groups(read_axis(input), map, ranks);
}

}  // namespace
}  // namespace meshverse

FUZZ(meshverse::check)
