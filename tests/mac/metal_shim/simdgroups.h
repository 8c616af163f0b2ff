// Metal's language as C++, for kernels whose threads meet in functions of their SIMD-group only.
//
// The 32 threads of a SIMD-group are fibers. Each runs until it calls such a function or ends; once
// all wait in one, all read the values of all. Address spaces mean nothing here.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <vector>

#include <ucontext.h>

using uint = unsigned int;
struct uint3 { uint x, y, z; };
struct short2 { short x, y; };

namespace simd {

constexpr uint SIZE = 32;
constexpr size_t STACK_BYTES = 1 << 16;
using Values = std::array<float, SIZE>;

inline ucontext_t scheduler, fibers[SIZE];
inline std::vector<char> stacks(SIZE * STACK_BYTES);
inline std::function<void(uint)> body;
inline Values passed, seen;
inline std::array<bool, SIZE> has_ended;
inline uint current;

inline const Values& exchange(float value) {
  passed[current] = value;
  swapcontext(&fibers[current], &scheduler);
  return seen;
}

inline void run_lane() {
  body(current);
  has_ended[current] = true;
}

// Runs `kernel(lane)` in all lanes; false where only some of them called a SIMD-group function.
inline bool run(const std::function<void(uint)>& kernel) {
  body = kernel;
  has_ended.fill(false);
  for (uint lane = 0; lane < SIZE; lane++) {
    getcontext(&fibers[lane]);
    fibers[lane].uc_stack.ss_sp = stacks.data() + lane * STACK_BYTES;
    fibers[lane].uc_stack.ss_size = STACK_BYTES;
    fibers[lane].uc_link = &scheduler;
    makecontext(&fibers[lane], run_lane, 0);
  }
  while (true) {
    for (current = 0; current < SIZE; current++) swapcontext(&scheduler, &fibers[current]);
    const auto n_ended = std::count(has_ended.begin(), has_ended.end(), true);
    if (n_ended > 0) return n_ended == SIZE;
    seen = passed;
  }
}

// Runs `kernel(threadgroup, SIMD-group, lane)` for a grid of threadgroups, one after another.
template <typename Kernel>
bool run_grid(uint3 groups, uint n_simdgroups, Kernel kernel) {
  for (uint z = 0; z < groups.z; z++)
    for (uint y = 0; y < groups.y; y++)
      for (uint x = 0; x < groups.x; x++)
        for (uint simdgroup = 0; simdgroup < n_simdgroups; simdgroup++)
          if (!run([&](uint lane) { kernel(uint3{x, y, z}, simdgroup, lane); })) return false;
  return true;
}

}  // namespace simd

namespace metal {

using std::clamp, std::max, std::min;

template <typename T>
T select(T a, T b, bool is_second) { return is_second ? b : a; }

// The sum of a butterfly, as simd_sum adds on Apple's GPUs.
inline float simd_sum(float value) {
  simd::Values sums = simd::exchange(value);
  const uint lane = simd::current;
  for (uint step = 1; step < simd::SIZE; step *= 2) {
    const simd::Values before = sums;
    for (uint i = 0; i < simd::SIZE; i++) sums[i] = before[i] + before[i ^ step];
  }
  return sums[lane];
}

// Named by kernels that nothing here runs.
float quad_sum(float);

inline float simd_shuffle_xor(float value, uint mask) {
  const simd::Values& values = simd::exchange(value);
  return values[simd::current ^ mask];
}

inline float simd_shuffle_down(float value, uint delta) {
  const simd::Values& values = simd::exchange(value);
  return values[std::min(simd::current + delta, simd::SIZE - 1)];
}

}  // namespace metal

using namespace metal;

// After all headers of C++, which have these names too.
#define METAL_FUNC inline
#define constant
#define device
#define thread
#define threadgroup
