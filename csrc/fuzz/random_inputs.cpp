// Runs a fuzz target on random inputs, for compilers without libFuzzer: `fuzz_layouts SECONDS
// SEED`.
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

int main(int count, char** arguments) {
  const double seconds = count > 1 ? std::atof(arguments[1]) : 1;
  const auto seed = static_cast<std::uint64_t>(count > 2 ? std::atoll(arguments[2]) : 0);
  std::mt19937_64 random(seed);
  std::uint64_t runs = 0;
  // The clock is read once in 64 inputs only, because reading it takes time.
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  while (runs % 64 != 0 || std::chrono::steady_clock::now() < end) {
    std::vector<std::uint8_t> input(random() % 65);
    for (std::uint8_t& byte : input) byte = static_cast<std::uint8_t>(random());
    LLVMFuzzerTestOneInput(input.data(), input.size());
    ++runs;
  }
  std::printf("%llu random inputs, seed %llu: all laws hold\n",
              static_cast<unsigned long long>(runs), static_cast<unsigned long long>(seed));
}
