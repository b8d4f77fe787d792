// The result of planning: lists of integers.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

namespace meshverse::reshard {

// Step, round, peer, whether it is sent, bytes, index of its first box in `boxes`, number of boxes.
using Message = std::array<std::int64_t, 7>;

// The boxes that one rank sends, receives and keeps. A box (a range of elements along every
// dimension) is
//   in `boxes`: tensor, first byte in the message, number of dimensions n, n first elements in the
//               local tensor, n extents
//   in `kept`: tensor, n, n first elements in the source's local tensor, n in the target's, n
//              extents
struct Plan {
  // Sorted by (step, round), the order in which all ranks exchange messages. In step s, a rank
  // sends to rank + s and receives from rank - s, modulo the world size. If more than `round_bytes`
  // go to one peer, they are exchanged in several rounds.
  std::vector<Message> messages;
  std::vector<std::int64_t> boxes;
  std::vector<std::int64_t> kept;
};

}  // namespace meshverse::reshard
