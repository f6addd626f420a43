// The two inner products of decode attention, over one block of kBlock adjacent tokens of one KV
// head and up to kTileHeads of the query heads that share it:
//
//   score   q [G, dh] . keys [kBlock, dh]^T -> scores [G, kBlock]
//   weigh   weights [G, kBlock] x values [kBlock, dh] -> added to sums [G, dh]
//
// Tokens from `valid` on are never read. While one block is worked off, a later one (`ahead`, the
// block that the caller will reach kAhead blocks from now; may be null) is prefetched: pages are
// scattered, so the hardware can't guess it.
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
  for (int g = 0; g < G; ++g) heads[g] = query<S>(q + g * q_stride + at);
#pragma GCC unroll 16
  for (int t = 0; t < T; ++t) {
    const Operand key = operand<S, Half>(keys[t] + at);
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
    if (ahead != nullptr) prefetch(ahead + first * DH, kTokens * DH * sizeof(bf16));
    const bf16* rows[kTokens];
    for (int t = 0; t < kTokens; ++t) rows[t] = keys + std::min(first + t, valid - 1) * DH;
    Float acc[G][kTokens];
#pragma GCC unroll 16
    for (int g = 0; g < G; ++g)
      for (int t = 0; t < kTokens; ++t) acc[g][t] = fill(0.0f);
    for (int slice = 0; slice < Layout::kWhole; ++slice) {
      score_step<0, false>(q, Layout::kStride, rows, slice * kPair, acc);
      if constexpr (kSteps == 2) score_step<1, false>(q, Layout::kStride, rows, slice * kPair, acc);
    }
    if constexpr (Layout::kHalf)
      score_step<0, true>(q, Layout::kStride, rows, Layout::kWhole * kPair, acc);
#pragma GCC unroll 16
    for (int g = 0; g < G; ++g)
      for (int t = 0; t < kTokens; ++t) lanes[g][first + t] = acc[g][t];
  }
  for (int g = 0; g < G; ++g)
    for (int t = 0; t < kBlock; t += kLanes)
      store(scores + g * kItemTokens + t, mul(sum_each(lanes[g] + t), fill(scale)));
}

template <int S, bool Half, int G>
inline void weigh_step(const Act* weights, const bf16* first, const bf16* second,
                       Float (&acc)[G][2]) {
  Operand low, high;
  values<S, Half>(first, second, low, high);
  for (int g = 0; g < G; ++g) {
    const Operand weight = broadcast<S>(weights + g * kItemTokens);
    acc[g][0] = multiply_add(acc[g][0], low, weight);
    acc[g][1] = multiply_add(acc[g][1], high, weight);
  }
}

template <bool Half, int DH, int G>
inline void weigh_slice(const Act* weights, const bf16* values, int valid, float* sums) {
  Float acc[G][2];
  for (int g = 0; g < G; ++g)
    for (int v = 0; v < 2; ++v) acc[g][v] = load(sums + g * HeadLayout<DH>::kStride + v * kLanes);
  const auto pair = [&](int t, const bf16* first, const bf16* second) {
    weigh_step<0, Half>(weights + t, first, second, acc);
    if constexpr (kSteps == 2) weigh_step<1, Half>(weights + t, first, second, acc);
  };
  if (valid == kBlock) {
#pragma GCC unroll 8
    for (int t = 0; t < kBlock; t += 2) pair(t, values + t * DH, values + (t + 1) * DH);
  } else {
    for (int t = 0; t < valid; t += 2)  // the weight of a token that pads a pair is zero
      pair(t, values + t * DH, values + std::min(t + 1, valid - 1) * DH);
  }
  for (int g = 0; g < G; ++g)
    for (int v = 0; v < 2; ++v) store(sums + g * HeadLayout<DH>::kStride + v * kLanes, acc[g][v]);
}

// `sums` rows are HeadLayout<DH>::kStride long, in the order of `value_index` within each slice.
template <int DH, int G>
inline void weigh(const Act* weights, const bf16* values, int valid, const bf16* ahead,
                  float* sums) {
  using Layout = HeadLayout<DH>;
  constexpr int64_t kBytes = kBlock * DH * static_cast<int64_t>(sizeof(bf16));
  for (int slice = 0; slice < Layout::kWhole; ++slice) {
    if (ahead != nullptr) {
      const char* next = reinterpret_cast<const char*>(ahead);
      prefetch(next + kBytes / Layout::kSlices / 64 * 64 * slice, kBytes / Layout::kSlices + 63);
    }
    weigh_slice<false, DH, G>(weights, values + slice * kPair, valid, sums + slice * kPair);
  }
  if constexpr (Layout::kHalf) {
    constexpr int at = Layout::kWhole * kPair;
    weigh_slice<true, DH, G>(weights, values + at, valid, sums + at);
  }
}
}  // namespace tknp
