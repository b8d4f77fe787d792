// Hashes that are the same in every process, on every machine and in every build.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <tuple>

namespace meshverse {

// A bijection of 64-bit words in which every input bit reaches every output bit.
// Constants: the finaliser of splitmix64 (Vigna, 2015), the "Mix13" variant of Stafford.
inline std::uint64_t mix(std::uint64_t word) {
  word = (word ^ (word >> 30)) * 0xbf58476d1ce4e5b9ULL;
  word = (word ^ (word >> 27)) * 0x94d049bb133111ebULL;
  return word ^ (word >> 31);
}

// A second bijection, unrelated to `mix`. Constants: fmix64 of MurmurHash3 (Appleby, 2011).
inline std::uint64_t mix_differently(std::uint64_t word) {
  word = (word ^ (word >> 33)) * 0xff51afd7ed558ccdULL;
  word = (word ^ (word >> 33)) * 0xc4ceb9fe1a85ec53ULL;
  return word ^ (word >> 33);
}

// 64-bit hash of a sequence, built word by word: adds `word` to the hash `seed`. The order counts.
inline std::uint64_t hash_combine(std::uint64_t seed, std::uint64_t word) {
  return mix(seed + 0x9e3779b97f4a7c15ULL + mix(word));
}

// 128-bit hash of a value. Values with equal fingerprints are taken for equal: an accidental
// collision of 128 bits is not expected in the lifetime of the universe.
struct Fingerprint {
  std::uint64_t high = 0;
  std::uint64_t low = 0;

  friend bool operator==(const Fingerprint& a, const Fingerprint& b) {
    return std::tie(a.high, a.low) == std::tie(b.high, b.low);
  }

  // 32 hexadecimal digits.
  std::string hex() const {
    static constexpr char kDigits[] = "0123456789abcdef";
    std::string text(32, '0');
    for (std::size_t i = 0; i < 16; ++i) {
      text[i] = kDigits[(high >> (60 - 4 * i)) & 15];
      text[16 + i] = kDigits[(low >> (60 - 4 * i)) & 15];
    }
    return text;
  }
};

// Accumulates a Fingerprint. Strings are prefixed by their length, so that add("ab").add("c") and
// add("a").add("bc") differ.
class FingerprintBuilder {
 public:
  FingerprintBuilder& add(std::uint64_t word) {
    high_ = mix(high_ ^ word) + 0x9e3779b97f4a7c15ULL;
    low_ = mix_differently(low_ ^ word) + 0xd1b54a32d192ed03ULL;
    return *this;
  }

  FingerprintBuilder& add(std::int64_t word) { return add(static_cast<std::uint64_t>(word)); }

  FingerprintBuilder& add(std::string_view text) {
    add(static_cast<std::uint64_t>(text.size()));
    for (std::size_t start = 0; start < text.size(); start += 8) {
      std::uint64_t word = 0;
      for (const char c : text.substr(start, 8)) {
        word = (word << 8) | static_cast<unsigned char>(c);
      }
      add(word);
    }
    return *this;
  }

  // Each half of the result depends on both lanes, so that it is a good 64-bit hash by itself.
  Fingerprint finish() const {
    return {mix(high_ ^ mix(low_)), mix_differently(low_ + mix(high_))};
  }

 private:
  std::uint64_t high_ = 0x6d65736876657273ULL;
  std::uint64_t low_ = 0x656d657368766572ULL;
};

}  // namespace meshverse
