#include "reshard/plan.h"

#include <algorithm>
#include <map>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

#include "reshard/packing.h"
#include "reshard/spans.h"

namespace meshverse::reshard {
namespace {

using Coordinates = std::vector<std::int64_t>;

std::vector<DimSharding> dim_shardings(const std::vector<std::int64_t>& shape,
                                       const Sharding& sharding,
                                       const std::vector<std::int64_t>& axis_sizes) {
  const std::size_t n_axes = axis_sizes.size();
  if (sharding.dims.size() != n_axes || sharding.factors.size() != n_axes) {
    throw std::invalid_argument(std::to_string(sharding.dims.size()) + " dimensions and " +
                                std::to_string(sharding.factors.size()) + " factors for " +
                                std::to_string(n_axes) + " axes: give one of each an axis");
  }
  std::vector<std::vector<Split>> splits(shape.size());
  for (std::size_t axis = 0; axis < n_axes; ++axis) {
    const std::int64_t dim = sharding.dims[axis];
    if (dim == -1) continue;
    if (dim < -1 || dim >= static_cast<std::int64_t>(shape.size()) || sharding.factors[axis] < 1) {
      throw std::invalid_argument(
          "axis " + std::to_string(axis) + " splits dimension " + std::to_string(dim) +
          " by factor " + std::to_string(sharding.factors[axis]) + " of a tensor of " +
          std::to_string(shape.size()) + " dimensions: dimensions count from 0, factors from 1");
    }
    splits[static_cast<std::size_t>(dim)].push_back(
        {axis, axis_sizes[axis], sharding.factors[axis]});
  }
  std::vector<DimSharding> dims;
  for (std::size_t dim = 0; dim < shape.size(); ++dim) {
    dims.emplace_back(shape[dim], std::move(splits[dim]), sharding.right_to_left);
  }
  return dims;
}

std::vector<Spans> spans_at(const std::vector<DimSharding>& dims, const Coordinates& coordinates) {
  std::vector<Spans> all;
  for (const DimSharding& dim : dims) {
    Coordinates own;
    for (const Split& split : dim.splits()) own.push_back(coordinates[split.axis]);
    all.push_back(dim.spans(own));
  }
  return all;
}

// One side of a move, as this rank sees it.
struct Side {
  const Holders& holders;
  std::vector<DimSharding> dims;
  std::vector<std::size_t> free_axes;

  Side(const std::vector<Holders>& all, const std::vector<std::int64_t>& shape,
       const Sharding& sharding)
      : holders(all.at(sharding.holders)),
        dims(dim_shardings(shape, sharding, holders.axes().shape())) {
    for (std::size_t axis = 0; axis < sharding.dims.size(); ++axis) {
      if (sharding.dims[axis] == -1) free_axes.push_back(axis);
    }
  }

  // Where the replicas of a shard begin.
  std::int64_t offset(const Coordinates& coordinates) const {
    std::int64_t sum = 0;
    for (const DimSharding& dim : dims) {
      for (const Split& split : dim.splits()) {
        sum += holders.axes().axes()[split.axis](coordinates[split.axis]);
      }
    }
    return sum;
  }
};

// A shard of the other side along one dimension, with what it has in common with mine.
struct Option {
  std::int64_t offset;  // of its coordinates along the axes that split this dimension
  std::vector<Run> runs;
};

std::vector<Option> options(const Spans& mine, const DimSharding& theirs, const Layout& axes) {
  std::vector<Option> found;
  theirs.visit(mine, [&](const Coordinates& coordinates, const Spans& spans) {
    std::vector<Run> runs = overlap(mine, spans);
    if (runs.empty()) return;
    std::int64_t offset = 0;
    for (std::size_t i = 0; i < coordinates.size(); ++i) {
      offset += axes.axes()[theirs.splits()[i].axis](coordinates[i]);
    }
    found.push_back({offset, std::move(runs)});
  });
  return found;
}

// Calls `visit(choice)` for every choice of one item of each list.
template <class Item, class Visit>
void each_choice(const std::vector<const std::vector<Item>*>& lists, const Visit& visit) {
  std::vector<const Item*> choice(lists.size());
  const auto descend = [&](const auto& self, std::size_t depth) -> void {
    if (depth == lists.size()) return visit(choice);
    for (const Item& item : *lists[depth]) {
      choice[depth] = &item;
      self(self, depth + 1);
    }
  };
  descend(descend, 0);
}

class Planner {
 public:
  Planner(const std::vector<Holders>& holders, const std::vector<Move>& moves, const Nodes& nodes,
          std::int64_t rank)
      : holders_(holders), moves_(moves), nodes_(nodes), rank_(rank) {}

