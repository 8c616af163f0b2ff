// mlx-lm's kernels of the gated delta rule, launched as it does.
#include "simdgroups.h"

// Bodies are written from mlx-lm's strings when this is compiled.
#define KERNEL(name, rows_per_simdgroup)                                                          \
  extern "C" bool run_##name(                                                                     \
      const float* q, const float* k, const float* v, const float* g, const float* beta,          \
      const float* state_in, float* y, float* state_out, int n_batch, int T) {                    \
    return simd::run_grid({1, Dv / rows_per_simdgroup, uint(n_batch * Hv)}, 1,                    \
        [&](uint3 group, uint, uint lane) {                                                       \
          name(q, k, v, g, beta, state_in, T, y, state_out, {lane, group.y, group.z}, {lane, 0, 0}, \
               lane);                                                                             \
        });                                                                                       \
  }

#define PARAMETERS                                                                                \
  const float *q, const float *k, const float *v, const float *g, const float *beta,              \
      const float *state_in, const int &T, float *y, float *state_out,                            \
      uint3 thread_position_in_grid, uint3 thread_position_in_threadgroup,                        \
      uint thread_index_in_simdgroup

using InT = float;
using StT = float;
constexpr int Dk = KEY_DIM, Dv = VALUE_DIM, Hk = KEY_HEADS, Hv = VALUE_HEADS;

void gated_delta_step(PARAMETERS) {
#include "gated_delta_step.inc"
}
void gated_delta_step_xtree(PARAMETERS) {
#include "gated_delta_step_xtree.inc"
}
void gated_delta_step_packed_btree(PARAMETERS) {
#include "gated_delta_step_packed_btree.inc"
}

KERNEL(gated_delta_step, 1)
KERNEL(gated_delta_step_xtree, 1)
KERNEL(gated_delta_step_packed_btree, 8)
