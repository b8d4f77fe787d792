// Which elements of one dimension of a tensor each shard has.
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

// A shard's elements of one dimension: ascending, and in the order in which the shard stores it.
using Spans = std::vector<Span>;

std::int64_t count(const Spans& spans);

// One mesh axis that splits a dimension.
//
// factor 1 is torch's Shard: `torch.chunk` into as many parts as the axis has ranks, of which the
// last may be shorter or empty. A larger factor is torch's _StridedShard: the dimension is chunked
// into `factor` pieces first, each of which is chunked over the axis, and a rank has its part of
// each piece.
struct Split {
  std::size_t axis;  // of the holders
  std::int64_t parts;
  std::int64_t factor;
};

// The same elements in two shards.
struct Run {
  std::int64_t global;  // first element, in the dimension
  std::int64_t mine;    // where it is in my shard
  std::int64_t theirs;  // where it is in the other shard
  std::int64_t extent;
};

// Returns the elements that two shards have in common. O(spans).
std::vector<Run> overlap(const Spans& mine, const Spans& theirs);

// How the axes of a mesh split one dimension.
class DimSharding {
 public:
  // Splits in the order of the axes. With `right_to_left`, strided splits are plain chunks of what
  // the plain splits leave: what FSDP2 does to a tensor that is split already. The two differ only
  // where the pieces of a strided split are not equally long.
  DimSharding(std::int64_t size, std::vector<Split> splits, bool right_to_left);

  // In the order in which they are applied.
  const std::vector<Split>& splits() const { return splits_; }

  // Elements of the shard at these coordinates, one coordinate for each split.
  Spans spans(const std::vector<std::int64_t>& coordinates) const;

  // Visits every shard that has some of the wanted elements, with its coordinates and spans.
  // Costs what is visited, whatever other shards there are.
  using Visit = std::function<void(const std::vector<std::int64_t>&, const Spans&)>;
  void visit(const Spans& wanted, const Visit& visit) const;

 private:
  void descend(const Spans& current, const Spans& wanted, std::vector<std::int64_t>& coordinates,
               const Visit& visit) const;

  std::int64_t size_;
  std::vector<Split> splits_;
};

}  // namespace meshverse::reshard
