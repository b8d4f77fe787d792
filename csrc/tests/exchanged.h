// A reshard carried out element by element on all ranks of a small world, by its plans.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "reshard/plan.h"

namespace meshverse::reshard {

using Integers = std::vector<std::int64_t>;

// Chunk `index` of a list, as torch.chunk cuts it; empty beyond the last chunk.
inline Integers chunk(const Integers& list, std::int64_t parts, std::int64_t index) {
  const auto size = static_cast<std::int64_t>(list.size());
  const std::int64_t length = (size + parts - 1) / parts;
  const std::int64_t from = std::min(size, index * length);
  const std::int64_t to = std::min(size, from + length);
  return {list.begin() + from, list.begin() + to};
}

// The elements of one dimension that the shard at these coordinates has, in the order in which it
// stores them.
inline Integers elements(std::int64_t size, std::int64_t dim, const Sharding& sharding,
                         const Integers& axis_sizes, const Integers& coordinates) {
  std::vector<std::size_t> order;
  for (std::size_t axis = 0; axis < axis_sizes.size(); ++axis) {
    if (sharding.dims[axis] == dim) order.push_back(axis);
  }
  if (sharding.right_to_left) {
    const auto strided = std::stable_partition(
        order.begin(), order.end(), [&](std::size_t axis) { return sharding.factors[axis] == 1; });
    std::reverse(strided, order.end());
  }
  Integers list;
  for (std::int64_t i = 0; i < size; ++i) list.push_back(i);
  for (const std::size_t axis : order) {
    // Applied from right to left, a strided split is a plain one of what the others left.
    const std::int64_t factor = sharding.right_to_left ? 1 : sharding.factors[axis];
    Integers own;
    for (std::int64_t piece = 0; piece < factor; ++piece) {
      const Integers part = chunk(chunk(list, factor, piece), axis_sizes[axis], coordinates[axis]);
      own.insert(own.end(), part.begin(), part.end());
    }
    list = own;
  }
  return list;
}

// A local tensor: its shape, and for each element its index in the whole tensor, or -1.
struct Local {
  Integers shape;
  Integers values;

  std::int64_t& at(const Integers& place) {
    std::int64_t index = 0;
    for (std::size_t dim = 0; dim < shape.size(); ++dim) index = index * shape[dim] + place[dim];
    return values[static_cast<std::size_t>(index)];
  }
  bool has(const Integers& place) const {
    for (std::size_t dim = 0; dim < shape.size(); ++dim) {
      if (place[dim] < 0 || place[dim] >= shape[dim]) return false;
    }
    return true;
  }
};

// Calls `visit` with every place of a box, the last dimension changing fastest.
template <class Visit>
void each_place(const Integers& extent, const Visit& visit) {
  std::int64_t count = 1;
  for (const std::int64_t size : extent) count *= size;
  for (std::int64_t index = 0; index < count; ++index) {
    Integers place(extent.size());
    std::int64_t rest = index;
    for (std::size_t dim = extent.size(); dim-- > 0;) {
      place[dim] = rest % extent[dim];
      rest /= extent[dim];
    }
    visit(place);
  }
}

inline Integers sum(const Integers& one, const Integers& other) {
  Integers both(one);
  for (std::size_t i = 0; i < both.size(); ++i) both[i] += other[i];
  return both;
}

// The local tensor of a rank; nullopt if it holds none.
inline std::optional<Local> local_of(const Move& move, const Sharding& sharding,
                                     const Holders& holders, std::int64_t rank) {
  const auto coordinates = holders.coordinates_of(rank);
  if (!coordinates) return std::nullopt;
  std::vector<Integers> lists;
  Local local;
  for (std::size_t dim = 0; dim < move.shape.size(); ++dim) {
    lists.push_back(elements(move.shape[dim], static_cast<std::int64_t>(dim), sharding,
                             holders.axes().shape(), *coordinates));
    local.shape.push_back(static_cast<std::int64_t>(lists.back().size()));
  }
  each_place(local.shape, [&](const Integers& place) {
    std::int64_t index = 0;
    for (std::size_t dim = 0; dim < place.size(); ++dim) {
      index = index * move.shape[dim] + lists[dim][static_cast<std::size_t>(place[dim])];
    }
    local.values.push_back(index);
  });
  return local;
}

// Carries out the plans of all ranks. Returns what is wrong with them; "" if nothing is.
class Exchange {
 public:
  Exchange(const std::vector<Holders>& holders, const std::vector<Move>& moves, const Nodes& nodes,
           std::int64_t round_bytes)
      : holders_(holders), moves_(moves), world_size_(nodes.world_size()), bytes_(round_bytes) {
    for (std::int64_t rank = 0; rank < world_size_; ++rank) {
      plans_.push_back(plan(holders, moves, nodes, rank, round_bytes));
    }
  }

  std::string mistake() {
    fill();
    for (std::int64_t rank = 0; rank < world_size_; ++rank) keep(rank);
    for (std::int64_t rank = 0; rank < world_size_; ++rank) exchange(rank, true);
    for (std::int64_t rank = 0; rank < world_size_; ++rank) exchange(rank, false);
    if (!sent_.empty()) return "a message was not received";
    for (const auto& [key, target] : targets_) {
      const auto& [tensor, rank] = key;
      const Move& move = moves_[static_cast<std::size_t>(tensor)];
      const auto expected = local_of(move, move.target, holders_[move.target.holders], rank);
      if (target.values != expected->values) return "a target lacks elements, or has wrong ones";
    }
    return mistake_;
  }

