#include "reshard/senders.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace meshverse::reshard {
namespace {

// Senders share a box in parts of at least kSmallestShare bytes, and in kMostShares at most.
constexpr std::int64_t kSmallestShare = 4096;
constexpr std::int64_t kMostShares = 8;

// If each sender has at least this many receivers, boxes are not shared: a sender with one receiver
// more than another then sends at most a quarter more.
constexpr std::int64_t kManyReceivers = 4;

// The receivers that share senders. Each receiver before `first` gets all from one sender; the
// senders take turns. The other n receivers are fewer than the senders: their boxes are laid end to
// end and cut into equal parts, one for each sender.
struct Rest {
  std::int64_t first;    // index of the first of these receivers
  std::int64_t n;        // number of these receivers
  std::int64_t senders;  // number of senders that share them
  std::int64_t turn;     // index of the first of these senders

  Rest(std::int64_t n_receivers, std::int64_t n_senders, std::int64_t bytes, std::int64_t box)
      : first(n_receivers / n_senders * n_senders), n(n_receivers - first), senders(n), turn(0) {
    if (n_receivers >= kManyReceivers * n_senders) return;
    turn = box % n_senders;
    const std::int64_t shares = std::clamp<std::int64_t>(bytes / kSmallestShare, 1, kMostShares);
    senders = std::min(n_senders, n * shares);
  }

  // The share that sender number `index` of these sends to receiver number `first + receiver`.
  Share share(std::int64_t receiver, std::int64_t index) const {
    const std::int64_t start = receiver * senders, stop = start + senders;
    return {std::max(index * n, start) - start, std::min((index + 1) * n, stop) - start, senders};
  }
};

bool are_on_other_nodes(const Replicas& a, const Replicas& b, const Nodes& nodes) {
  const auto [a_first, a_last] = a.bounds();
  const auto [b_first, b_last] = b.bounds();
  return nodes.are_blocks() && (nodes.node_of(a_last) < nodes.node_of(b_first) ||
                                nodes.node_of(b_last) < nodes.node_of(a_first));
}

}  // namespace

Nodes::Nodes(std::int64_t world_size, std::int64_t node_size)
    : world_size_(world_size), node_size_(node_size) {
  if (world_size < 1 || node_size < 1) {
    throw std::invalid_argument("world_size " + std::to_string(world_size) + " and node_size " +
                                std::to_string(node_size) + " must be at least 1");
  }
}

Nodes::Nodes(std::vector<std::int64_t> node_of_rank)
    : world_size_(static_cast<std::int64_t>(node_of_rank.size())),
      node_of_rank_(std::move(node_of_rank)) {
  for (std::size_t rank = 0; rank < node_of_rank_.size(); ++rank) {
    ranks_by_node_[node_of_rank_[rank]].push_back(static_cast<std::int64_t>(rank));
  }
}

std::int64_t Nodes::node_of(std::int64_t rank) const {
  return node_size_ ? rank / node_size_ : node_of_rank_.at(static_cast<std::size_t>(rank));
}

std::vector<std::int64_t> Nodes::ranks_of(std::int64_t node) const {
  if (!node_size_) return ranks_by_node_.at(node);
  std::vector<std::int64_t> ranks;
  const std::int64_t stop = std::min((node + 1) * node_size_, world_size_);
  for (std::int64_t rank = node * node_size_; rank < stop; ++rank) ranks.push_back(rank);
  return ranks;
}

std::int64_t RankList::size() const {
  return replicas_ ? replicas_->size() : static_cast<std::int64_t>(ranks_.size());
}

std::int64_t RankList::at(std::int64_t index) const {
  return replicas_ ? replicas_->rank_at(index) : ranks_[static_cast<std::size_t>(index)];
}

Matching::Matching(const Replicas& sources, const Replicas& targets, const Nodes& nodes,
                   std::int64_t rank) {
  if (!are_on_other_nodes(sources, targets, nodes)) {
    match_by_node(sources, targets, nodes, rank);
    return;
  }
  if (const auto index = targets.index_of(rank)) {
    as_receiver_ = Group{*index, RankList(targets), RankList(sources)};
  } else if (const auto own = sources.index_of(rank)) {
    as_sender_.push_back({*own, RankList(targets), RankList(sources)});
  }
}

