// MLX's products of a few rows with a quantized matrix, launched as its `qmv` and `qmv_wide` do.
#include "simdgroups.h"
// Cut from MLX's header when this is compiled.
#include "quantized.inc"

constexpr uint N_SIMDGROUPS = 2, ROWS_PER_GROUP = 8, K_LANES = 8;

extern "C" bool qmv(
    const uint32_t* w, const float* scales, const float* biases, const float* x, float* y,
    int in_size, int out_size, int n_rows) {
  const uint n_groups = (out_size + ROWS_PER_GROUP - 1) / ROWS_PER_GROUP;
  return simd::run_grid({uint(n_rows), n_groups, 1}, N_SIMDGROUPS,
      [&](uint3 group, uint simdgroup, uint lane) {
        qmv_fast_impl<float, GROUP_SIZE, BITS>(
            w, scales, biases, x, y, in_size, out_size, group, simdgroup, lane);
      });
}

template <int N_VECTORS>
bool wide(
    const uint32_t* w, const float* scales, const float* biases, const float* x, float* y,
    int in_size, int out_size, int n_rows) {
  const uint n_tiles = (n_rows + N_VECTORS - 1) / N_VECTORS;
  const uint rows_per_group = simd::SIZE / K_LANES * N_SIMDGROUPS;
  const uint n_groups = (out_size + rows_per_group - 1) / rows_per_group;
  return simd::run_grid({n_tiles, n_groups, 1}, N_SIMDGROUPS,
      [&](uint3 group, uint simdgroup, uint lane) {
        qmv_wide_impl<float, GROUP_SIZE, BITS, N_VECTORS, K_LANES>(
            w, scales, biases, x, y, in_size, out_size, n_rows, group, simdgroup, lane);
      });
}

// As few tiles of at most five rows as possible, and the smallest that hold them.
extern "C" bool qmv_wide(
    const uint32_t* w, const float* scales, const float* biases, const float* x, float* y,
    int in_size, int out_size, int n_rows) {
  const int n_tiles = (n_rows + 4) / 5;
  const auto kernel = std::array{wide<1>, wide<2>, wide<3>, wide<4>, wide<5>};
  return kernel[(n_rows + n_tiles - 1) / n_tiles - 1](
      w, scales, biases, x, y, in_size, out_size, n_rows);
}