  Plan run(std::int64_t round_bytes) {
    for (std::size_t tensor = 0; tensor < moves_.size(); ++tensor) {
      const Move& move = moves_[tensor];
      const Side source(holders_, move.shape, move.source);
      const Side target(holders_, move.shape, move.target);
      each_shard(tensor, target, source, /*is_sent=*/false);
      each_shard(tensor, source, target, /*is_sent=*/true);
    }
    const std::int64_t world = nodes_.world_size();
    for (auto& [key, boxes] : boxes_) {
      const auto [peer, is_sent] = key;
      const std::int64_t step = is_sent ? peer - rank_ : rank_ - peer;
      pack(boxes, (step + world) % world, peer, is_sent, round_bytes, plan_);
    }
    sort_messages();
    return std::move(plan_);
  }

 private:
  // Goes through the shards of the other side that have elements of mine.
  void each_shard(std::size_t tensor, const Side& mine, const Side& theirs, bool is_sent) {
    const auto coordinates = mine.holders.coordinates_of(rank_);
    if (!coordinates) return;
    const std::vector<Spans> spans = spans_at(mine.dims, *coordinates);
    std::vector<std::vector<Option>> found;
    for (std::size_t dim = 0; dim < spans.size(); ++dim) {
      found.push_back(options(spans[dim], theirs.dims[dim], theirs.holders.axes()));
    }
    std::vector<const std::vector<Option>*> lists;
    for (const auto& list : found) lists.push_back(&list);
    const Replicas my_replicas(mine.holders, mine.free_axes, mine.offset(*coordinates));
    each_choice<Option>(lists, [&](const std::vector<const Option*>& choice) {
      std::int64_t offset = 0;
      for (const Option* option : choice) offset += option->offset;
      const Replicas their_replicas(theirs.holders, theirs.free_axes, offset);
      if (is_sent) {
        send(tensor, my_replicas, mine, their_replicas, theirs, choice);
      } else {
        receive(tensor, their_replicas, theirs, my_replicas, mine, choice);
      }
    });
  }

  void receive(std::size_t tensor, const Replicas& sources, const Side& source,
               const Replicas& targets, const Side& target,
               const std::vector<const Option*>& choice) {
    if (sources.index_of(rank_)) {
      each_box(tensor, choice, [&](const Box& box, const Coordinates& theirs) {
        plan_.kept.insert(plan_.kept.end(),
                          {box.tensor, static_cast<std::int64_t>(box.extent.size())});
        for (const auto* list : {&theirs, &box.mine, &box.extent}) {
          plan_.kept.insert(plan_.kept.end(), list->begin(), list->end());
        }
      });
      return;
    }
    const Matching* matching =
        sources.size() == 1 ? nullptr : &matched(sources, source, targets, target);
    each_box(tensor, choice, [&](const Box& box, const Coordinates&) {
      if (matching == nullptr) return add(sources.rank_at(0), false, box);
      for (const Transfer& transfer : matching->receives(box.bytes(), box.tensor)) {
        add(transfer.peer, false, part_of(box, transfer.share));
      }
    });
  }

  void send(std::size_t tensor, const Replicas& sources, const Side& source,
            const Replicas& targets, const Side& target, const std::vector<const Option*>& choice) {
    const Matching* matching =
        sources.size() == 1 ? nullptr : &matched(sources, source, targets, target);
    each_box(tensor, choice, [&](const Box& box, const Coordinates&) {
      if (matching == nullptr) {
        for (std::int64_t index = 0; index < targets.size(); ++index) {
          const std::int64_t peer = targets.rank_at(index);
          if (peer != rank_) add(peer, true, box);
        }
        return;
      }
      for (const Transfer& transfer : matching->sends(box.bytes(), box.tensor)) {
        add(transfer.peer, true, part_of(box, transfer.share));
      }
    });
  }