 private:
  using Key = std::pair<std::int64_t, std::int64_t>;  // tensor, rank

  void fill() {
    for (std::size_t i = 0; i < moves_.size(); ++i) {
      const Move& move = moves_[i];
      for (std::int64_t rank = 0; rank < world_size_; ++rank) {
        const Key key{static_cast<std::int64_t>(i), rank};
        if (auto local = local_of(move, move.source, holders_[move.source.holders], rank)) {
          sources_[key] = *local;
        }
        if (auto local = local_of(move, move.target, holders_[move.target.holders], rank)) {
          std::fill(local->values.begin(), local->values.end(), -1);
          targets_[key] = *local;
        }
      }
    }
  }

  void write(std::int64_t tensor, std::int64_t rank, const Integers& place, std::int64_t value) {
    const auto found = targets_.find({tensor, rank});
    if (found == targets_.end() || !found->second.has(place)) return fail("outside the target");
    std::int64_t& element = found->second.at(place);
    if (element != -1) return fail("an element arrives twice");
    element = value;
  }

  std::int64_t read(std::int64_t tensor, std::int64_t rank, const Integers& place) {
    const auto found = sources_.find({tensor, rank});
    if (found == sources_.end() || !found->second.has(place)) {
      fail("outside the source");
      return -2;
    }
    return found->second.at(place);
  }

  void keep(std::int64_t rank) {
    const Integers& kept = plans_[static_cast<std::size_t>(rank)].kept;
    for (auto at = kept.begin(); at != kept.end();) {
      const std::int64_t tensor = *at++, n = *at++;
      const Integers from(at, at + n), to(at + n, at + 2 * n), extent(at + 2 * n, at + 3 * n);
      at += 3 * n;
      each_place(extent, [&](const Integers& place) {
        write(tensor, rank, sum(to, place), read(tensor, rank, sum(from, place)));
      });
    }
  }

  void exchange(std::int64_t rank, bool sends) {
    const Plan& own = plans_[static_cast<std::size_t>(rank)];
    std::pair<std::int64_t, std::int64_t> last{-1, -1};
    for (const auto& message : own.messages) {
      const std::int64_t step = message[0], round = message[1], peer = message[2];
      if (std::pair{step, round} < last) fail("messages are not in order");
      last = {step, round};
      if ((message[3] == 1) != sends) continue;
      const std::int64_t other = sends ? rank + step : rank - step;
      if (peer != ((other % world_size_) + world_size_) % world_size_) fail("the peer of a step");
      if (message[4] < 1 || message[4] > bytes_) fail("the bytes of a message");
      const std::tuple key{sends ? rank : peer, sends ? peer : rank, round};
      if (sends) {
        Integers content(static_cast<std::size_t>(message[4]), -3);
        boxes(own, message, [&](std::int64_t tensor, std::int64_t byte, const Integers& place) {
          place_in(content, byte) = read(tensor, rank, place);
        });
        if (!sent_.emplace(key, content).second) fail("two messages of one round");
      } else {
        const auto found = sent_.find(key);
        if (found == sent_.end()) return fail("a message was not sent");
        Integers content = std::move(found->second);
        sent_.erase(found);
        if (static_cast<std::int64_t>(content.size()) != message[4]) {
          return fail("sender and receiver disagree on the bytes");
        }
        boxes(own, message, [&](std::int64_t tensor, std::int64_t byte, const Integers& place) {
          write(tensor, rank, place, place_in(content, byte));
        });
      }
    }
  }

  // Calls `visit` with each element of a message: its tensor, first byte, and place in the local
  // tensor.
  template <class Visit>
  void boxes(const Plan& own, const Message& message, const Visit& visit) {
    auto at = own.boxes.begin() + message[5];
    for (std::int64_t count = 0; count < message[6]; ++count) {
      const std::int64_t tensor = *at++, first = *at++, n = *at++;
      const Integers from(at, at + n), extent(at + n, at + 2 * n);
      at += 2 * n;
      const std::int64_t itemsize = moves_[static_cast<std::size_t>(tensor)].itemsize;
      std::int64_t byte = first;
      each_place(extent, [&](const Integers& place) {
        if (byte % itemsize != 0) fail("an element is not aligned");
        visit(tensor, byte, sum(from, place));
        byte += itemsize;
      });
    }
  }

  std::int64_t& place_in(Integers& content, std::int64_t byte) {
    if (byte >= 0 && byte < static_cast<std::int64_t>(content.size())) {
      return content[static_cast<std::size_t>(byte)];
    }
    fail("outside the message");
    return outside_;
  }

  void fail(const std::string& what) {
    if (mistake_.empty()) mistake_ = what;
  }

  const std::vector<Holders>& holders_;
  const std::vector<Move>& moves_;
  std::int64_t world_size_;
  std::int64_t bytes_;
  std::vector<Plan> plans_;
  std::map<Key, Local> sources_, targets_;
  std::map<std::tuple<std::int64_t, std::int64_t, std::int64_t>, Integers> sent_;
  std::int64_t outside_ = 0;
  std::string mistake_;
};

}  // namespace meshverse::reshard
