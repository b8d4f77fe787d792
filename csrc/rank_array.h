// A block of ranks (or positions) that other libraries can view without a copy.
#pragma once

#include <cstdint>
#include <utility>
#include <variant>
#include <vector>

namespace meshverse {

// Contiguous, row-major int32 or int64 values; `shape` has one or two entries.
struct RankArray {
  using Values = std::variant<std::vector<std::int32_t>, std::vector<std::int64_t>>;

  explicit RankArray(Values flat)
      : shape{std::visit([](const auto& v) { return static_cast<std::int64_t>(v.size()); }, flat)},
        values(std::move(flat)) {}

  // Pre-condition: rows * columns values.
  RankArray(std::int64_t rows, std::int64_t columns, Values flat)
      : shape{rows, columns}, values(std::move(flat)) {}

  std::vector<std::int64_t> shape;
  Values values;
};

}  // namespace meshverse
