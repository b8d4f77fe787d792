// Rank maps: which global rank stands at which position.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fingerprint.h"
#include "rank_array.h"

namespace meshverse {

// An immutable map position -> global rank, nearly always the identity.
//
// Maps are interned process-wide: equal content is the same object, so that pointers are compared
// where contents are meant. The table holds its maps weakly.
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

  // Whether the ranks ascend, as those of the identity do. O(1).
  bool is_sorted() const { return positions_by_rank_.empty(); }

  // The same ranks in ascending order: what maps over one set of ranks have in common.
  Ptr sorted() const;

  // Every rank by position, as int32; std::invalid_argument where one does not fit.
  RankArray ranks() const;

  // The hash that 64-bit CPython, 3.8 and newer, gives to the tuple of these ranks. O(size),
  // without the tuple. Source: tuple_hash in CPython's Objects/tupleobject.c, which is xxHash's
  // round; and an int below 2**61 - 1 is its own hash. std::invalid_argument for more than 2**31
  // ranks.
  std::int64_t tuple_hash() const;

  // Stands for the content across processes and machines. O(1).
  const Fingerprint& fingerprint() const { return fingerprint_; }

  // "identity of 8", "4 ranks: 0, 2, 4, 6"; long ones are shortened.
  std::string to_string() const;
  // The same for sentences: "ranks 0 to 7", "ranks 0, 2, 4, 6".
  std::string in_words() const;

 private:
  friend class RankMapTable;

  RankMap(std::int64_t size, std::vector<std::int64_t> ranks, const Fingerprint& fingerprint);

  std::int64_t size_;
  std::vector<std::int64_t> ranks_;              // empty for the identity
  std::vector<std::int64_t> positions_by_rank_;  // empty where the ranks already ascend
  Fingerprint fingerprint_;
};

}  // namespace meshverse