  template <class Visit>
  void each_box(std::size_t tensor, const std::vector<const Option*>& choice, const Visit& visit) {
    std::vector<const std::vector<Run>*> lists;
    for (const Option* option : choice) lists.push_back(&option->runs);
    each_choice<Run>(lists, [&](const std::vector<const Run*>& runs) {
      Box box{static_cast<std::int64_t>(tensor), moves_[tensor].itemsize, {}, {}, {}};
      Coordinates theirs;
      for (const Run* run : runs) {
        box.global.push_back(run->global);
        box.mine.push_back(run->mine);
        box.extent.push_back(run->extent);
        theirs.push_back(run->theirs);
      }
      visit(box, theirs);
    });
  }

  void add(std::int64_t peer, bool is_sent, Box box) {
    if (box.bytes() > 0) boxes_[{peer, is_sent}].push_back(std::move(box));
  }

  // Who serves whom depends on the two sets of replicas only, which many tensors have in common.
  const Matching& matched(const Replicas& sources, const Side& source, const Replicas& targets,
                          const Side& target) {
    auto& matching = matchings_[{&source.holders, source.free_axes, sources.offset(),
                                 &target.holders, target.free_axes, targets.offset()}];
    if (!matching) matching = std::make_unique<Matching>(sources, targets, nodes_, rank_);
    return *matching;
  }

  void sort_messages() {
    constexpr std::size_t kWidth = 7;
    std::vector<std::size_t> order(plan_.messages.size() / kWidth);
    std::iota(order.begin(), order.end(), std::size_t{0});
    const auto key = [&](std::size_t row) {
      const auto* message = &plan_.messages[row * kWidth];
      return std::make_tuple(message[0], message[1], message[3]);
    };
    std::sort(order.begin(), order.end(),
              [&](std::size_t a, std::size_t b) { return key(a) < key(b); });
    std::vector<std::int64_t> sorted;
    sorted.reserve(plan_.messages.size());
    for (const std::size_t row : order) {
      const auto first = plan_.messages.begin() + static_cast<std::ptrdiff_t>(row * kWidth);
      sorted.insert(sorted.end(), first, first + kWidth);
    }
    plan_.messages = std::move(sorted);
  }

  using MatchingKey = std::tuple<const Holders*, std::vector<std::size_t>, std::int64_t,
                                 const Holders*, std::vector<std::size_t>, std::int64_t>;

  const std::vector<Holders>& holders_;
  const std::vector<Move>& moves_;
  const Nodes& nodes_;
  std::int64_t rank_;
  std::map<std::pair<std::int64_t, bool>, std::vector<Box>> boxes_;
  std::map<MatchingKey, std::unique_ptr<Matching>> matchings_;
  Plan plan_;
};

}  // namespace

Plan plan(const std::vector<Holders>& holders, const std::vector<Move>& moves, const Nodes& nodes,
          std::int64_t rank, std::int64_t round_bytes) {
  if (rank < 0 || rank >= nodes.world_size()) {
    throw std::invalid_argument("rank " + std::to_string(rank) + " is outside the world of " +
                                std::to_string(nodes.world_size()));
  }
  for (const Move& move : moves) {
    if (move.itemsize < 1 || move.itemsize > round_bytes) {
      throw std::invalid_argument("elements of " + std::to_string(move.itemsize) +
                                  " bytes in rounds of " + std::to_string(round_bytes) +
                                  ": a round must have room for one");
    }
    for (const std::int64_t size : move.shape) {
      if (size < 0) throw std::invalid_argument("a dimension of size " + std::to_string(size));
    }
    for (const Sharding* side : {&move.source, &move.target}) {
      if (side->holders >= holders.size()) {
        throw std::invalid_argument("holders number " + std::to_string(side->holders) + " of " +
                                    std::to_string(holders.size()));
      }
    }
  }
  return Planner(holders, moves, nodes, rank).run(round_bytes);
}

std::vector<std::int64_t> local_shape(const std::vector<std::int64_t>& shape,
                                      const Sharding& sharding,
                                      const std::vector<std::int64_t>& axis_sizes,
                                      const std::vector<std::int64_t>& coordinates) {
  if (coordinates.size() != axis_sizes.size()) {
    throw std::invalid_argument(std::to_string(coordinates.size()) + " coordinates for " +
                                std::to_string(axis_sizes.size()) + " axes");
  }
  std::vector<std::int64_t> sizes;
  for (const Spans& spans : spans_at(dim_shardings(shape, sharding, axis_sizes), coordinates)) {
    sizes.push_back(count(spans));
  }
  return sizes;
}

}  // namespace meshverse::reshard