void Matching::match_by_node(const Replicas& sources, const Replicas& targets, const Nodes& nodes,
                             std::int64_t rank) {
  struct OnNode {
    std::vector<std::int64_t> receivers, senders;
  };
  std::unordered_map<std::int64_t, OnNode> on_nodes;
  std::vector<std::int64_t> remote;  // receivers without a sender on their node
  for (std::int64_t index = 0; index < targets.size(); ++index) {
    const std::int64_t receiver = targets.rank_at(index);
    if (sources.index_of(receiver)) continue;
    const auto [found, is_new] = on_nodes.try_emplace(nodes.node_of(receiver));
    OnNode& node = found->second;
    if (is_new) {
      for (const std::int64_t other : nodes.ranks_of(found->first)) {
        if (sources.index_of(other)) node.senders.push_back(other);
      }
    }
    (node.senders.empty() ? remote : node.receivers).push_back(receiver);
  }
  const auto place = [&](const std::vector<std::int64_t>& ranks) -> std::optional<std::int64_t> {
    const auto found = std::find(ranks.begin(), ranks.end(), rank);
    if (found == ranks.end()) return std::nullopt;
    return found - ranks.begin();
  };
  if (const auto own = on_nodes.find(nodes.node_of(rank)); own != on_nodes.end()) {
    const OnNode& node = own->second;
    if (const auto index = place(node.receivers)) {
      as_receiver_ = Group{*index, RankList(node.receivers), RankList(node.senders)};
    } else if (const auto mine = place(node.senders); mine && !node.receivers.empty()) {
      as_sender_.push_back({*mine, RankList(node.receivers), RankList(node.senders)});
    }
  }
  if (const auto index = place(remote)) {
    as_receiver_ = Group{*index, RankList(std::move(remote)), RankList(sources)};
  } else if (const auto mine = sources.index_of(rank); mine && !remote.empty()) {
    as_sender_.push_back({*mine, RankList(std::move(remote)), RankList(sources)});
  }
}

std::vector<Transfer> Matching::receives(std::int64_t bytes, std::int64_t turn) const {
  if (!as_receiver_) return {};
  const auto& [index, receivers, senders] = *as_receiver_;
  const std::int64_t n = senders.size();
  const Rest rest(receivers.size(), n, bytes, turn);
  if (index < rest.first) return {{senders.at(index % n), {0, 1, 1}}};
  std::vector<Transfer> transfers;
  const std::int64_t receiver = index - rest.first;
  const std::int64_t last = ((receiver + 1) * rest.senders - 1) / rest.n;
  for (std::int64_t k = receiver * rest.senders / rest.n; k <= last; ++k) {
    transfers.push_back({senders.at((k + rest.turn) % n), rest.share(receiver, k)});
  }
  return transfers;
}

std::vector<Transfer> Matching::sends(std::int64_t bytes, std::int64_t turn) const {
  std::vector<Transfer> transfers;
  for (const auto& [index, receivers, senders] : as_sender_) {
    const std::int64_t n = senders.size();
    const Rest rest(receivers.size(), n, bytes, turn);
    for (std::int64_t receiver = index; receiver < rest.first; receiver += n) {
      transfers.push_back({receivers.at(receiver), {0, 1, 1}});
    }
    const std::int64_t k =
        (index - rest.turn + n) % n;  // senders.at((k + rest.turn) % n) is this rank
    if (rest.n == 0 || k >= rest.senders) continue;
    const std::int64_t last = ((k + 1) * rest.n - 1) / rest.senders;
    for (std::int64_t receiver = k * rest.n / rest.senders; receiver <= last; ++receiver) {
      transfers.push_back({receivers.at(rest.first + receiver), rest.share(receiver, k)});
    }
  }
  return transfers;
}

}  // namespace meshverse::reshard
