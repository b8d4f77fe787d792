// Costs of placements of a mesh on a cluster.
#pragma once

#include <cstdint>
#include <vector>

namespace meshverse {

// Counts the ring steps that leave a part of a cluster, over all groups of each axis of a mesh.
//
// A group with positions on n parts has n such steps, or none if n is 1. Positions are numbered in
// row-major order. `placement` has the spot at each position, and `part_of_spot` the part of each
// spot, for each level of the cluster.
//
// Returns numbers in row-major order, shape (axes, levels). O(positions * axes * levels).
// Throws std::invalid_argument unless `placement` has as many positions as `shape`, all levels have
// as many spots, spots and parts are not negative, and each spot of `placement` has parts.
std::vector<std::int64_t> ring_steps(const std::vector<std::int64_t>& shape,
                                     const std::vector<std::vector<std::int64_t>>& part_of_spot,
                                     const std::vector<std::int64_t>& placement);

}  // namespace meshverse
