// Packing of boxes into messages of bounded size.
#pragma once

#include <cstdint>
#include <vector>

#include "reshard/planned.h"
#include "reshard/senders.h"

namespace meshverse::reshard {

// A range of elements along every dimension of a tensor, which one rank sends to another.
struct Box {
  std::int64_t tensor;
  std::int64_t itemsize;
  std::vector<std::int64_t> global;  // first element in the whole tensor
  std::vector<std::int64_t> mine;    // first element in this rank's local tensor
  std::vector<std::int64_t> extent;

  std::int64_t bytes() const;
  // Removes the first `extent_there` elements along a dimension from the box, and returns them.
  Box split_off(std::size_t dim, std::int64_t extent_there);
};

// The part of a box that one of several senders sends; it may have no elements.
Box part_of(const Box& box, const Share& share);

// Packs the boxes for one peer into messages, and appends them to `plan`, which is sorted later.
// Sender and receiver derive the same order of boxes: large elements first, so that elements are
// aligned.
void pack(std::vector<Box>& boxes, std::int64_t step, std::int64_t peer, bool is_sent,
          std::int64_t round_bytes, Plan& plan);

}  // namespace meshverse::reshard
