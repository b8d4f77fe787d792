#include "rank_map.h"

#include <algorithm>
#include <limits>
#include <mutex>
#include <numeric>
#include <stdexcept>
#include <unordered_map>
#include <utility>

namespace meshverse {
namespace {

using Integers = std::vector<std::int64_t>;

Fingerprint fingerprint_of_identity(std::int64_t size) {
  return FingerprintBuilder().add("identity rank map").add(size).finish();
}

Fingerprint fingerprint_of_ranks(const Integers& ranks) {
  FingerprintBuilder builder;
  builder.add("explicit rank map").add(static_cast<std::uint64_t>(ranks.size()));
  for (const std::int64_t rank : ranks) builder.add(rank);
  return builder.finish();
}

bool counts_up_from_zero(const Integers& ranks) {
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (ranks[i] != static_cast<std::int64_t>(i)) return false;
  }
  return true;
}

// The positions in order of their rank; empty if the ranks ascend already.
Integers order_by_rank(const Integers& ranks) {
  if (std::is_sorted(ranks.begin(), ranks.end())) return {};
  Integers order(ranks.size());
  std::iota(order.begin(), order.end(), 0);
  const auto rank_at = [&](std::int64_t p) { return ranks[static_cast<std::size_t>(p)]; };
  std::sort(order.begin(), order.end(),
            [&](std::int64_t a, std::int64_t b) { return rank_at(a) < rank_at(b); });
  return order;
}

std::string first_ranks(const Integers& ranks) {
  constexpr std::size_t kShown = 8;
  std::string text;
  for (std::size_t i = 0; i < std::min(kShown, ranks.size()); ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(ranks[i]);
  }
  return ranks.size() > kShown ? text + ", ..." : text;
}

struct FingerprintHash {
  std::size_t operator()(const Fingerprint& f) const { return static_cast<std::size_t>(f.low); }
};

}  // namespace

// The interned maps that are still referenced, by fingerprint.
class RankMapTable {
 public:
  static RankMapTable& instance() {
    // Never destroyed: the last map may be released after the static objects of this library.
    static auto* table = new RankMapTable();
    return *table;
  }

  RankMap::Ptr find(const Fingerprint& fingerprint) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = maps_.find(fingerprint);
    return found == maps_.end() ? nullptr : found->second.lock();
  }

  // The map with this fingerprint: the existing one, or a new one.
  RankMap::Ptr intern(std::int64_t size, Integers ranks, const Fingerprint& fingerprint) {
    // Built, indexed and checked outside the lock: a thread that loses a race wastes only this.
    RankMap::Ptr created(new RankMap(size, std::move(ranks), fingerprint), release);
    const std::lock_guard<std::mutex> lock(mutex_);
    std::weak_ptr<RankMap>& entry = maps_[fingerprint];
    if (RankMap::Ptr alive = entry.lock()) return alive;
    entry = created;
    return created;
  }

 private:
  static void release(RankMap* map) {
    instance().forget_if_expired(map->fingerprint());
    delete map;
  }

  // Erases the entry of an expired map, unless a new map has replaced it meanwhile.
  void forget_if_expired(const Fingerprint& fingerprint) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = maps_.find(fingerprint);
    if (found != maps_.end() && found->second.expired()) maps_.erase(found);
  }

  // Protects maps_. At a fork from Python, no other thread holds it: whoever does is attached to
  // the interpreter, and runs no Python code meanwhile.
  std::mutex mutex_;
  std::unordered_map<Fingerprint, std::weak_ptr<RankMap>, FingerprintHash> maps_;
};

RankMap::RankMap(std::int64_t size, Integers ranks, const Fingerprint& fingerprint)
    : size_(size),
      ranks_(std::move(ranks)),
      positions_by_rank_(order_by_rank(ranks_)),
      fingerprint_(fingerprint) {
  // Equal ranks are neighbors in rank order.
  for (std::size_t i = 1; i < ranks_.size(); ++i) {
    const auto at = [&](std::size_t place) {
      return positions_by_rank_.empty() ? static_cast<std::int64_t>(place)
                                        : positions_by_rank_[place];
    };
    if (rank_at(at(i - 1)) != rank_at(at(i))) continue;
    throw std::invalid_argument(
        "rank map of " + std::to_string(size_) + " ranks: rank " + std::to_string(rank_at(at(i))) +
        " stands at positions " + std::to_string(std::min(at(i - 1), at(i))) + " and " +
        std::to_string(std::max(at(i - 1), at(i))) + "; list every global rank once");
  }
}

RankMap::Ptr RankMap::identity(std::int64_t size) {
  if (size < 1) {
    throw std::invalid_argument("identity rank map of size " + std::to_string(size) +
                                ": a rank map holds at least one rank");
  }
  const Fingerprint fingerprint = fingerprint_of_identity(size);
  if (Ptr alive = RankMapTable::instance().find(fingerprint)) return alive;
  return RankMapTable::instance().intern(size, {}, fingerprint);
}

