// simd.h for AVX2 and FMA: bf16 is widened to float, activations are kept in float.
#pragma once

#include <immintrin.h>

namespace tknp {
using Float = __m256;
using Operand = __m256;
using Act = float;
inline constexpr int kLanes = 8;
inline constexpr int kPair = 2 * kLanes;  // bf16 elements behind one Operand
inline constexpr int kSteps = 2;
inline constexpr int kRegisters = 16;
inline constexpr int kTileRows = 6;  // 6 rows x 2 vectors of accumulators, 16 registers in all

inline Float fill(float x) { return _mm256_set1_ps(x); }
inline Float load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Float x) { _mm256_storeu_ps(p, x); }
inline Float add(Float a, Float b) { return _mm256_add_ps(a, b); }
inline Float sub(Float a, Float b) { return _mm256_sub_ps(a, b); }
inline Float mul(Float a, Float b) { return _mm256_mul_ps(a, b); }
inline Float div(Float a, Float b) { return _mm256_div_ps(a, b); }
inline Float fma(Float a, Float b, Float c) { return _mm256_fmadd_ps(a, b, c); }
// Of minimum and maximum the second operand wins where either is NaN.
inline Float minimum(Float a, Float b) { return _mm256_min_ps(a, b); }
inline Float maximum(Float a, Float b) { return _mm256_max_ps(a, b); }
inline Float round_to_int(Float a) {
  return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
// p * 2^n for integral n in [-126, 126].
inline Float scale_by_power_of_two(Float p, Float n) {
  const __m256i shifted = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), shifted));
}

inline Float load_bf16(const bf16* p) {
  const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
}
inline void store_bf16(bf16* p, Float x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  rounded = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
  const __m128i low = _mm256_castsi256_si128(rounded);
  const __m128i high = _mm256_extracti128_si256(rounded, 1);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm_packus_epi32(low, high));
}
inline void store_act(Act* p, Float x) { store(p, x); }
inline Act to_act(float x) { return x; }

inline float sum(Float x) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
inline float largest(Float x) {
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}
// kLanes vectors -> the vector of their sums. Each round adds the halves of two vectors into one;
// blends are cheaper than shuffles and horizontal additions.
inline Float sum_each(const Float* x) {
  const auto halves = [](Float a, Float b) {  // a in the low 4 lanes, b in the high 4
    return add(_mm256_blend_ps(a, b, 0xf0), _mm256_permute2f128_ps(a, b, 0x21));
  };
  const auto quarters = [](Float a, Float b) {  // a a b b in each 4 lanes
    return add(_mm256_blend_ps(a, b, 0xcc), _mm256_shuffle_ps(a, b, 0x4e));
  };
  const Float a = quarters(halves(x[0], x[4]), halves(x[2], x[6]));
  const Float b = quarters(halves(x[1], x[5]), halves(x[3], x[7]));
  const Float swapped = _mm256_permute_ps(_mm256_blend_ps(b, a, 0xaa), 0xb1);
  return add(_mm256_blend_ps(a, b, 0xaa), swapped);
}

// Rows of activations, `stride` elements apart, as `multiply_row` addresses them.
struct ActRows {
  const Act* at;
  int64_t one, three, five;  // bytes

  ActRows(const Act* a, int64_t stride)
      : at(a), one(4 * stride), three(12 * stride), five(20 * stride) {}
  const Act* row(int64_t r) const { return at + r * (one / 4); }
};

