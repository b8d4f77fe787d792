// The group cache against a plain map: any sequence of calls by one thread, some within others.
#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "group_cache.h"
#include "input.h"

namespace meshverse {
namespace {

struct NeverGivesUp {
  bool may_give_up() const { return false; }
  void give_up_if_asked() const {}
};

struct Failed {};

class Model {
 public:
  explicit Model(Input& input) : input_(input) {}

  void step(int depth) {
    const int key = static_cast<int>(input_.of(0, 3));
    switch (input_.of(0, 5)) {
      case 0:
        LAW(!cache_.remove(group_key(key), [](const auto&) { return false; }));
        LAW(cache_.remove(group_key(key), [&](const auto& entry) { return entry == at(key); }) ==
            (entries_.count(key) == 1));
        forget(key);
        break;
      case 1:
        if (input_.of(0, 7) == 0) clear();
        break;
      case 2:
        LAW(cache_.get(group_key(key)) == at(key));
        break;
      default:
        ask(key, depth);
    }
    LAW(cache_.size() == order_.size());
    const auto items = cache_.items();
    for (std::size_t i = 0; i < items.size(); ++i) {
      LAW(items[i].key == group_key(order_[i]) && items[i].entry == at(order_[i]));
    }
  }

 private:
  static GroupKey group_key(int key) {
    OptionsKey options;
    options.backend = key % 2 == 0 ? "gloo" : "nccl";
    return {AxisLayout::row_major({2 + key / 2}), options};
  }

  std::shared_ptr<int> at(int key) const {
    const auto found = entries_.find(key);
    return found == entries_.end() ? nullptr : found->second;
  }

  void forget(int key) {
    entries_.erase(key);
    order_.erase(std::remove(order_.begin(), order_.end(), key), order_.end());
  }

  void clear() {
    cache_.clear();
    entries_.clear();
    order_.clear();
    making_.clear();  // entries that are being created are returned, but not kept
  }

  // Requests an entry. Its creation may request others, and may fail.
  void ask(int key, int depth) {
    if (const auto there = at(key)) {
      LAW(cache_.get_or_create(group_key(key), [] { return std::make_shared<int>(); }) == there);
      return;
    }
    const auto nothing = [] { return std::make_shared<int>(); };
    if (std::count(making_.begin(), making_.end(), key) > 0) {
      LAW(throws<std::runtime_error>([&] { cache_.get_or_create(group_key(key), nothing); }));
      return;
    }
    std::shared_ptr<int> entry;
    bool kept = true;
    try {
      const auto got = cache_.get_or_create(group_key(key), [&] {
        making_.push_back(key);
        for (std::int64_t calls = depth < 3 ? input_.of(0, 2) : 0; calls > 0; --calls) {
          step(depth + 1);
        }
        const auto mine = std::find(making_.begin(), making_.end(), key);
        kept = mine != making_.end();
        if (kept) making_.erase(mine);
        if (input_.of(0, 4) == 0) throw Failed();
        entry = std::make_shared<int>(key);
        return entry;
      });
      LAW(got == entry);
    } catch (const Failed&) {
      return;
    }
    if (!kept) return;
    entries_[key] = entry;
    order_.push_back(key);
  }

  Input& input_;
  GroupCache<std::shared_ptr<int>, NeverGivesUp> cache_;
  std::map<int, std::shared_ptr<int>> entries_;
  std::vector<int> order_;   // of creation
  std::vector<int> making_;  // by this thread, and still wanted
};

}  // namespace
}  // namespace meshverse

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  meshverse::Input input(data, size);
  meshverse::Model model(input);
  while (!input.is_used_up()) model.step(0);
  return 0;
}
