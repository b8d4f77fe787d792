// Plans of reshards against an exchange of single elements.
#include <algorithm>
#include <cstdint>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "input.h"
#include "tests/exchanged.h"

namespace meshverse {
namespace {

using reshard::Holders;
using reshard::Move;
using reshard::Nodes;
using reshard::Sharding;

// Axes over some of the positions of a world; nullopt if they do not fit.
std::optional<Holders> read_holders(Input& input, const RankMap::Ptr& map) {
  std::vector<AxisLayout> axes;
  std::int64_t stride = input.of(0, 3) == 0 ? 2 : 1;
  for (std::int64_t count = input.of(1, 3); count > 0; --count) {
    const std::int64_t size = input.of(1, 3);
    axes.insert(axes.begin(), AxisLayout({size}, {stride}));
    stride *= size;
  }
  if (input.of(0, 1) == 1) std::reverse(axes.begin(), axes.end());
  try {
    return Holders(map, input.of(0, 3), Layout(axes));
  } catch (const std::invalid_argument&) {
    return std::nullopt;
  }
}

Sharding read_sharding(Input& input, std::size_t holders, std::size_t n_axes, std::size_t n_dims) {
  Sharding sharding{holders, {}, {}, input.of(0, 1) == 1};
  for (std::size_t axis = 0; axis < n_axes; ++axis) {
    sharding.dims.push_back(input.of(-1, static_cast<std::int64_t>(n_dims) - 1));
    sharding.factors.push_back(input.of(0, 3) == 0 ? input.of(1, 3) : 1);
  }
  return sharding;
}

Nodes read_nodes(Input& input, std::int64_t world_size) {
  if (input.of(0, 1) == 0) return Nodes(world_size, input.of(1, 4));
  Integers nodes;
  for (std::int64_t rank = 0; rank < world_size; ++rank) nodes.push_back(input.of(0, 2));
  return Nodes(nodes);
}

void check(Input& input) {
  const std::int64_t world_size = input.of(1, 12);
  Integers ranks(static_cast<std::size_t>(world_size));
  std::iota(ranks.begin(), ranks.end(), 0);
  for (std::int64_t swaps = input.of(0, 3); swaps > 0; --swaps) {
    std::swap(ranks[static_cast<std::size_t>(input.of(0, world_size - 1))],
              ranks[static_cast<std::size_t>(input.of(0, world_size - 1))]);
  }
  const RankMap::Ptr map = RankMap::from_ranks(ranks);
  std::vector<Holders> holders;
  for (std::int64_t sides = 2; sides > 0; --sides) {
    auto made = read_holders(input, map);
    if (!made) return;
    holders.push_back(std::move(*made));
  }
  std::vector<Move> moves;
  std::int64_t largest = 1;
  for (std::int64_t tensors = input.of(1, 3); tensors > 0; --tensors) {
    Move move;
    for (std::int64_t dims = input.of(1, 3); dims > 0; --dims) move.shape.push_back(input.of(0, 7));
    move.itemsize = std::int64_t{1} << input.of(0, 3);
    largest = std::max(largest, move.itemsize);
    const auto source = static_cast<std::size_t>(input.of(0, 1));
    const auto target = static_cast<std::size_t>(input.of(0, 1));
    const std::size_t n_dims = move.shape.size();
    move.source = read_sharding(input, source, holders[source].axes().axes().size(), n_dims);
    move.target = read_sharding(input, target, holders[target].axes().axes().size(), n_dims);
    moves.push_back(std::move(move));
  }
  const Nodes nodes = read_nodes(input, world_size);
  const std::int64_t round_bytes = input.of(1, 200);
  if (round_bytes < largest) {
    LAW(throws<std::invalid_argument>([&] {
      for (std::int64_t rank = 0; rank < world_size; ++rank) {
        reshard::plan(holders, moves, nodes, rank, round_bytes);
      }
    }));
    return;
  }
  reshard::Exchange exchange(holders, moves, nodes, round_bytes);
  const std::string mistake = exchange.mistake();
  if (!mistake.empty()) std::fprintf(stderr, "%s\n", mistake.c_str());
  LAW(mistake.empty());
}

}  // namespace
}  // namespace meshverse

FUZZ(meshverse::check)
