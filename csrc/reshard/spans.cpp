#include "reshard/spans.h"

#include <algorithm>
#include <utility>

namespace meshverse::reshard {
namespace {

// Not (a + b - 1) / b, which may need more than 64 bits.
std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return a / b + (a % b != 0); }

// min(index * step, end), whatever the index: the product may need more than 64 bits.
std::int64_t reached(std::int64_t index, std::int64_t step, std::int64_t end) {
  return index > end / step ? end : index * step;
}

// Appends the elements at indices start..stop-1 of `from`.
void append_slice(Spans& to, const Spans& from, std::int64_t start, std::int64_t stop) {
  std::int64_t passed = 0;
  for (const Span& span : from) {
    const std::int64_t length = span.stop - span.start;
    const std::int64_t first = std::max<std::int64_t>(start - passed, 0);
    const std::int64_t last = std::min(stop - passed, length);
    passed += length;
    if (first >= last) continue;
    const Span piece{span.start + first, span.start + last};
    if (!to.empty() && to.back().stop == piece.start) {
      to.back().stop = piece.stop;
    } else {
      to.push_back(piece);
    }
  }
}

// The pieces of a strided split (one for a plain split), as local indices.
struct Pieces {
  std::int64_t length;
  std::int64_t piece;  // length of each piece but the last
  Pieces(std::int64_t n, std::int64_t factor)
      : length(n), piece(std::max<std::int64_t>(ceil_div(n, factor), 1)) {}

  std::int64_t start(std::int64_t index) const { return reached(index, piece, length); }
  std::int64_t stop(std::int64_t index) const { return start(index + 1); }
  std::int64_t chunk(std::int64_t index, std::int64_t parts) const {
    return std::max<std::int64_t>(ceil_div(stop(index) - start(index), parts), 1);
  }
};

Spans take(const Spans& current, const Split& split, std::int64_t coordinate) {
  Spans taken;
  const Pieces pieces(count(current), split.factor);
  for (std::int64_t index = 0; index < split.factor; ++index) {
    const std::int64_t start = pieces.start(index), stop = pieces.stop(index);
    if (start == stop) break;
    const std::int64_t chunk = pieces.chunk(index, split.parts);
    append_slice(taken, current, start + reached(coordinate, chunk, stop - start),
                 start + reached(coordinate + 1, chunk, stop - start));
  }
  return taken;
}

// The coordinates along a split whose shards have some of the wanted elements, ascending.
std::vector<std::int64_t> coordinates_of(const Spans& current, const Split& split,
                                         const Spans& wanted) {
  std::vector<std::int64_t> found;
  const Pieces pieces(count(current), split.factor);
  for (const Run& run : overlap(current, wanted)) {
    std::int64_t first = run.mine;
    const std::int64_t end = run.mine + run.extent;
    while (first < end) {
      const std::int64_t index = first / pieces.piece;
      const std::int64_t start = pieces.start(index);
      const std::int64_t last = std::min(end, pieces.stop(index));
      const std::int64_t chunk = pieces.chunk(index, split.parts);
      for (std::int64_t c = (first - start) / chunk; c <= (last - 1 - start) / chunk; ++c) {
        found.push_back(c);
      }
      first = last;
    }
  }
  std::sort(found.begin(), found.end());
  found.erase(std::unique(found.begin(), found.end()), found.end());
  return found;
}

}  // namespace

std::int64_t count(const Spans& spans) {
  std::int64_t total = 0;
  for (const Span& span : spans) total += span.stop - span.start;
  return total;
}

std::vector<Run> overlap(const Spans& mine, const Spans& theirs) {
  std::vector<Run> runs;
  std::int64_t my_start = 0, their_start = 0;  // local index of the current spans
  for (std::size_t i = 0, k = 0; i < mine.size() && k < theirs.size();) {
    const Span &a = mine[i], &b = theirs[k];
    const std::int64_t start = std::max(a.start, b.start), stop = std::min(a.stop, b.stop);
    if (start < stop) {
      runs.push_back(
          {start, my_start + start - a.start, their_start + start - b.start, stop - start});
    }
    if (a.stop <= b.stop) {
      my_start += a.stop - a.start;
      ++i;
    } else {
      their_start += b.stop - b.start;
      ++k;
    }
  }
  return runs;
}

DimSharding::DimSharding(std::int64_t size, std::vector<Split> splits, bool right_to_left)
    : size_(size), splits_(std::move(splits)) {
  if (!right_to_left) return;
  const auto strided = std::stable_partition(splits_.begin(), splits_.end(),
                                             [](const Split& split) { return split.factor == 1; });
  std::reverse(strided, splits_.end());
  for (Split& split : splits_) split.factor = 1;
}

Spans DimSharding::spans(const std::vector<std::int64_t>& coordinates) const {
  Spans current{{0, size_}};
  for (std::size_t i = 0; i < splits_.size(); ++i) {
    current = take(current, splits_[i], coordinates[i]);
  }
  return current;
}

void DimSharding::visit(const Spans& wanted, const Visit& visit) const {
  std::vector<std::int64_t> coordinates;
  descend({{0, size_}}, wanted, coordinates, visit);
}

void DimSharding::descend(const Spans& current, const Spans& wanted,
                          std::vector<std::int64_t>& coordinates, const Visit& visit) const {
  const std::size_t depth = coordinates.size();
  if (depth == splits_.size()) return visit(coordinates, current);
  for (const std::int64_t coordinate : coordinates_of(current, splits_[depth], wanted)) {
    coordinates.push_back(coordinate);
    descend(take(current, splits_[depth], coordinate), wanted, coordinates, visit);
    coordinates.pop_back();
  }
}

}  // namespace meshverse::reshard
