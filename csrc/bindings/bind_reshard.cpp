#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <pybind11/stl.h>

#include "bindings.h"
#include "rank_array.h"
#include "reshard/plan.h"
#include "value_types.h"

namespace meshverse::bindings {
namespace {

using namespace py::literals;
using reshard::Holders;
using reshard::Move;
using reshard::Nodes;
using reshard::Sharding;

using Integers = std::vector<std::int64_t>;
using SideTuple = std::tuple<std::size_t, Integers, Integers, bool>;
using MoveTuple = std::tuple<Integers, std::int64_t, SideTuple, SideTuple>;

Sharding to_sharding(const SideTuple& side) {
  const auto& [holders, dims, factors, right_to_left] = side;
  return {holders, dims, factors, right_to_left};
}

struct PlanArrays {
  RankArray messages, boxes, kept;
};

PlanArrays plan(const std::vector<Holders>& holders, const std::vector<MoveTuple>& tuples,
                std::int64_t rank, std::int64_t world_size, std::int64_t round_bytes,
                std::int64_t node_size, const std::optional<Integers>& node_of_rank) {
  if (node_of_rank && static_cast<std::int64_t>(node_of_rank->size()) != world_size) {
    throw py::value_error("node_of_rank for " + std::to_string(node_of_rank->size()) +
                          " ranks in a world of " + std::to_string(world_size) +
                          ": give the node of every rank");
  }
  const Unlocked unlocked;
  std::vector<Move> moves;
  moves.reserve(tuples.size());
  for (const auto& [shape, itemsize, source, target] : tuples) {
    moves.push_back({shape, itemsize, to_sharding(source), to_sharding(target)});
  }
  const Nodes nodes = node_of_rank ? Nodes(*node_of_rank) : Nodes(world_size, node_size);
  reshard::Plan made = reshard::plan(holders, moves, nodes, rank, round_bytes);
  constexpr auto kColumns = static_cast<std::int64_t>(std::tuple_size_v<reshard::Message>);
  Integers messages;
  for (const reshard::Message& message : made.messages) {
    messages.insert(messages.end(), message.begin(), message.end());
  }
  const auto rows = static_cast<std::int64_t>(made.messages.size());
  return {RankArray(rows, kColumns, std::move(messages)), RankArray(std::move(made.boxes)),
          RankArray(std::move(made.kept))};
}

}  // namespace

void bind_reshard(py::module_& module) {
  py::class_<Holders> holders(module, "Holders", py::is_final(), plain_class(),
                              R"(The ranks that hold the shards of tensors.

Their positions in a rank map are ``base + axes(coordinates)``.

Args:
    rank_map: Global rank at every position.
    base: Position of the first rank.
    axes: Layout of the axes that tensors are split over.

Raises:
    ValueError: The axes overlap, are not nested, or leave the rank map.

>>> Holders(RankMap.identity(8), 4, Layout([AxisLayout(2, 2), AxisLayout(2, 1)])).coordinates_of(6)
[1, 0]
)");
  holders
      .def(py::init<RankMap::Ptr, std::int64_t, Layout>(), py::arg("rank_map").none(false),
           "base"_a, "axes"_a)
      .def("coordinates_of", &Holders::coordinates_of, "rank"_a,
           "Index of a global rank along every axis, or None if it is not one of these ranks.")
      .def("__repr__", [](const Holders& self) {
        return "Holders(" + self.axes().to_string() + " from rank " +
               std::to_string(self.rank_at(0)) + ")";
      });
  set_new(
      holders,
      [](const py::object&, const RankMap::Ptr& rank_map, std::int64_t base, const Layout& axes) {
        return Holders(rank_map, base, axes);
      },
      py::arg("rank_map").none(false), "base"_a, "axes"_a);

  module.def(
      "plan_reshard",
      [](const std::vector<Holders>& all, const std::vector<MoveTuple>& moves, std::int64_t rank,
         std::int64_t world_size, std::int64_t round_bytes, std::int64_t node_size,
         const std::optional<Integers>& node_of_rank) {
        PlanArrays arrays =
            plan(all, moves, rank, world_size, round_bytes, node_size, node_of_rank);
        return py::make_tuple(std::move(arrays.messages), std::move(arrays.boxes),
                              std::move(arrays.kept));
      },
      "holders"_a, "moves"_a, "rank"_a, "world_size"_a, "round_bytes"_a, "node_size"_a = 1,
      "node_of_rank"_a = py::none(),
      R"(Plan the transfers of one rank when tensors are resharded: what it sends, receives, keeps.

A rank receives every element of its targets once, or not at all if it holds the element. The cost
depends on this rank's shards and peers, not on the number of ranks.

Args:
    holders: Sets of ranks that hold tensors.
    moves: For each tensor its shape, bytes of an element in messages, and the shardings of source
        and target. A sharding has four parts: the index of its ranks in ``holders``; for each of
        their axes the dimension that it splits, or -1; for each axis the factor of a strided split,
        or 1; and whether strided splits are applied after the others, as FSDP2 does.
    rank: Global rank to plan for.
    world_size: Number of ranks.
    round_bytes: Bytes of the longest message. More bytes are exchanged in several rounds.
    node_size: Ranks on each node.
    node_of_rank: Number of the node of every rank, in place of ``node_size``.

Returns:
    Three arrays of integers. Messages, of shape ``(messages, 7)``: step, round, peer, 1 if it is
    sent, bytes, index of its first box in the second array, number of boxes. All ranks exchange
    messages in the order of step and round. Boxes (ranges of elements along every dimension):
    tensor, first byte in the message, number of dimensions n, n first elements in the local tensor,
    n extents. Kept boxes: tensor, n, n first elements in the source's local tensor, n in the
    target's, n extents.

Raises:
    ValueError: A sharding does not fit its tensor or holders, a size is negative, a factor is not
        in ``1..2**24``, an element is larger than a round, a tensor needs more than ``2**24``
        rounds, a rank is outside the world, the world has more than ``2**31`` ranks, or
        ``node_of_rank`` has another number of ranks.
    OverflowError: The bytes of a tensor need more than 63 bits.
)");

  module.def(
      "shard_shape",
      [](const Integers& shape, const Integers& dims, const Integers& factors, bool right_to_left,
         const Integers& axis_sizes, const Integers& coordinates) {
        return to_tuple(reshard::local_shape(shape, {0, dims, factors, right_to_left}, axis_sizes,
                                             coordinates));
      },
      "shape"_a, "dims"_a, "factors"_a, "right_to_left"_a, "axis_sizes"_a, "coordinates"_a,
      R"(Return the shape of one shard of a tensor.

Args:
    shape: Shape of the whole tensor.
    dims: For each axis, the dimension that it splits, or -1.
    factors: For each axis, the factor of a strided split, or 1.
    right_to_left: Whether strided splits are applied after the others, as FSDP2 does.
    axis_sizes: Number of ranks along each axis.
    coordinates: Index of the shard along each axis.

Raises:
    ValueError: The lists for axes have different lengths, an axis splits a dimension that does not
        exist or has no rank, a coordinate is not on its axis, a size of the shape is negative, or
        a factor is not in ``1..2**24``.

>>> shard_shape([9, 4], [0, 0], [2, 1], False, [4, 2], [3, 0])
(1, 4)
>>> shard_shape([9, 4], [0, 0], [2, 1], True, [4, 2], [3, 0])
(0, 4)
)");
}

}  // namespace meshverse::bindings
