// Choice of the replica of a shard that sends to each receiver.
#pragma once

#include <cstdint>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "reshard/holders.h"

namespace meshverse::reshard {

// The node of each rank.
class Nodes {
 public:
  // Consecutive blocks of `node_size` ranks; use 1 if nodes are unknown.
  // Throws std::invalid_argument unless both are at least 1.
  Nodes(std::int64_t world_size, std::int64_t node_size);
  // Takes the number of the node of every rank.
  explicit Nodes(std::vector<std::int64_t> node_of_rank);

  std::int64_t node_of(std::int64_t rank) const;
  std::vector<std::int64_t> ranks_of(std::int64_t node) const;
  std::int64_t world_size() const { return world_size_; }
  // Whether each node is a consecutive block of ranks, in order.
  bool are_blocks() const { return node_size_ > 0; }

 private:
  std::int64_t world_size_;
  std::int64_t node_size_ = 0;
  std::vector<std::int64_t> node_of_rank_;
  std::unordered_map<std::int64_t, std::vector<std::int64_t>> ranks_by_node_;
};

// Parts from..to-1 of a box that is cut into `of` equal parts.
struct Share {
  std::int64_t from;
  std::int64_t to;
  std::int64_t of;

  bool is_whole() const { return to - from == of; }
};

// The share of a box that is sent to, or received from, one peer.
struct Transfer {
  std::int64_t peer;
  Share share;
};

// A list of ranks: all replicas of a shard, or those on a node.
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

// Matching of receivers to senders if several ranks have the same shard, as one rank sees it.
//
// A rank that has the shard receives nothing. A receiver gets the shard from its own node if a rank
// there has it. All replicas on a node send about equally many bytes within the node, and all
// replicas send about equally many bytes to receivers whose node has no replica. With 2 senders and
// 5 receivers, receivers 0 and 2 get all from one sender, 1 and 3 from the other, and 4 gets half
// from each.
class Matching {
 public:
  // O(1) if the two sets of ranks are on different nodes, else O(targets * ranks of a node).
  Matching(const Replicas& sources, const Replicas& targets, const Nodes& nodes, std::int64_t rank);

  // Shares of a box that this rank receives. `bytes` is the size of the box. Callers pass a
  // different `turn` for each tensor, so that the senders take turns.
  std::vector<Transfer> receives(std::int64_t bytes, std::int64_t turn) const;
  // Shares of a box that this rank sends.
  std::vector<Transfer> sends(std::int64_t bytes, std::int64_t turn) const;

 private:
  // Receivers and their senders; `index` is this rank's index in one of the two lists.
  struct Group {
    std::int64_t index;
    RankList receivers;
    RankList senders;
  };
  void match_by_node(const Replicas& sources, const Replicas& targets, const Nodes& nodes,
                     std::int64_t rank);

  std::optional<Group> as_receiver_;
  std::vector<Group> as_sender_;  // receivers on its node, and receivers on other nodes
};

}  // namespace meshverse::reshard
