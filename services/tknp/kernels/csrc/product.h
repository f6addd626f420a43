// Products that add to sums in memory, of operands in the caches (gemm.h reads weights from memory):
//
//   sums [rows, panels * kPanel] += activations [rows, 2 * pairs] x panels
#pragma once

#include "gemm.h"

namespace tknp {
// One panel; rows of sums are `sums_stride` apart. Fresh: = instead of +=. A function of its own:
// inlined, GCC keeps some of the sums in memory.
template <int Rows, bool Fresh>
[[gnu::noinline]] void accumulate(const Act* a, int64_t stride, const bf16* w, int64_t pairs,
                                  float* sums, int64_t sums_stride) {
  Float acc[Rows][1][2];
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r)
    for (int v = 0; v < 2; ++v)
      acc[r][0][v] = Fresh ? fill(0.0f) : load(sums + r * sums_stride + v * kLanes);
  multiply_tile(a, stride, w, pairs, acc, [] {});
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r)
    for (int v = 0; v < 2; ++v) store(sums + r * sums_stride + v * kLanes, acc[r][0][v]);
}

// accumulate<rows> for a row count known only now.
template <int Most, bool Fresh>
inline void accumulate_of(int rows, const Act* a, int64_t stride, const bf16* w, int64_t pairs,
                          float* sums, int64_t sums_stride) {
  if (rows == Most)
    accumulate<Most, Fresh>(a, stride, w, pairs, sums, sums_stride);
  else if constexpr (Most > 1)
    accumulate_of<Most - 1, Fresh>(rows, a, stride, w, pairs, sums, sums_stride);
}

// At most kTileRows rows, over the first `pairs` of the `all_pairs` that a panel holds.
template <bool Fresh>
inline void add_product(const Act* a, int64_t stride, int64_t rows, const bf16* packed,
                        int64_t pairs, int64_t all_pairs, int64_t panels, float* sums,
                        int64_t sums_stride) {
  for (int64_t panel = 0; panel < panels; ++panel)
    accumulate_of<kTileRows, Fresh>(static_cast<int>(rows), a, stride,
                                    packed + panel * all_pairs * 2 * kPanel, pairs,
                                    sums + panel * kPanel, sums_stride);
}
}  // namespace tknp
