// Products of many rows (gemm.h does those of few).
//
// Where bf16 has to be widened to float (kSteps == 2), every tile would widen the same weights
// again. `multiply_many` widens a piece of a panel once, and all rows of a chunk pass over it:
//
//   packed panel -> wide [k][kPanel] -> sums [rows][kPanel] -> epilogue
//
// Multiply-adds and their order are those of gemm.h, so a row's result does not tell which of the
// two computed it.
#pragma once

#include <type_traits>

#include "gemm.h"

namespace tknp {
inline constexpr int64_t kManyRows = 192;   // that share a widened piece
inline constexpr int64_t kManyPairs = 384;  // of k in a piece, which stays in the L2 cache
inline constexpr int64_t kManyFrom = 48;    // rows for which widening pays

// Weights as tiles of many rows take them; a pair of k has 2 * kPanel elements either way.
using Wide = std::conditional_t<kSteps == 2, float, bf16>;

inline constexpr int64_t wide_index(int64_t k, int64_t column) {
  return kSteps == 2 ? k * kPanel + column : (k / 2 * kPanel + column) * 2 + k % 2;
}

inline Wide to_wide(bf16 x) {
  if constexpr (kSteps == 2)
    return widen(x);
  else
    return x;
}

// Step S of vector V of one pair of k.
template <int S, int V, class W>
inline Operand weight(const W* pair) {
  if constexpr (std::is_same_v<W, bf16>)
    return operand<S>(pair + V * kPair);
  else
    return load(pair + S * kPanel + V * kLanes);
}

template <class W>
inline void widen_pairs(const bf16* packed, int64_t pairs, W* out) {
  for (int64_t k = 0; k < pairs; ++k, packed += 2 * kPanel, out += 2 * kPanel) {
    prefetch(reinterpret_cast<const char*>(packed) + kPrefetchBytes, 4 * kPanel);
    store(out, weight<0, 0>(packed));
    store(out + kLanes, weight<0, 1>(packed));
    store(out + kPanel, weight<1, 0>(packed));
    store(out + kPanel + kLanes, weight<1, 1>(packed));
  }
}

template <int S, int Rows, class W>
inline void accumulate_step(const Act* a, int64_t stride, const W* pair, Float (&acc)[Rows][2]) {
  const Operand low = weight<S, 0>(pair), high = weight<S, 1>(pair);
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r) {
    const Operand x = broadcast<S>(a + r * stride);
    acc[r][0] = multiply_add(acc[r][0], low, x);
    acc[r][1] = multiply_add(acc[r][1], high, x);
  }
}

// sums [Rows, kPanel], rows `sums_stride` apart, += a [Rows, 2 * pairs] x one panel; Fresh: =.
// A function of its own: inlined, GCC keeps some of the sums in memory.
template <int Rows, bool Fresh, class W>
[[gnu::noinline]] void accumulate(const Act* a, int64_t stride, const W* w, int64_t pairs,
                                  float* sums, int64_t sums_stride) {
  Float acc[Rows][2];
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r)
    for (int v = 0; v < 2; ++v)
      acc[r][v] = Fresh ? fill(0.0f) : load(sums + r * sums_stride + v * kLanes);
  for (int64_t k = 0; k < pairs; ++k) {
    accumulate_step<0>(a + 2 * k, stride, w + k * 2 * kPanel, acc);
    if constexpr (kSteps == 2) accumulate_step<1>(a + 2 * k, stride, w + k * 2 * kPanel, acc);
  }
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r)
    for (int v = 0; v < 2; ++v) store(sums + r * sums_stride + v * kLanes, acc[r][v]);
}

template <int Most, bool Fresh, class W>
inline void accumulate_of(int rows, const Act* a, int64_t stride, const W* w, int64_t pairs,
                          float* sums, int64_t sums_stride) {
  if (rows == Most)
    accumulate<Most, Fresh>(a, stride, w, pairs, sums, sums_stride);
  else if constexpr (Most > 1)
    accumulate_of<Most - 1, Fresh>(rows, a, stride, w, pairs, sums, sums_stride);
}

// As `accumulate`, of any number of rows, in tiles of nearly equal height.
template <bool Fresh, class W>
inline void accumulate_rows(const Act* a, int64_t stride, int64_t rows, const W* w, int64_t pairs,
                            float* sums, int64_t sums_stride) {
  const int64_t tiles = ceil_div(rows, kTileRows);
  for (int64_t t = 0; t < tiles; ++t) {
    const int64_t first = rows * t / tiles, stop = rows * (t + 1) / tiles;
    accumulate_of<kTileRows, Fresh>(static_cast<int>(stop - first), a + first * stride, stride, w,
                                    pairs, sums + first * sums_stride, sums_stride);
  }
}

// out [rows, panels * kPanel], rows `out_stride` apart, += a x weights that are Wide already;
// Fresh: =.
template <bool Fresh>
inline void multiply_wide(const Act* a, int64_t stride, int64_t rows, const Wide* w, int64_t pairs,
                          int64_t panels, float* out, int64_t out_stride) {
  for (int64_t panel = 0; panel < panels; ++panel)
    accumulate_rows<Fresh>(a, stride, rows, w + panel * pairs * 2 * kPanel, pairs,
                           out + panel * kPanel, out_stride);
}

// As `multiply` of gemm.h, whatever the number of rows.
template <class Epilogue>
inline void multiply_many(const Act* a, int64_t stride, int64_t rows, const bf16* packed,
                          int64_t pairs, Range panels, Epilogue&& epilogue) {
  if constexpr (kSteps == 1) {
    multiply(a, stride, rows, packed, pairs, panels, epilogue);
  } else {
    if (rows < kManyFrom) return multiply(a, stride, rows, packed, pairs, panels, epilogue);
    alignas(64) Wide wide[2 * kManyPairs * kPanel];
    alignas(64) float sums[kManyRows * kPanel];
    for (int64_t start = 0; start < rows; start += kManyRows) {
      const int64_t count = std::min(kManyRows, rows - start);
      for (int64_t panel = panels.begin; panel < panels.end; ++panel) {
        std::fill_n(sums, count * kPanel, 0.0f);
        for (int64_t k = 0; k < pairs; k += kManyPairs) {
          const int64_t piece = std::min(kManyPairs, pairs - k);
          widen_pairs(packed + (panel * pairs + k) * 2 * kPanel, piece, wide);
          accumulate_rows<false>(a + start * stride + 2 * k, stride, count, wide, piece, sums,
                                 kPanel);
        }
        for (int64_t r = 0; r < count; ++r)
          epilogue(start + r, panel * kPanel, load(sums + r * kPanel),
                   load(sums + r * kPanel + kLanes));
      }
    }
  }
}
}  // namespace tknp
