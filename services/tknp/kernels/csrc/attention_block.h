// The two inner products of decode attention, over one block of kBlock adjacent tokens of one KV
// head and up to kTileHeads of the query heads that share it:
//
//   score   q [G, dh] . keys [kBlock, dh]^T -> scores [G, kBlock]
//   weigh   weights [G, kBlock] x values [kBlock, dh] -> added to sums [G, dh]
//
// Tokens from `valid` on are never read. While one block is worked off, a later one (`ahead`, the
// block that the caller will reach kAhead blocks from now; may be null) is prefetched, evenly over
// the work: pages are scattered, so the hardware can't guess it.
#pragma once

#include <algorithm>

#include "simd.h"

namespace tknp {
inline constexpr int kBlock = 16;
inline constexpr int kAhead = 4;
inline constexpr int kTileHeads = 4;
inline constexpr int kItemTokens = 256;  // row stride of scores and weights

template <int DH>
struct HeadLayout {
  static_assert(DH % 16 == 0);
  static constexpr int kWhole = DH / kPair;  // whole slices of kPair elements
  static constexpr bool kHalf = DH % kPair != 0;
  static constexpr int kSlices = kWhole + kHalf;
  static constexpr int kStride = kSlices * kPair;  // of a query or a row of sums, zero-padded
};

// Most tokens, a power of two, whose sums for G heads fit in the registers.
constexpr int tile_tokens(int heads) {
  int tokens = kBlock;
  while (tokens * heads > 2 * kTileRows) tokens /= 2;
  return tokens;
}

template <int S, bool Half, int G, int T>
inline void score_step(const Act* q, int q_stride, const bf16* const (&keys)[T], int64_t at,
                       Float (&acc)[G][T]) {
  Operand heads[G];
#pragma GCC unroll 16
  for (int g = 0; g < G; ++g) heads[g] = query<S>(q + g * q_stride + at);
#pragma GCC unroll 16
  for (int t = 0; t < T; ++t) {
    const Operand key = operand<S, Half>(keys[t] + at);
#pragma GCC unroll 16
    for (int g = 0; g < G; ++g) acc[g][t] = multiply_add(acc[g][t], key, heads[g]);
  }
}

template <int DH, int G>
inline void score(const Act* q, const bf16* keys, int valid, const bf16* ahead, float scale,
                  float* scores) {
  using Layout = HeadLayout<DH>;
  constexpr int kTokens = tile_tokens(G);
  Float lanes[G][kBlock];
  for (int first = 0; first < kBlock; first += kTokens) {
    const bf16* rows[kTokens];
    for (int t = 0; t < kTokens; ++t) rows[t] = keys + std::min(first + t, valid - 1) * DH;
    Float acc[G][kTokens];
#pragma GCC unroll 16
    for (int g = 0; g < G; ++g)
#pragma GCC unroll 16
      for (int t = 0; t < kTokens; ++t) acc[g][t] = fill(0.0f);
    for (int slice = 0; slice < Layout::kWhole; ++slice) {
      if (ahead != nullptr)
        prefetch(ahead + first * DH + slice * kTokens * kPair, kTokens * kPair * sizeof(bf16));
      score_step<0, false>(q, Layout::kStride, rows, slice * kPair, acc);
      if constexpr (kSteps == 2) score_step<1, false>(q, Layout::kStride, rows, slice * kPair, acc);
    }
    if constexpr (Layout::kHalf) {
      if (ahead != nullptr)
        prefetch(ahead + first * DH + Layout::kWhole * kTokens * kPair,
                 kTokens * kPair / 2 * sizeof(bf16));
      score_step<0, true>(q, Layout::kStride, rows, Layout::kWhole * kPair, acc);
    }
#pragma GCC unroll 16
    for (int g = 0; g < G; ++g)
#pragma GCC unroll 16
      for (int t = 0; t < kTokens; ++t) lanes[g][first + t] = acc[g][t];
  }
  for (int g = 0; g < G; ++g)
    for (int t = 0; t < kBlock; t += kLanes)
      store(scores + g * kItemTokens + t, mul(sum_each(lanes[g] + t), fill(scale)));
}

// Slices whose sums for G heads fit in the registers, beside G weights and two values.
constexpr int slices_together(int heads) {
  return std::max((kRegisters - 2 - heads) / (2 * heads), 1);
}

template <int S, int DH, int First, int N, int G>
inline void weigh_step(const Act* weights, const bf16* first, const bf16* second,
                       Float (&acc)[N][G][2]) {
#pragma GCC unroll 16
  for (int n = 0; n < N; ++n) {
    constexpr int last = First + N - 1;
    const int at = (First + n) * kPair;
    Operand low, high;
    if (HeadLayout<DH>::kHalf && n == N - 1 && last == HeadLayout<DH>::kWhole)
      values<S, HeadLayout<DH>::kHalf>(first + at, second + at, low, high);
    else
      values<S>(first + at, second + at, low, high);
#pragma GCC unroll 16
    for (int g = 0; g < G; ++g) {
      const Operand weight = broadcast<S>(weights + g * kItemTokens);
      acc[n][g][0] = multiply_add(acc[n][g][0], low, weight);
      acc[n][g][1] = multiply_add(acc[n][g][1], high, weight);
    }
  }
}

// Slices from First on; `sums` rows are HeadLayout<DH>::kStride long.
template <int DH, int G, int First = 0>
inline void weigh_slices(const Act* weights, const bf16* values, int valid, const bf16* ahead,
                         float* sums) {
  using Layout = HeadLayout<DH>;
  constexpr int N = std::min(slices_together(G), Layout::kSlices - First);
  const auto sum = [&](int n, int g, int v) {
    return sums + g * Layout::kStride + (First + n) * kPair + v * kLanes;
  };
  Float acc[N][G][2];
#pragma GCC unroll 16
  for (int n = 0; n < N; ++n)
#pragma GCC unroll 16
    for (int g = 0; g < G; ++g)
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) acc[n][g][v] = load(sum(n, g, v));
  for (int t = 0; t < valid; t += 2) {
    if (ahead != nullptr)
      prefetch(ahead + (First * kBlock + t * N) * kPair, 2 * N * kPair * sizeof(bf16));
    const bf16* first = values + t * DH;
    const bf16* second = t + 1 < valid ? first + DH : first;  // a token that pads has weight zero
    weigh_step<0, DH, First>(weights + t, first, second, acc);
    if constexpr (kSteps == 2) weigh_step<1, DH, First>(weights + t, first, second, acc);
  }
#pragma GCC unroll 16
  for (int n = 0; n < N; ++n)
#pragma GCC unroll 16
    for (int g = 0; g < G; ++g)
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) store(sum(n, g, v), acc[n][g][v]);
  if constexpr (First + N < Layout::kSlices)
    weigh_slices<DH, G, First + N>(weights, values, valid, ahead, sums);
}

// Adds to `sums`, in the order of `value_index` within each slice.
template <int DH, int G>
inline void weigh(const Act* weights, const bf16* values, int valid, const bf16* ahead,
                  float* sums) {
  weigh_slices<DH, G>(weights, values, valid, ahead, sums);
}
}  // namespace tknp
