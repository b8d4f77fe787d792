// Input of every fuzz target, and how it reports a broken law.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

// Aborts, so that the fuzzer saves the input.
#define LAW(condition)                                                                   \
  do {                                                                                   \
    if (!(condition)) {                                                                  \
      std::fprintf(stderr, "%s:%d: %s does not hold\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                      \
    }                                                                                    \
  } while (false)

// Entry point of a fuzzer: calls `check` with an Input of its bytes.
#define FUZZ(check)                                                                   \
  extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) { \
    meshverse::Input input(data, size);                                               \
    check(input);                                                                     \
    return 0;                                                                         \
  }

namespace meshverse {

using Integers = std::vector<std::int64_t>;

// Numbers out of a fuzzer's bytes; zeros once they are used up.
class Input {
 public:
  Input(const std::uint8_t* data, std::size_t size) : data_(data), size_(size) {}

  bool is_used_up() const { return size_ == 0; }

  std::uint8_t byte() {
    if (size_ == 0) return 0;
    --size_;
    return *data_++;
  }

  std::uint64_t word() {
    std::uint64_t word = 0;
    for (int i = 0; i < 8; ++i) word = (word << 8) | byte();
    return word;
  }

  // A number in low..high, both included; the range may have at most 256 numbers.
  std::int64_t of(std::int64_t low, std::int64_t high) { return low + byte() % (high - low + 1); }

  // A few letters: few enough for equal strings to occur.
  std::string text() {
    std::string text;
    for (std::int64_t length = of(0, 3); length > 0; --length) {
      text += static_cast<char>('a' + of(0, 2));
    }
    return text;
  }

 private:
  const std::uint8_t* data_;
  std::size_t size_;
};

template <class Error, class Call>
bool throws(Call&& call) {
  try {
    call();
  } catch (const Error&) {
    return true;
  }
  return false;
}

}  // namespace meshverse
