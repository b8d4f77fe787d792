// Elements of each shard along one dimension of a tensor.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

namespace meshverse::reshard {

// Elements start..stop-1 of a dimension.
struct Span {
  std::int64_t start;
  std::int64_t stop;
};

// A shard's elements along one dimension, in ascending order, in which the shard stores them.
using Spans = std::vector<Span>;

std::int64_t count(const Spans& spans);

// One mesh axis that splits a dimension.
//
// Factor 1 is torch's Shard: `torch.chunk` into as many parts as the axis has ranks, of which the
// last may be shorter or empty. A larger factor is torch's _StridedShard: the dimension is first
// cut into `factor` pieces, each piece is chunked over the axis, and a rank has its chunk of each
// piece.
struct Split {
  std::size_t axis;  // index of the holders' axis
  std::int64_t parts;
  std::int64_t factor;
};

// A run of elements that two shards have in common.
struct Run {
  std::int64_t global;  // index of the first element in the dimension
  std::int64_t mine;    // index of the first element in this rank's shard
  std::int64_t theirs;  // index of the first element in the other shard
  std::int64_t extent;
};

// The elements that two shards have in common. O(number of spans).
std::vector<Run> overlap(const Spans& mine, const Spans& theirs);

// The way in which the axes of a mesh split one dimension.
class DimSharding {
 public:
  // Takes splits in the order of the axes, and applies them in this order. With `right_to_left`, it
  // applies plain splits first, and then strided splits from the last axis to the first, each of
  // them as a plain split of what is left: so FSDP2
  // splits a tensor that is split already. The two orders differ only if pieces are not equally
  // long.
  DimSharding(std::int64_t size, std::vector<Split> splits, bool right_to_left);

  // The splits in the order in which they are applied.
  const std::vector<Split>& splits() const { return splits_; }

  // The elements of the shard at these coordinates; there is one coordinate for each split.
  Spans spans(const std::vector<std::int64_t>& coordinates) const;

  // Calls `visit` for every shard that has some of the wanted elements, with its coordinates and
  // spans. The cost depends only on these shards.
  using Visit = std::function<void(const std::vector<std::int64_t>&, const Spans&)>;
  void visit(const Spans& wanted, const Visit& visit) const;

 private:
  void descend(const Spans& current, const Spans& wanted, std::vector<std::int64_t>& coordinates,
               const Visit& visit) const;

  std::int64_t size_;
  std::vector<Split> splits_;
};

}  // namespace meshverse::reshard
