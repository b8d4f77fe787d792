// Cache with one entry for each (axis layout, options key). Single-flight: however many threads
// request an entry at the same time, one creates it.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <iterator>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "axis_layout.h"
#include "fingerprint.h"
#include "options_key.h"

namespace meshverse {

struct GroupKey {
  AxisLayout axis;
  OptionsKey options;

  friend bool operator==(const GroupKey& a, const GroupKey& b) {
    return a.axis == b.axis && a.options == b.options;
  }
};

struct GroupKeyHash {
  std::size_t operator()(const GroupKey& key) const {
    return static_cast<std::size_t>(hash_combine(key.axis.hash(), key.options.hash()));
  }
};

// Nothing is evicted: creating a group is collective, so a rank that evicted one by itself would
// create it again alone and hang. Only `remove` and `clear` remove entries. A failure is not
// cached, so that all ranks can try again.
//
// `Entry` is a handle whose copy is cheap and runs no foreign code. `WhileWaiting` lives as long as
// a wait for another thread, and is destroyed after the cache's lock is released: it can release a
// lock that the other thread needs. If its `may_give_up()` returns true, its `give_up_if_asked()`
// is called every kLookAround, without the cache's lock; an exception from it ends the wait.
//
// Forks: `reset_after_fork` makes the copy of a cache in a forked process usable. It relies on what
// Python's lock gives: at a fork, other threads are at most inside a wait.
template <class Entry, class WhileWaiting>
class GroupCache {
 public:
  static constexpr std::chrono::milliseconds kLookAround{50};

  struct Item {
    GroupKey key;
    Entry entry;
  };

  // The entry of `key`: the existing one, or the result of make().
  // If another thread is creating it, callers wait for that thread; if it fails, one of them tries
  // next. Exceptions of make() and of give_up_if_asked() pass through. Throws std::runtime_error
  // if the wait would be a deadlock.
  template <class Make>
  Entry get_or_create(const GroupKey& key, Make&& make) {
    while (true) {
      std::shared_ptr<Slot> slot;
      bool mine = false;
      {
        const std::lock_guard<std::mutex> lock(waits_->mutex);
        mine = slots_.find(key) == slots_.end();
        if (mine) slots_[key] = std::make_shared<Slot>(key);
        slot = slots_[key];
        if (slot->state == State::kReady) return slot->entry;
      }
      if (mine) return fill(slot, std::forward<Make>(make));
      wait_for(slot);
    }
  }

  // The entry of `key`; Entry() if there is none yet.
  Entry get(const GroupKey& key) const {
    const std::lock_guard<std::mutex> lock(waits_->mutex);
    const auto found = slots_.find(key);
    return found == slots_.end() ? Entry() : found->second->entry;
  }

  // Every entry, in order of creation.
  std::vector<Item> items() const {
    const std::lock_guard<std::mutex> lock(waits_->mutex);
    std::vector<Item> items;
    items.reserve(created_.size());
    for (const auto& slot : created_) items.push_back({slot->key, slot->entry});
    return items;
  }

  // Calls visit(key, entry) for every entry, under the lock: it must neither block nor call back.
  template <class Visit>
  void visit_items(Visit&& visit) const {
    const std::lock_guard<std::mutex> lock(waits_->mutex);
    for (const auto& slot : created_) visit(slot->key, slot->entry);
  }

  // Number of copies of an entry's key in the cache: one in `slots_`, one in the slot. Python's
  // collector sees the key's handles only if there are no other copies, see `handles.h`.
  static constexpr long kCopiesOfKey = 2;

  std::size_t size() const {
    const std::lock_guard<std::mutex> lock(waits_->mutex);
    return created_.size();
  }

  // Removes the entry of `key` if it is the one for which is_wanted(entry) is true; false if there
  // is none, or it is still being created. is_wanted() is called under the lock: it must neither
  // block nor call back.
  template <class IsWanted>
  bool remove(const GroupKey& key, IsWanted&& is_wanted) {
    std::shared_ptr<Slot> slot;  // destroyed after the lock is released, as in clear()
    const std::lock_guard<std::mutex> lock(waits_->mutex);
    const auto found = slots_.find(key);
    if (found == slots_.end() || found->second->state != State::kReady) return false;
    if (!is_wanted(found->second->entry)) return false;
    slot = found->second;
    slots_.erase(found);
    created_.erase(std::find(created_.begin(), created_.end(), slot));
    return true;
  }

  // Removes every entry. An entry that another thread is creating meanwhile is returned to that
  // thread, but not kept.
  void clear() {
    // Declared before the lock, to be destroyed after it is released: destroying an entry may run
    // foreign code, which may call this cache.
    Slots slots;
    std::vector<std::shared_ptr<Slot>> created;
    const std::lock_guard<std::mutex> lock(waits_->mutex);
    slots.swap(slots_);
    created.swap(created_);
  }