// sums += `low` and `high` times element S of the pair at row R.
//
// In assembler for three reasons. The sums stay where they are: GCC otherwise lets a sum replace an
// operand and, with all 16 registers in use, spills. The broadcast comes no sooner than its row, as
// no register is free for it. And addresses take no instruction of their own: a core shared with
// another hardware thread can multiply twice as much as it can decode.
template <int R, int S>
[[gnu::always_inline]] inline void multiply_row(Float& low_sum, Float& high_sum, Operand low,
                                                Operand high, const ActRows& rows) {
  static_assert(R < kTileRows);
  Float a = low_sum, b = high_sum;
#define TKNP_ROW(address)                                                              \
  asm("vbroadcastss %c[at]" address ", %%ymm15\n\t"                                    \
      "vfmadd231ps %%ymm15, %[low], %[a]\n\t"                                          \
      "vfmadd231ps %%ymm15, %[high], %[b]"                                             \
      : [a] "+&x"(a), [b] "+x"(b)                                                      \
      : [low] "x"(low), [high] "x"(high), [row] "r"(rows.at), [at] "i"(4 * S),         \
        [one] "r"(rows.one), [three] "r"(rows.three), [five] "r"(rows.five),           \
        "m"(*reinterpret_cast<const float(*)[]>(rows.at))                              \
      : "xmm15")
  if constexpr (R == 0) TKNP_ROW("(%[row])");
  if constexpr (R == 1) TKNP_ROW("(%[row],%[one])");
  if constexpr (R == 2) TKNP_ROW("(%[row],%[one],2)");
  if constexpr (R == 3) TKNP_ROW("(%[row],%[three])");
  if constexpr (R == 4) TKNP_ROW("(%[row],%[one],4)");
  if constexpr (R == 5) TKNP_ROW("(%[row],%[five])");
#undef TKNP_ROW
  low_sum = a;
  high_sum = b;
}

inline Float even(__m256i pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }
// Two shifts rather than a mask, which would take a register that attention needs.
inline Float odd(__m256i pairs) { return even(_mm256_srli_epi32(pairs, 16)); }

// Step S of kLanes pairs in memory. Half: only the first kLanes elements exist, the rest are zero
// (never needed here: heads are whole multiples of 16).
template <int S, bool Half = false>
inline Operand operand(const bf16* p) {
  static_assert(!Half);
  const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return S == 0 ? even(pairs) : odd(pairs);
}
// The same with a mask that stays in a register: odd elements take one instruction.
using Mask = __m256i;
inline Mask odd_mask() {
  Mask mask = _mm256_set1_epi32(static_cast<int>(0xffff0000));
  asm("" : "+x"(mask));  // or GCC loads it again for each use
  return mask;
}
template <int S>
inline Operand operand(const bf16* p, Mask mask) {
  if constexpr (S == 0) return operand<0>(p);
  Operand odd;
  asm("vpand %2, %1, %0" : "=x"(odd) : "x"(mask), "m"(*reinterpret_cast<const __m256i_u*>(p)));
  return odd;
}
// Step S of one pair of activations, in every lane.
template <int S>
inline Operand broadcast(const Act* pair) {
  return _mm256_broadcast_ss(pair + S);
}
// A query is stored so that step S of a kPair slice is one load: element d at `query_index(d)`.
template <int S>
inline Operand query(const Act* slice) {
  return load(slice + S * kLanes);
}
inline constexpr int query_index(int d) { return d / kPair * kPair + d % 2 * kLanes + d % kPair / 2; }
// As the intrinsic would, but always in place: GCC otherwise lets the sum replace an operand and,
// with all 16 registers in use, spills accumulators in the innermost loop (a third slower).
inline Float multiply_add(Float acc, Operand a, Operand b) {
  asm("vfmadd231ps %2, %1, %0" : "+x"(acc) : "x"(a), "xm"(b));
  return acc;
}

// Step S of two tokens' values, kPair elements each, whose products with `broadcast` of their two
// weights sum to kPair outputs: `low` and `high` hold them in the order of `value_index`.
template <int S, bool Half = false>
inline void values(const bf16* first, const bf16* second, Operand& low, Operand& high) {
  static_assert(!Half);
  const bf16* p = S == 0 ? first : second;
  const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  low = even(pairs);
  high = odd(pairs);
}
inline constexpr int value_index(int vector, int lane) { return 2 * lane + vector; }
}  // namespace tknp
