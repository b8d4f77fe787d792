// Which replica of a shard sends to which receiver.
#pragma once

#include <cstdint>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "reshard/holders.h"

namespace meshverse::reshard {

// Which node each rank is on.
class Nodes {
 public:
  // Equal blocks of ranks in order; 1 where nothing is known of nodes.
  // Throws std::invalid_argument unless both are at least 1.
  Nodes(std::int64_t world_size, std::int64_t node_size);
  // The number of the node of every rank.
  explicit Nodes(std::vector<std::int64_t> node_of_rank);

  std::int64_t node_of(std::int64_t rank) const;
  std::vector<std::int64_t> ranks_of(std::int64_t node) const;
  std::int64_t world_size() const { return world_size_; }
  // Whether ranks of a node follow one another, and nodes do.
  bool are_blocks() const { return node_size_ > 0; }

 private:
  std::int64_t world_size_;
  std::int64_t node_size_ = 0;
  std::vector<std::int64_t> node_of_rank_;
  std::unordered_map<std::int64_t, std::vector<std::int64_t>> ranks_by_node_;
};

// Parts from..to-1 of `of` equal parts of a box.
struct Share {
  std::int64_t from;
  std::int64_t to;
  std::int64_t of;

  bool is_whole() const { return to - from == of; }
};

// A share of a shard that one rank sends to another.
struct Transfer {
  std::int64_t peer;
  Share share;
};

// Some ranks in order: all replicas of a shard, or those of a node.
class RankList {
 public:
  explicit RankList(Replicas replicas) : replicas_(std::move(replicas)) {}
  explicit RankList(std::vector<std::int64_t> ranks) : ranks_(std::move(ranks)) {}

  std::int64_t size() const;
  std::int64_t at(std::int64_t index) const;

 private:
  std::optional<Replicas> replicas_;
  std::vector<std::int64_t> ranks_;
};

// Who sends a shard's replicas to the ranks that want it, when several have it; as one rank sees
// it.
//
// A rank that has it already gets nothing. A rank with a replica on its node gets it from there.
// All replicas of a node send about equally much to their node, and all replicas about equally much
// to the ranks that have none on theirs. With 2 senders and 5 receivers, receivers 0 and 2 get all
// from one sender, 1 and 3 from the other, and receiver 4 gets a half from each.
class Matching {
 public:
  // O(1) where the two sets of ranks are on different nodes, else O(targets * ranks of a node).
  Matching(const Replicas& sources, const Replicas& targets, const Nodes& nodes, std::int64_t rank);

  // Shares that this rank gets. `bytes` are those of the box; `turn` differs between boxes.
  std::vector<Transfer> receives(std::int64_t bytes, std::int64_t turn) const;
  // Shares that this rank sends.
  std::vector<Transfer> sends(std::int64_t bytes, std::int64_t turn) const;

 private:
  // Receivers, and the senders that serve them; this rank is number `index` of the one or the
  // other.
  struct Group {
    std::int64_t index;
    RankList receivers;
    RankList senders;
  };
  void match_by_node(const Replicas& sources, const Replicas& targets, const Nodes& nodes,
                     std::int64_t rank);

  std::optional<Group> as_receiver_;
  std::vector<Group> as_sender_;  // on its node, and beyond
};

}  // namespace meshverse::reshard