RankMap::Ptr RankMap::from_ranks(Integers ranks) {
  const auto size = static_cast<std::int64_t>(ranks.size());
  if (counts_up_from_zero(ranks)) return identity(size);
  const auto smallest = std::min_element(ranks.begin(), ranks.end());
  if (*smallest < 0) {
    throw std::invalid_argument("rank map with rank " + std::to_string(*smallest) +
                                " at position " + std::to_string(smallest - ranks.begin()) +
                                ": global ranks are at least 0");
  }
  // Equal 128-bit fingerprints count as equal contents, here as everywhere.
  const Fingerprint fingerprint = fingerprint_of_ranks(ranks);
  if (Ptr alive = RankMapTable::instance().find(fingerprint)) return alive;
  return RankMapTable::instance().intern(size, std::move(ranks), fingerprint);
}

std::int64_t RankMap::rank_at(std::int64_t position) const {
  if (position < 0 || position >= size_) {
    throw std::out_of_range("position " + std::to_string(position) + " of a rank map of " +
                            std::to_string(size_) + " ranks: positions run from 0 to " +
                            std::to_string(size_ - 1));
  }
  return is_identity() ? position : ranks_[static_cast<std::size_t>(position)];
}

std::optional<std::int64_t> RankMap::position_of(std::int64_t rank) const {
  std::int64_t position = 0;
  if (is_identity()) {
    position = rank;
  } else if (positions_by_rank_.empty()) {
    position = std::lower_bound(ranks_.begin(), ranks_.end(), rank) - ranks_.begin();
  } else {
    const auto found = std::lower_bound(
        positions_by_rank_.begin(), positions_by_rank_.end(), rank,
        [&](std::int64_t p, std::int64_t r) { return ranks_[static_cast<std::size_t>(p)] < r; });
    position = found == positions_by_rank_.end() ? size_ : *found;
  }
  const bool holds = position >= 0 && position < size_ && rank_at(position) == rank;
  return holds ? std::optional<std::int64_t>(position) : std::nullopt;
}

std::pair<std::int64_t, std::int64_t> RankMap::bounds() const {
  if (is_sorted()) return {rank_at(0), rank_at(size_ - 1)};
  return {rank_at(positions_by_rank_.front()), rank_at(positions_by_rank_.back())};
}

RankMap::Ptr RankMap::sorted() const {
  if (is_identity()) return identity(size_);
  Integers ranks = ranks_;
  std::sort(ranks.begin(), ranks.end());
  return from_ranks(std::move(ranks));
}

RankArray RankMap::ranks() const {
  const std::int64_t largest = bounds().second;
  if (largest > std::numeric_limits<std::int32_t>::max()) {
    throw std::invalid_argument("ranks of a rank map with rank " + std::to_string(largest) +
                                " as int32: a rank must be below 2**31; number the ranks lower");
  }
  std::vector<std::int32_t> ranks(static_cast<std::size_t>(size_));
  if (is_identity()) {
    std::iota(ranks.begin(), ranks.end(), 0);
  } else {
    std::transform(ranks_.begin(), ranks_.end(), ranks.begin(),
                   [](std::int64_t rank) { return static_cast<std::int32_t>(rank); });
  }
  return RankArray(std::move(ranks));
}

std::int64_t RankMap::tuple_hash() const {
  constexpr std::uint64_t kPrime1 = 11400714785074694791U;
  constexpr std::uint64_t kPrime2 = 14029467366897019727U;
  constexpr std::uint64_t kPrime5 = 2870177450012600261U;
  constexpr int kRotation = 31;
  if (size_ > std::int64_t{1} << 31) {
    throw std::invalid_argument("hash of the tuple of " + std::to_string(size_) +
                                " ranks: there may be at most 2**31");
  }
  std::uint64_t hash = kPrime5;
  for (std::int64_t position = 0; position < size_; ++position) {
    const auto rank = is_identity() ? position : ranks_[static_cast<std::size_t>(position)];
    hash += static_cast<std::uint64_t>(rank) * kPrime2;
    hash = (hash << kRotation) | (hash >> (64 - kRotation));
    hash *= kPrime1;
  }
  hash += static_cast<std::uint64_t>(size_) ^ (kPrime5 ^ 3527539U);
  // CPython reserves -1 for errors.
  return hash == ~std::uint64_t{0} ? 1546275796 : static_cast<std::int64_t>(hash);
}

std::string RankMap::to_string() const {
  if (is_identity()) return "identity of " + std::to_string(size_);
  return std::to_string(size_) + (size_ == 1 ? " rank: " : " ranks: ") + first_ranks(ranks_);
}

std::string RankMap::in_words() const {
  if (size_ == 1) return "rank " + std::to_string(rank_at(0));
  if (is_identity()) return "ranks 0 to " + std::to_string(size_ - 1);
  return "ranks " + first_ranks(ranks_) +
         (size_ > 8 ? " (" + std::to_string(size_) + " in all)" : "");
}

}  // namespace meshverse
