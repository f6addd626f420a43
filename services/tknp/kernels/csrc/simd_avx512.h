// simd.h for AVX-512 with BF16: pairs of bf16 are multiplied and summed into float by one
// instruction (VDPBF16PS), activations are kept in bf16.
#pragma once

#include <immintrin.h>

namespace tknp {
using Float = __m512;
using Operand = __m512bh;
using Act = bf16;
inline constexpr int kLanes = 16;
inline constexpr int kPair = 2 * kLanes;  // bf16 elements behind one Operand
inline constexpr int kSteps = 1;
inline constexpr int kRegisters = 32;
inline constexpr int kTileRows = 12;  // 12 rows x 2 vectors of accumulators, 32 registers in all

inline Float fill(float x) { return _mm512_set1_ps(x); }
inline Float load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Float x) { _mm512_storeu_ps(p, x); }
inline Float add(Float a, Float b) { return _mm512_add_ps(a, b); }
inline Float sub(Float a, Float b) { return _mm512_sub_ps(a, b); }
inline Float mul(Float a, Float b) { return _mm512_mul_ps(a, b); }
inline Float div(Float a, Float b) { return _mm512_div_ps(a, b); }
inline Float fma(Float a, Float b, Float c) { return _mm512_fmadd_ps(a, b, c); }
// Of minimum and maximum the second operand wins where either is NaN.
inline Float minimum(Float a, Float b) { return _mm512_min_ps(a, b); }
inline Float maximum(Float a, Float b) { return _mm512_max_ps(a, b); }
inline Float round_to_int(Float a) { return _mm512_roundscale_ps(a, 0); }
// p * 2^n for integral n.
inline Float scale_by_power_of_two(Float p, Float n) { return _mm512_scalef_ps(p, n); }

inline Float load_bf16(const bf16* p) {
  const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}
inline void store_bf16(bf16* p, Float x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(x));
}
inline void store_act(Act* p, Float x) { store_bf16(p, x); }
inline Act to_act(float x) { return narrow(x); }

inline float sum(Float x) { return _mm512_reduce_add_ps(x); }
inline float largest(Float x) { return _mm512_reduce_max_ps(x); }
// kLanes vectors -> the vector of their sums: each round adds the halves of two vectors into one.
inline Float sum_each(const Float* x) {
  Float quarter[4];
  for (int i = 0; i < 4; ++i) {
    __m512d pair[2];
    for (int j = 0; j < 2; ++j) {
      const Float a = x[4 * i + 2 * j], b = x[4 * i + 2 * j + 1];
      pair[j] = _mm512_castps_pd(add(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)));
    }
    quarter[i] = add(_mm512_castpd_ps(_mm512_unpacklo_pd(pair[0], pair[1])),
                     _mm512_castpd_ps(_mm512_unpackhi_pd(pair[0], pair[1])));
  }
  const auto fold = [](Float a, Float b) {
    return add(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  };
  return fold(fold(quarter[0], quarter[1]), fold(quarter[2], quarter[3]));
}

// kPair elements; Half: only the first kLanes exist, the rest are zero.
template <bool Half>
inline __m512i load_pairs(const bf16* p) {
  if constexpr (Half)
    return _mm512_zextsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  else
    return _mm512_loadu_si512(p);
}
// Step S of kLanes pairs in memory.
template <int S, bool Half = false>
inline Operand operand(const bf16* p) {
  return (Operand)load_pairs<Half>(p);
}
// Step S of one pair of activations, in every lane.
template <int S>
inline Operand broadcast(const Act* pair) {
  int bits;
  std::memcpy(&bits, pair, sizeof bits);
  return (Operand)_mm512_set1_epi32(bits);
}
// What one instruction gives anyway.
struct Mask {};
inline Mask odd_mask() { return {}; }
template <int S>
inline Operand operand(const bf16* p, Mask) {
  return operand<S>(p);
}
// Rows of activations, `stride` elements apart.
struct ActRows {
  const Act* at;
  int64_t stride;

  ActRows(const Act* a, int64_t row_stride) : at(a), stride(row_stride) {}
  const Act* row(int64_t r) const { return at + r * stride; }
};
// sums += `low` and `high` times the pair at row R.
template <int R, int S>
inline void multiply_row(Float& low_sum, Float& high_sum, Operand low, Operand high,
                         const ActRows& rows) {
  const Operand x = broadcast<S>(rows.row(R));
  low_sum = _mm512_dpbf16_ps(low_sum, low, x);
  high_sum = _mm512_dpbf16_ps(high_sum, high, x);
}
// A query is stored so that step S of a kPair slice is one load: element d at `query_index(d)`.
template <int S>
inline Operand query(const Act* slice) {
  return operand<S>(slice);
}
inline constexpr int query_index(int d) { return d; }
inline Float multiply_add(Float acc, Operand a, Operand b) {
  return _mm512_dpbf16_ps(acc, a, b);
}

// Step S of two tokens' values, kPair elements each, whose products with `broadcast` of their two
// weights sum to kPair outputs: `low` and `high` hold them in the order of `value_index`.
template <int S, bool Half = false>
inline void values(const bf16* first, const bf16* second, Operand& low, Operand& high) {
  const __m512i a = load_pairs<Half>(first), b = load_pairs<Half>(second);
  low = (Operand)_mm512_unpacklo_epi16(a, b);
  high = (Operand)_mm512_unpackhi_epi16(a, b);
}
inline constexpr int value_index(int vector, int lane) {
  return lane / 4 * 8 + vector * 4 + lane % 4;
}
}  // namespace tknp