  // Call this in a forked process, in which other threads do not exist, before anything else.
  // Drops the entries that they were creating. One that this thread is creating is returned to it,
  // but not kept.
  void reset_after_fork() {
    // Never destroyed if a thread of the parent waits, as that thread has a reference to it.
    waits_ = std::make_shared<Waits>();
    std::vector<std::shared_ptr<Slot>> dropped;  // destroyed last, as that may run foreign code
    for (auto entry = slots_.begin(); entry != slots_.end();) {
      const std::shared_ptr<Slot> slot = entry->second;
      entry = slot->state == State::kReady ? std::next(entry) : slots_.erase(entry);
      if (slot->state == State::kReady) continue;
      slot->state = State::kFailed;
      dropped.push_back(slot);
    }
  }

 private:
  enum class State { kMaking, kReady, kFailed };

  struct Slot {
    explicit Slot(const GroupKey& group_key) : key(group_key) {}

    const GroupKey key;
    const std::thread::id maker = std::this_thread::get_id();
    State state = State::kMaking;
    Entry entry{};
  };

  using Slots = std::unordered_map<GroupKey, std::shared_ptr<Slot>, GroupKeyHash>;

  template <class Make>
  Entry fill(const std::shared_ptr<Slot>& slot, Make&& make) {
    try {
      // Outside the lock: make() is slow, and may request other entries of this cache.
      Entry entry = make();
      settle(slot, State::kReady, entry);
      return entry;
    } catch (...) {
      settle(slot, State::kFailed, Entry());
      throw;
    }
  }

  void settle(const std::shared_ptr<Slot>& slot, State state, const Entry& entry) {
    const std::lock_guard<std::mutex> lock(waits_->mutex);
    const auto found = slots_.find(slot->key);
    const bool still_wanted = found != slots_.end() && found->second == slot;
    if (state == State::kReady) {
      if (still_wanted) created_.push_back(slot);
      slot->entry = entry;
    } else if (still_wanted) {
      slots_.erase(found);
    }
    slot->state = state;
    waits_->settled.notify_all();
  }

  // All that a thread touches while it waits. It refers to it meanwhile.
  struct Waits {
    std::mutex mutex;  // protects all members of the cache, and the state and entry of every slot
    std::condition_variable settled;
    std::unordered_map<std::thread::id, const Slot*> waiting_for;
  };

  // Records the slot that this thread waits for. Created and destroyed under the cache's lock.
  class Waiting {
   public:
    Waiting(Waits& waits, const Slot& slot) : waits_(waits) {
      waits_.waiting_for[std::this_thread::get_id()] = &slot;
    }
    ~Waiting() { waits_.waiting_for.erase(std::this_thread::get_id()); }
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;

   private:
    Waits& waits_;
  };

  // Returns when `slot` is no longer being created.
  void wait_for(const std::shared_ptr<Slot>& slot) {
    const WhileWaiting while_waiting;
    const auto is_settled = [&] { return slot->state != State::kMaking; };
    while (true) {
      {
        const std::shared_ptr<Waits> waits = waits_;
        std::unique_lock<std::mutex> lock(waits->mutex);
        refuse_endless_wait(*slot);
        const Waiting waiting(*waits, *slot);
        if (!while_waiting.may_give_up()) return waits->settled.wait(lock, is_settled);
        if (waits->settled.wait_for(lock, kLookAround, is_settled)) return;
      }
      // It may run code that waits for other slots, or that forks: so nothing is held or recorded.
      while_waiting.give_up_if_asked();
    }
  }

  // Throws if the wait-for graph leads from `slot` back to this thread: waiting would deadlock.
  void refuse_endless_wait(const Slot& slot) const {
    const Slot* next = &slot;
    while (next && next->state == State::kMaking) {
      if (next->maker == std::this_thread::get_id()) {
        throw std::runtime_error(
            "group of axis " + slot.key.axis.to_string() + " with " + slot.key.options.to_string() +
            " was asked for while this thread is making it (or a group that another thread needs "
            "first): make() must not ask the cache for the entry it is to return");
      }
      const auto waits = waits_->waiting_for.find(next->maker);
      next = waits == waits_->waiting_for.end() ? nullptr : waits->second;
    }
  }

  std::shared_ptr<Waits> waits_ = std::make_shared<Waits>();
  Slots slots_;
  std::vector<std::shared_ptr<Slot>> created_;  // ready slots, in order of creation
};

}  // namespace meshverse
