// Rank maps: the global rank at each position of a universe.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fingerprint.h"
#include "rank_array.h"

namespace meshverse {

// An immutable map position -> global rank, nearly always the identity.
//
// Maps are interned in each process: equal maps are one object, so comparing pointers compares
// contents. The table holds weak references.
class RankMap {
 public:
  using Ptr = std::shared_ptr<RankMap>;

  // Position p holds rank p, for p in 0..size-1; std::invalid_argument unless size >= 1. O(1).
  static Ptr identity(std::int64_t size);

  // Position p holds ranks[p]. 0..n-1 in order gives identity(n).
  // Throws std::invalid_argument unless the ranks are unique, >= 0, and at least one.
  static Ptr from_ranks(std::vector<std::int64_t> ranks);

  std::int64_t size() const { return size_; }
  bool is_identity() const { return ranks_.empty(); }

  // std::out_of_range unless 0 <= position < size.
  std::int64_t rank_at(std::int64_t position) const;

  // The position that holds this global rank, if any. O(1) for the identity, else O(log size).
  std::optional<std::int64_t> position_of(std::int64_t rank) const;

  // The lowest and the highest rank. O(1).
  std::pair<std::int64_t, std::int64_t> bounds() const;

  // Whether the ranks ascend, as those of the identity do. O(1).
  bool is_sorted() const { return positions_by_rank_.empty(); }

  // The map of the same ranks in ascending order: one object for all maps over a set of ranks.
  Ptr sorted() const;

  // Every rank by position, as int32; std::invalid_argument if one does not fit.
  RankArray ranks() const;

  // The hash of the tuple of these ranks in 64-bit CPython, 3.8 and newer, without creating the
  // tuple. O(size). Source: tuplehash in CPython's Objects/tupleobject.c, after xxHash; an int
  // below 2**61 - 1 is its own hash. std::invalid_argument for more than 2**31 ranks.
  std::int64_t tuple_hash() const;

  // Hash of the content, the same in all processes and on all machines. O(1).
  const Fingerprint& fingerprint() const { return fingerprint_; }

  // "identity of 8", "4 ranks: 0, 2, 4, 6"; long lists are shortened.
  std::string to_string() const;
  // For sentences: "ranks 0 to 7", "ranks 0, 2, 4, 6"; long lists are shortened.
  std::string in_words() const;

 private:
  friend class RankMapTable;

  RankMap(std::int64_t size, std::vector<std::int64_t> ranks, const Fingerprint& fingerprint);

  std::int64_t size_;
  std::vector<std::int64_t> ranks_;              // empty for the identity
  std::vector<std::int64_t> positions_by_rank_;  // empty if the ranks ascend
  Fingerprint fingerprint_;
};

}  // namespace meshverse
