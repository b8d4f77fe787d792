#include "reshard/packing.h"

#include <algorithm>
#include <tuple>
#include <utility>

namespace meshverse::reshard {
namespace {

// The dimension along which senders share a box: the outermost that is long enough for nearly equal
// shares, else the longest.
std::size_t dim_to_share(const std::vector<std::int64_t>& extent, std::int64_t shares) {
  constexpr std::int64_t kRowsEach = 16;
  for (std::size_t dim = 0; dim < extent.size(); ++dim) {
    if (extent[dim] >= shares * kRowsEach) return dim;
  }
  return static_cast<std::size_t>(std::max_element(extent.begin(), extent.end()) - extent.begin());
}

// One message that is being filled.
class Filling {
 public:
  Filling(std::int64_t step, std::int64_t peer, bool is_sent, std::int64_t capacity, Plan& plan)
      : step_(step), peer_(peer), is_sent_(is_sent), capacity_(capacity), plan_(plan) {
    begin();
  }

  // Adds a box; begins further messages if it does not fit into this one.
  void add(Box box) {
    while (box.bytes() > room()) {
      const auto rows = std::find_if(box.extent.begin(), box.extent.end(),
                                     [](std::int64_t extent) { return extent > 1; });
      if (rows == box.extent.end()) {  // one element, which fits into the next message
        end();
        continue;
      }
      const auto dim = static_cast<std::size_t>(rows - box.extent.begin());
      const std::int64_t row_bytes = box.bytes() / *rows;
      if (const std::int64_t n_rows = room() / row_bytes; n_rows > 0) {
        put(box.split_off(dim, n_rows));
      } else if (bytes_ > 0) {
        end();
      } else {
        add(box.split_off(dim, 1));
      }
    }
    put(box);
  }

  void end() {
    if (bytes_ == 0) return;
    plan_.messages.push_back({step_, round_, peer_, is_sent_, bytes_, first_, n_boxes_});
    ++round_;
    begin();
  }

 private:
  std::int64_t room() const { return capacity_ - bytes_; }

  void begin() {
    bytes_ = 0;
    n_boxes_ = 0;
    first_ = static_cast<std::int64_t>(plan_.boxes.size());
  }

  void put(const Box& box) {
    auto& to = plan_.boxes;
    to.insert(to.end(), {box.tensor, bytes_, static_cast<std::int64_t>(box.extent.size())});
    to.insert(to.end(), box.mine.begin(), box.mine.end());
    to.insert(to.end(), box.extent.begin(), box.extent.end());
    bytes_ += box.bytes();
    ++n_boxes_;
  }

  std::int64_t step_, peer_;
  bool is_sent_;
  std::int64_t capacity_;
  Plan& plan_;
  std::int64_t round_ = 0, bytes_ = 0, n_boxes_ = 0, first_ = 0;
};

}  // namespace

std::int64_t Box::bytes() const {
  std::int64_t total = itemsize;
  for (const std::int64_t size : extent) total *= size;
  return total;
}

Box Box::split_off(std::size_t dim, std::int64_t extent_there) {
  Box first = *this;
  first.extent[dim] = extent_there;
  global[dim] += extent_there;
  mine[dim] += extent_there;
  extent[dim] -= extent_there;
  return first;
}

Box part_of(const Box& box, const Share& share) {
  Box part = box;
  if (share.is_whole()) return part;
  if (box.extent.empty()) {  // one element: the first sender sends it
    if (share.from != 0) part.itemsize = 0;
    return part;
  }
  const std::size_t dim = dim_to_share(box.extent, share.of);
  // Not extent * from, which may need more than 64 bits.
  const auto row = [&](std::int64_t index) {
    const std::int64_t each = box.extent[dim] / share.of, rest = box.extent[dim] % share.of;
    return each * index + rest * index / share.of;
  };
  const std::int64_t start = row(share.from);
  part.global[dim] += start;
  part.mine[dim] += start;
  part.extent[dim] = row(share.to) - start;
  return part;
}

void pack(std::vector<Box>& boxes, std::int64_t step, std::int64_t peer, bool is_sent,
          std::int64_t round_bytes, Plan& plan) {
  std::sort(boxes.begin(), boxes.end(), [](const Box& a, const Box& b) {
    return std::tie(b.itemsize, a.tensor, a.global) < std::tie(a.itemsize, b.tensor, b.global);
  });
  Filling message(step, peer, is_sent, round_bytes, plan);
  for (Box& box : boxes) message.add(std::move(box));
  message.end();
}

}  // namespace meshverse::reshard
