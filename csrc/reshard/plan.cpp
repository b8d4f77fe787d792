#include "reshard/plan.h"

#include <algorithm>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

#include "checked_math.h"
#include "reshard/packing.h"
#include "reshard/spans.h"

namespace meshverse::reshard {
namespace {

using Coordinates = std::vector<std::int64_t>;

// Limits far beyond any job. Within them, no number here needs more than 64 bits.
constexpr std::int64_t kMostRanks = std::int64_t{1} << 31;
constexpr std::int64_t kMostPieces = std::int64_t{1} << 24;
constexpr std::int64_t kMostRounds = std::int64_t{1} << 24;

void check_shape(const std::vector<std::int64_t>& shape) {
  for (const std::int64_t size : shape) {
    if (size >= 0) continue;
    throw std::invalid_argument("a tensor with a dimension of size " + std::to_string(size) +
                                ": sizes are at least 0; give the shape of the whole tensor");
  }
}

// The bytes of a tensor; std::overflow_error if they need more than 63 bits.
std::int64_t bytes_of(const Move& move) {
  std::int64_t bytes = move.itemsize;
  for (const std::int64_t size : move.shape) {
    if (size == 0) return 0;
  }
  for (const std::int64_t size : move.shape) {
    bytes = checked_multiply(bytes, size, "the bytes of a tensor");
  }
  return bytes;
}

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
    const std::int64_t dim = sharding.dims[axis], factor = sharding.factors[axis];
    const auto n_dims = static_cast<std::int64_t>(shape.size());
    if (dim < -1 || dim >= n_dims || factor < 1 || factor > kMostPieces) {
      throw std::invalid_argument("axis " + std::to_string(axis) + " splits dimension " +
                                  std::to_string(dim) + " by factor " + std::to_string(factor) +
                                  " of a tensor of " + std::to_string(n_dims) +
                                  " dimensions: dimensions count from 0, with -1 for none, and "
                                  "factors from 1 to " +
                                  std::to_string(kMostPieces));
    }
    // An axis of one rank splits nothing. The other axes are few, because the product of their
    // sizes is the number of ranks.
    if (dim == -1 || axis_sizes[axis] == 1) continue;
    splits[static_cast<std::size_t>(dim)].push_back({axis, axis_sizes[axis], factor});
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

// One side of the transfer of a tensor, as this rank sees it.
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

  // The position of the first replica of a shard, relative to the holders' base.
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

// A shard of the other side along one dimension, and the elements that it shares with this rank's.
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

// Calls `visit(choice)` for every choice of one item from each list; the last list's item changes
// fastest. Without recursion, because the stack may be too small for the dimensions of a tensor.
template <class Item, class Visit>
void each_choice(const std::vector<const std::vector<Item>*>& lists, const Visit& visit) {
  std::vector<const Item*> choice;
  for (const std::vector<Item>* list : lists) {
    if (list->empty()) return;
    choice.push_back(list->data());
  }
  while (true) {
    visit(choice);
    std::size_t place = lists.size();
    while (place > 0 && choice[place - 1] == &lists[place - 1]->back()) {
      --place;
      choice[place] = lists[place]->data();
    }
    if (place == 0) return;
    ++choice[place - 1];
  }
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
    std::sort(plan_.messages.begin(), plan_.messages.end(), [](const auto& a, const auto& b) {
      return std::tie(a[0], a[1], a[3]) < std::tie(b[0], b[1], b[3]);  // step, round, direction
    });
    return std::move(plan_);
  }

 private:
  // Visits the shards of the other side that have elements of this rank's shard.
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

  // The matching depends only on the two sets of replicas, which many tensors share.
  const Matching& matched(const Replicas& sources, const Side& source, const Replicas& targets,
                          const Side& target) {
    auto& matching = matchings_[{&source.holders, source.free_axes, sources.offset(),
                                 &target.holders, target.free_axes, targets.offset()}];
    if (!matching) matching = std::make_unique<Matching>(sources, targets, nodes_, rank_);
    return *matching;
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
  const std::int64_t world = nodes.world_size();
  if (world > kMostRanks) {
    throw std::invalid_argument("a world of " + std::to_string(world) +
                                " ranks: plans are made for 2**31 ranks at most");
  }
  if (rank < 0 || rank >= world) {
    throw std::invalid_argument("rank " + std::to_string(rank) + " is outside the world of " +
                                std::to_string(world));
  }
  for (const Holders& side : holders) {
    const std::int64_t last = side.bounds().second;
    if (last < world) continue;
    throw std::invalid_argument("holders with rank " + std::to_string(last) +
                                ", which is outside the world of " + std::to_string(world) +
                                ": give the size of the whole job");
  }
  for (const Move& move : moves) {
    if (move.itemsize < 1 || move.itemsize > round_bytes) {
      throw std::invalid_argument("elements of " + std::to_string(move.itemsize) +
                                  " bytes in rounds of " + std::to_string(round_bytes) +
                                  ": a round must have room for one");
    }
    check_shape(move.shape);
    if (const std::int64_t bytes = bytes_of(move); bytes / round_bytes > kMostRounds) {
      throw std::invalid_argument("a tensor of " + std::to_string(bytes) + " bytes in rounds of " +
                                  std::to_string(round_bytes) + ": more than " +
                                  std::to_string(kMostRounds) +
                                  " rounds are too many; give longer ones");
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
                                std::to_string(axis_sizes.size()) + " axes: give one an axis");
  }
  check_shape(shape);
  for (std::size_t axis = 0; axis < axis_sizes.size(); ++axis) {
    const std::int64_t size = axis_sizes[axis], coordinate = coordinates[axis];
    const std::string name = "axis " + std::to_string(axis) + " of size " + std::to_string(size);
    if (size < 1) {
      throw std::invalid_argument(name + ": an axis has at least one rank; give the mesh's shape");
    }
    if (coordinate < 0 || coordinate >= size) {
      throw std::invalid_argument("coordinate " + std::to_string(coordinate) + " on " + name +
                                  ": coordinates run from 0 to " + std::to_string(size - 1) +
                                  "; give the index of the shard along each axis");
    }
  }
  std::vector<std::int64_t> sizes;
  for (const Spans& spans : spans_at(dim_shardings(shape, sharding, axis_sizes), coordinates)) {
    sizes.push_back(count(spans));
  }
  return sizes;
}

}  // namespace meshverse::reshard
