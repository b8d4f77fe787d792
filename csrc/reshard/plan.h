// Plan of one rank's transfers when tensors are resharded: what it sends, receives and keeps.
#pragma once

#include <cstdint>
#include <vector>

#include "reshard/holders.h"
#include "reshard/planned.h"
#include "reshard/senders.h"

namespace meshverse::reshard {

// Sharding of one tensor over the holders of one side (source or target).
struct Sharding {
  std::size_t holders;                // index in the list of all holders
  std::vector<std::int64_t> dims;     // by axis: the dimension that it splits, or -1
  std::vector<std::int64_t> factors;  // by axis: see Split
  bool right_to_left;                 // see DimSharding
};

// One tensor, or a box of one, to transfer from the source to the target.
struct Move {
  std::vector<std::int64_t> shape;
  std::int64_t itemsize;  // bytes of an element in messages
  Sharding source;
  Sharding target;
};

// Plans the transfers of one rank. Throws std::invalid_argument if a sharding does not fit its
// shape or holders, if round_bytes is less than an element or a tensor would need more than 2**24
// rounds, if this rank or a holder is outside the world, or if the world has more than 2**31 ranks;
// std::overflow_error if the bytes of a tensor need more than 63 bits.
Plan plan(const std::vector<Holders>& holders, const std::vector<Move>& moves, const Nodes& nodes,
          std::int64_t rank, std::int64_t round_bytes);

// The shape of the local tensor at these coordinates of the holders. Throws std::invalid_argument
// if they or the sharding do not fit the axes or the shape.
std::vector<std::int64_t> local_shape(const std::vector<std::int64_t>& shape,
                                      const Sharding& sharding,
                                      const std::vector<std::int64_t>& axis_sizes,
                                      const std::vector<std::int64_t>& coordinates);

}  // namespace meshverse::reshard
