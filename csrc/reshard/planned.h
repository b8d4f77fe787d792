// A plan as it is handed out: flat lists of integers.
#pragma once

#include <cstdint>
#include <vector>

namespace meshverse::reshard {

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

}  // namespace meshverse::reshard
