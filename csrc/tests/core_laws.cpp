// The laws of the core against brute force, without Python: run it under the sanitizers.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <utility>
#include <vector>

#include "group_cache.h"
#include "layout.h"
#include "options_key.h"
#include "rank_groups.h"
#include "rank_map.h"
#include "ring_steps.h"

#define CHECK(condition)                                                         \
  do {                                                                           \
    if (!(condition)) {                                                          \
      std::fprintf(stderr, "%s:%d: %s fails\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                              \
    }                                                                            \
  } while (false)

namespace meshverse {
namespace {

using Integers = std::vector<std::int64_t>;

template <class Error, class Call>
bool throws(Call&& call) {
  try {
    call();
  } catch (const Error&) {
    return true;
  }
  return false;
}

// The positions that modes spell, by counting like an odometer.
Integers spell(const std::vector<Mode>& modes) {
  Integers positions{0};
  for (const Mode& mode : modes) {
    Integers longer;
    for (const std::int64_t position : positions) {
      for (std::int64_t i = 0; i < mode.size; ++i) longer.push_back(position + i * mode.stride);
    }
    positions = longer;
  }
  return positions;
}

// Every list of at most three modes with small sizes and strides.
std::vector<std::vector<Mode>> small_mode_lists() {
  std::vector<std::vector<Mode>> lists{{}};
  for (std::size_t start = 0, round = 0; round < 3; ++round) {
    const std::size_t stop = lists.size();
    for (; start < stop; ++start) {
      for (std::int64_t size = 1; size <= 4; ++size) {
        for (const std::int64_t stride : {0, 1, 2, 3, 4, 6, 8}) {
          lists.push_back(lists[start]);
          lists.back().push_back({size, stride});
        }
      }
    }
  }
  return lists;
}

std::vector<AxisLayout> small_layouts() {
  std::vector<AxisLayout> layouts;
  std::set<Integers> seen;
  for (const auto& modes : small_mode_lists()) {
    if (seen.insert(spell(modes)).second) layouts.emplace_back(modes);
  }
  return layouts;
}

// coalesce keeps the map, and equal maps are equal objects.
void coalescing_is_canonical() {
  std::map<Integers, AxisLayout> by_positions;
  std::set<std::string> texts;
  for (const auto& modes : small_mode_lists()) {
    const AxisLayout layout(modes);
    const Integers positions = spell(modes);
    CHECK(layout.positions() == positions);
    CHECK(layout.size() == static_cast<std::int64_t>(positions.size()));
    CHECK(layout.cosize() == *std::max_element(positions.begin(), positions.end()) + 1);
    for (std::size_t i = 0; i < positions.size(); ++i) {
      CHECK(layout(static_cast<std::int64_t>(i)) == positions[i]);
    }
    const AxisLayout& first = by_positions.emplace(positions, layout).first->second;
    CHECK(layout == first && layout.hash() == first.hash());
    texts.insert(layout.to_string());
  }
  CHECK(texts.size() == by_positions.size());
}

// The offsets at which copies of `positions` tile 0..n-1: the smallest gap is always the next.
std::optional<Integers> tile(const Integers& positions, std::int64_t n) {
  std::vector<bool> covered(static_cast<std::size_t>(n), false);
  Integers offsets;
  for (std::int64_t gap = 0; gap < n; ++gap) {
    if (covered[static_cast<std::size_t>(gap)]) continue;
    offsets.push_back(gap);
    for (const std::int64_t position : positions) {
      const auto place = static_cast<std::size_t>(gap + position);
      if (place >= covered.size() || covered[place]) return std::nullopt;
      covered[place] = true;
    }
  }
  return offsets;
}

// complement(n) gives the tiling of 0..n-1 if there is one, and throws otherwise; the groups are
// its copies.
void complement_tiles_or_throws(const std::vector<AxisLayout>& layouts) {
  for (const AxisLayout& layout : layouts) {
    for (const std::int64_t n : {1, 2, 4, 6, 8, 12, 16, 24, 32, 48}) {
      const auto offsets = tile(layout.positions(), n);
      if (!offsets) {
        CHECK(throws<std::invalid_argument>([&] { layout.complement(n); }));
        continue;
      }
      CHECK(layout.complement(n).positions() == *offsets);
      CHECK(layout.is_orthogonal());
      const RankGroups groups(layout, RankMap::identity(n));
      for (std::int64_t g = 0; g < groups.n_groups(); ++g) {
        for (std::int64_t i = 0; i < groups.group_size(); ++i) {
          const std::int64_t position = (*offsets)[static_cast<std::size_t>(g)] + layout(i);
          CHECK(groups.group_index(position) == g && groups.coordinate(position) == i);
          CHECK(groups.ranks_of(position)[static_cast<std::size_t>(i)] == position);
        }
      }
    }
  }
}

// compose(outer, inner)(i) == outer(inner(i)), or it throws.
void composition_is_application(const std::vector<AxisLayout>& layouts) {
  std::size_t composed = 0;
  for (std::size_t i = 0; i < layouts.size(); i += 37) {
    for (std::size_t j = 0; j < layouts.size(); j += 19) {
      const AxisLayout& outer = layouts[i];
      const Layout inner({layouts[j]});
      const auto expect_refusal = [&] {
        return throws<std::invalid_argument>([&] { compose(outer, inner); });
      };
      if (inner.cosize() > outer.size()) {
        CHECK(expect_refusal());
        continue;
      }
      if (expect_refusal()) continue;
      Integers applied = layouts[j].positions();
      for (std::int64_t& position : applied) position = outer(position);
      CHECK(compose(outer, inner).axis(0).positions() == applied);
      ++composed;
    }
  }
  CHECK(composed > 1000);
}

// Several axes compose each by itself, and together: compose(outer, inner).collapse() is
// outer(inner.collapse()). An axis may not take the digits that another one has.
void composition_goes_axis_by_axis(const std::vector<AxisLayout>& layouts) {
  std::size_t composed = 0;
  for (std::size_t i = 0; i < layouts.size(); i += 23) {
    for (std::size_t j = 0; j + 5 < layouts.size(); j += 41) {
      const AxisLayout& outer = layouts[i];
      const Layout inner({layouts[j], layouts[j + 5]});
      Layout both;
      if (throws<std::invalid_argument>([&] { both = compose(outer, inner); })) continue;
      CHECK(both.shape() == inner.shape());
      for (const std::int64_t axis : {0, 1}) {
        CHECK(both.axis(axis) == compose(outer, inner.select({axis})).axis(0));
      }
      Integers applied = inner.collapse().positions();
      for (std::int64_t& position : applied) position = outer(position);
      CHECK(both.collapse().positions() == applied);
      ++composed;
    }
  }
  CHECK(composed > 100);

  // Within one digit nothing needs to divide: 3 steps of 2 stay below 5, and 3 + 1 below 6.
  CHECK(compose(AxisLayout({2, 5}, {8, 1}), Layout({AxisLayout({3}, {2})})).axis(0) ==
        AxisLayout({3}, {2}));
  CHECK(compose(AxisLayout({4, 6}, {16, 1}), Layout({AxisLayout({2, 2}, {3, 1})})).axis(0) ==
        AxisLayout({2, 2}, {3, 1}));
  // 3 + 2 carries out of a digit of size 4, from one axis or from two.
  const AxisLayout outer({2, 4}, {8, 1});
  for (const Layout& inner :
       {Layout({AxisLayout({2, 2}, {3, 2})}), Layout::from_shape({2, 2}, {3, 2})}) {
    CHECK(throws<std::invalid_argument>([&] { compose(outer, inner); }));
  }
}

// splice() does what it does for vectors of axes. concatenate() is splice() at the end.
void layouts_splice_like_vectors(const std::vector<AxisLayout>& layouts) {
  const std::vector<AxisLayout> axes(layouts.begin() + 1, layouts.begin() + 5);
  const std::vector<AxisLayout> others(layouts.begin() + 7, layouts.begin() + 9);
  const Layout layout(axes);
  for (std::size_t start = 0; start <= axes.size(); ++start) {
    for (std::size_t stop = start; stop <= axes.size(); ++stop) {
      std::vector<AxisLayout> expected(axes);
      const auto at = [&](std::size_t i) {
        return expected.begin() + static_cast<std::ptrdiff_t>(i);
      };
      expected.insert(expected.erase(at(start), at(stop)), others.begin(), others.end());
      const Layout spliced = layout.splice(static_cast<std::int64_t>(start),
                                           static_cast<std::int64_t>(stop), Layout(others));
      CHECK(spliced.axes() == expected);
    }
  }
  for (const auto& [start, stop] : {std::pair{-1, 2}, {3, 2}, {0, 5}}) {
    CHECK(throws<std::out_of_range>([&, a = start, b = stop] { layout.splice(a, b, layout); }));
  }
}

// sorted() has the same positions in ascending order, or throws.
void sorting_orders_positions(const std::vector<AxisLayout>& layouts) {
  for (const AxisLayout& layout : layouts) {
    Integers positions = layout.positions();
    std::sort(positions.begin(), positions.end());
    const bool repeats = std::adjacent_find(positions.begin(), positions.end()) != positions.end();
    if (throws<std::invalid_argument>([&] { layout.sorted(); })) {
      CHECK(!layout.is_orthogonal());
    } else {
      CHECK(!repeats && layout.sorted().positions() == positions);
    }
    CHECK(!layout.is_orthogonal() || !repeats);
  }
}

// position == base + the position of its coordinate.
void coordinates_are_digits(const std::vector<AxisLayout>& layouts) {
  for (std::size_t i = 0; i + 1 < layouts.size(); i += 3) {
    const Layout layout({layouts[i], layouts[i + 1]});
    if (!layout.is_orthogonal()) {
      CHECK(throws<std::invalid_argument>([&] { layout.coordinate(0); }));
      continue;
    }
    const Integers positions = layout.collapse().positions();
    for (std::size_t index = 0; index < positions.size(); ++index) {
      const Integers coordinate = layout.coordinate(positions[index]);
      CHECK(coordinate[0] * layout.shape()[1] + coordinate[1] == static_cast<std::int64_t>(index));
      CHECK(layout.base(positions[index]) == 0);
    }
  }
}

void overflow_throws() {
  constexpr std::int64_t kHuge = std::numeric_limits<std::int64_t>::max();
  CHECK(throws<std::overflow_error>([] { AxisLayout({kHuge, 2}, {1, 0}); }));
  CHECK(throws<std::overflow_error>([] { AxisLayout({3}, {kHuge}); }));
  CHECK(throws<std::overflow_error>([] { AxisLayout::row_major({kHuge, kHuge}); }));
  CHECK(throws<std::overflow_error>([] { Layout::row_major({kHuge, 2}); }));
  CHECK(AxisLayout({2}, {kHuge - 1}).is_orthogonal());
  // The positions fit, though the span of the right mode, 2**63, does not.
  constexpr std::int64_t kHalf = kHuge / 2 + 1;
  CHECK(AxisLayout({2, 2}, {1, kHalf}).positions() == (Integers{0, kHalf, 1, kHalf + 1}));
  CHECK(AxisLayout({kHuge}, {1}).complement(kHuge) == AxisLayout());
  CHECK(throws<std::overflow_error>([] { AxisLayout({2}, {kHuge - 1}).complement(8); }));
}

void rank_maps_are_interned() {
  CHECK(RankMap::from_ranks({0, 1, 2}) == RankMap::identity(3));
  std::vector<std::thread> threads;
  std::vector<RankMap::Ptr> maps(8);
  for (std::size_t i = 0; i < maps.size(); ++i) {
    threads.emplace_back([&maps, i] {
      for (int round = 0; round < 1000; ++round) maps[i] = RankMap::from_ranks({5, 3, 9});
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const RankMap::Ptr& map : maps) CHECK(map == maps.front());
  CHECK(maps[0]->position_of(3) == 1 && maps[0]->position_of(9) == 2 && !maps[0]->position_of(4));
  CHECK(throws<std::invalid_argument>([] { RankMap::from_ranks({2, 7, 2}); }));
}

struct NothingToRelease {
  bool may_give_up() const { return false; }
  void give_up_if_asked() const {}
};
using Cache = GroupCache<std::shared_ptr<int>, NothingToRelease>;

GroupKey group_key(std::int64_t size, const std::string& backend) {
  OptionsKey options;
  options.backend = backend;
  return {AxisLayout::row_major({size}), options};
}

// Threads racing for one key share one entry, and a failure is followed by another try.
void cache_computes_once() {
  Cache cache;
  std::atomic<int> tries{0};
  std::atomic<int> failures{0};
  std::atomic<int> answers{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&] {
      const auto make = [&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
        if (++tries <= 2) throw std::invalid_argument("not yet");
        return std::make_shared<int>(tries.load());
      };
      try {
        CHECK(*cache.get_or_create(group_key(4, "gloo"), make) == 3);
        ++answers;
      } catch (const std::invalid_argument&) {
        ++failures;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(tries == 3 && failures == 2 && answers == 6 && cache.size() == 1);
  CHECK(!cache.get(group_key(4, "nccl")) && *cache.get(group_key(4, "gloo")) == 3);
}

// Two threads that need each other's entry, a deadlock: one of them gets an error.
void cache_refuses_endless_waits() {
  Cache cache;
  std::atomic<int> inside{0};
  std::atomic<int> refused{0};
  const auto ask = [&](std::int64_t own, std::int64_t other) {
    const auto make_own = [&] {
      for (++inside; inside < 2;) std::this_thread::yield();
      try {
        cache.get_or_create(group_key(other, "gloo"), [] { return std::make_shared<int>(1); });
      } catch (const std::runtime_error&) {
        ++refused;
      }
      return std::make_shared<int>(2);
    };
    cache.get_or_create(group_key(own, "gloo"), make_own);
  };
  std::thread one(ask, 2, 3);
  std::thread two(ask, 3, 2);
  one.join();
  two.join();
  CHECK(refused == 1 && cache.size() == 2);
}

struct GivenUp {};

// A WhileWaiting that gives up when the test asks it to.
struct Impatient {
  static inline std::atomic<int> waits{0};
  static inline std::atomic<bool> asked{false};

  Impatient() { ++waits; }
  bool may_give_up() const { return true; }
  void give_up_if_asked() const {
    if (asked) throw GivenUp();
  }
};

// A thread that gave up a wait is no longer recorded as waiting: the thread that it waited for can
// then wait for an entry that it creates.
void cache_lets_a_wait_be_given_up() {
  GroupCache<std::shared_ptr<int>, Impatient> cache;
  const auto make = [](int value) { return std::make_shared<int>(value); };
  const auto must_not_make = [] {
    CHECK(false);
    return std::shared_ptr<int>();
  };
  std::atomic<bool> begun{false};
  std::atomic<bool> gave_up{false};
  std::atomic<bool> makes_other{false};

  std::thread maker([&] {
    const auto entry = cache.get_or_create(group_key(2, "gloo"), [&] {
      begun = true;
      while (Impatient::waits < 1) std::this_thread::yield();
      Impatient::asked = true;
      while (!makes_other) std::this_thread::yield();
      Impatient::asked = false;
      return make(1 + *cache.get_or_create(group_key(3, "gloo"), must_not_make));
    });
    CHECK(*entry == 11);
  });
  while (!begun) std::this_thread::yield();
  gave_up = throws<GivenUp>([&] { cache.get_or_create(group_key(2, "gloo"), must_not_make); });
  const auto other = cache.get_or_create(group_key(3, "gloo"), [&] {
    makes_other = true;
    while (Impatient::waits < 2) std::this_thread::yield();
    return make(10);
  });
  maker.join();
  CHECK(gave_up && *other == 10 && cache.size() == 2);
  CHECK(*cache.get_or_create(group_key(2, "gloo"), must_not_make) == 11);
}

// A forked process drops what other threads were creating, and hangs neither on the lock nor on the
// condition that they were using.
void cache_can_be_left_to_a_parent_process() {
  auto cache = std::make_unique<Cache>();
  std::atomic<bool> begun{false};
  std::atomic<bool> may_end{false};
  const auto make = [](int value) { return std::make_shared<int>(value); };
  cache->get_or_create(group_key(3, "gloo"), [&] { return make(10); });
  std::thread maker([&] {
    cache->get_or_create(group_key(2, "gloo"), [&] {
      begun = true;
      while (!may_end) std::this_thread::yield();
      return make(1);
    });
  });
  while (!begun) std::this_thread::yield();
  std::vector<std::thread> waiters;
  for (int i = 0; i < 2; ++i) {
    waiters.emplace_back(
        [&] { CHECK(*cache->get_or_create(group_key(2, "gloo"), [&] { return make(2); }) == 1); });
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(50));  // they wait by now, as a rule
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);  // ends a hang
    cache->reset_after_fork();
    const bool has_old =
        *cache->get_or_create(group_key(3, "gloo"), [&] { return make(11); }) == 10;
    const bool has_new = *cache->get_or_create(group_key(2, "gloo"), [&] { return make(3); }) == 3;
    const bool has_both = cache->size() == 2;
    cache.reset();
    _exit(has_old && has_new && has_both ? 0 : 1);
  }
  may_end = true;
  maker.join();
  for (std::thread& waiter : waiters) waiter.join();
  int status = 1;
  CHECK(waitpid(child, &status, 0) == child && status == 0);
}

// differing_fields() has every field that differs, and no other.
void differing_fields_tell_options_apart() {
  const OptionFields defaults{{"a", std::int64_t{1}}, {"b", std::string("x")}};
  CHECK(differing_fields(defaults, defaults).empty());
  const OptionFields shorter{{"a", std::int64_t{2}}};
  const OptionFields differing{{"a", std::int64_t{2}}, {"b", Absent()}};
  CHECK(differing_fields(shorter, defaults) == differing);
  OptionsKey minus_zero{"gloo", {}, "", "", {{"f", FloatBits(-0.0)}}};
  OptionsKey zero{"gloo", {}, "", "", {{"f", FloatBits(0.0)}}};
  CHECK(!(minus_zero == zero) && !(minus_zero.digest() == zero.digest()));
}

// ring_steps() counts the parts of each group of an axis: here by sets, with positions as digits.
void ring_steps_count_parts() {
  const Integers shape{2, 3, 2};
  const std::vector<Integers> levels{{0, 1, 2, 2, 3}, {0, 0, 1, 1, 1}, {0, 0, 0, 0, 0}};
  for (std::int64_t seed = 0; seed < 200; ++seed) {
    Integers placement;
    for (std::int64_t i = 0; i < 12; ++i) placement.push_back((seed * (i + 3) + i * i) / 7 % 5);
    const Integers counted = ring_steps(shape, levels, placement);
    for (std::size_t axis = 0; axis < 3; ++axis) {
      for (std::size_t level = 0; level < 3; ++level) {
        std::map<Integers, std::set<std::int64_t>> parts_of_group;
        for (std::int64_t i = 0; i < 12; ++i) {
          Integers group{i / 6, i / 2 % 3, i % 2};
          group[axis] = 0;
          const auto spot = static_cast<std::size_t>(placement[static_cast<std::size_t>(i)]);
          parts_of_group[group].insert(levels[level][spot]);
        }
        std::int64_t steps = 0;
        for (const auto& [group, parts] : parts_of_group) {
          if (parts.size() > 1) steps += static_cast<std::int64_t>(parts.size());
        }
        CHECK(counted[axis * 3 + level] == steps);
      }
    }
  }
  const auto refuses = [](const Integers& sizes, const std::vector<Integers>& parts,
                          const Integers& placement) {
    return throws<std::invalid_argument>([&] { ring_steps(sizes, parts, placement); });
  };
  CHECK(refuses({2, 2}, {{0, 1}}, {0, 1, 1}));  // another number of positions
  CHECK(refuses({2}, {{0, 1}}, {0, 2}));        // a spot that no level has
  CHECK(refuses({2}, {{0, 1}, {0}}, {0, 1}));   // a spot that one level lacks
  CHECK(refuses({2}, {{0, 1}}, {0, -1}));       // a negative spot
  CHECK(refuses({2}, {{0, 9}}, {0, 1}));        // more parts than spots
  CHECK(refuses({2}, {{-1, 0}}, {0, 1}));       // a negative part
  CHECK(refuses({2, 0}, {{0}}, {}));            // an axis without coordinates
  CHECK(ring_steps({1}, {{0}}, {0}) == Integers{0});
}

}  // namespace
}  // namespace meshverse

int main() {
  using namespace meshverse;
  const std::vector<AxisLayout> layouts = small_layouts();
  coalescing_is_canonical();
  complement_tiles_or_throws(layouts);
  composition_is_application(layouts);
  composition_goes_axis_by_axis(layouts);
  layouts_splice_like_vectors(layouts);
  sorting_orders_positions(layouts);
  coordinates_are_digits(layouts);
  overflow_throws();
  rank_maps_are_interned();
  cache_computes_once();
  cache_refuses_endless_waits();
  cache_lets_a_wait_be_given_up();
  cache_can_be_left_to_a_parent_process();
  differing_fields_tell_options_apart();
  ring_steps_count_parts();
  std::puts("all laws hold");
}
