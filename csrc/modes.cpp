#include "modes.h"

#include <stdexcept>

#include "checked_math.h"

namespace meshverse {
namespace {

using Integers = std::vector<std::int64_t>;

}  // namespace

std::vector<Mode> zip_modes(const Integers& sizes, const Integers& strides) {
  if (sizes.size() != strides.size()) {
    throw std::invalid_argument("layout of sizes " + join(sizes) + " and strides " + join(strides) +
                                ": every size needs one stride; give as many strides as sizes, or "
                                "none for row-major order");
  }
  std::vector<Mode> modes;
  modes.reserve(sizes.size());
  for (std::size_t i = 0; i < sizes.size(); ++i) modes.push_back({sizes[i], strides[i]});
  return modes;
}

std::vector<Mode> row_major_modes(const Integers& sizes) {
  std::vector<Mode> modes(sizes.size());
  std::int64_t stride = 1;
  for (std::size_t i = sizes.size(); i-- > 0;) {
    modes[i] = {sizes[i], stride};
    if (sizes[i] > 1) stride = checked_multiply(stride, sizes[i], "a row-major stride");
  }
  return modes;
}

std::string join(const Integers& values) {
  std::string text = "(";
  for (const std::int64_t value : values) {
    if (text.size() > 1) text += ",";
    text += std::to_string(value);
  }
  return text + ")";
}

}  // namespace meshverse
