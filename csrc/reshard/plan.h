// What one rank sends, receives and keeps when tensors move from one set of shards to another.
#pragma once

#include <cstdint>
#include <vector>

#include "reshard/holders.h"
#include "reshard/senders.h"

namespace meshverse::reshard {

// How one side lays a tensor out.
struct Sharding {
  std::size_t holders;                // their number in the list of all holders
  std::vector<std::int64_t> dims;     // by axis: the dimension that it splits, or -1
  std::vector<std::int64_t> factors;  // by axis: see Split
  bool right_to_left;                 // see DimSharding
};

// One tensor, from one side to the other.
struct Move {
  std::vector<std::int64_t> shape;
  std::int64_t itemsize;  // bytes of an element on its way
  Sharding source;
  Sharding target;
};

// Boxes of elements as flat lists of integers, by box:
//   of messages: tensor, first byte in the message, dimensions n, n first elements of the local
//                tensor, n extents
//   kept: tensor, n, n first elements of the source's local tensor, n of the target's, n extents
struct Plan {
  // By message: step, round, peer, whether it is sent, bytes, first integer of its boxes, boxes.
  // In the order of (step, round), in which all ranks exchange them. In step s a rank sends to
  // rank + s and receives from rank - s, modulo the world; a message of more than `round_bytes` is
  // exchanged in several rounds.
  std::vector<std::int64_t> messages;
  std::vector<std::int64_t> boxes;
  std::vector<std::int64_t> kept;
};

// Throws std::invalid_argument where a sharding does not fit its shape or holders, round_bytes are
// less than an element's, or this rank is outside the world.
Plan plan(const std::vector<Holders>& holders, const std::vector<Move>& moves, const Nodes& nodes,
          std::int64_t rank, std::int64_t round_bytes);

// The shape of the local tensor at these coordinates of the holders.
std::vector<std::int64_t> local_shape(const std::vector<std::int64_t>& shape,
                                      const Sharding& sharding,
                                      const std::vector<std::int64_t>& axis_sizes,
                                      const std::vector<std::int64_t>& coordinates);

}  // namespace meshverse::reshard
