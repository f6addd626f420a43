// The part of AVX-512 with BF16 that csrc/simd_avx512.h uses, in plain C++. Found before the
// compiler's own header (-I), it lets that code run where there is only AVX2.
//
// Lane by lane what Intel's manual says (volume 2, "Operation" of each instruction). The functions
// are in namespace tknp, where the kernels find them before the compiler's, which need the
// instructions themselves: an intrinsic that is missing here doesn't compile.
#pragma once

#include_next <immintrin.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>

#ifndef __OPTIMIZE__
#error "without optimization GCC's intrinsics are macros, which no function can stand in for"
#endif

namespace tknp {
namespace emulated {
using Shorts = uint16_t __attribute__((vector_size(64)));
using Words = uint32_t __attribute__((vector_size(64)));
inline constexpr int kLanes = 16;

template <class To, class From>
inline To bits(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

// Denormals count as zero, as operands and as results.
inline float flush(float x) { return std::fabs(x) < FLT_MIN ? std::copysign(0.0f, x) : x; }

inline float from_bf16(uint16_t x) { return bits<float>(static_cast<uint32_t>(x) << 16); }

inline uint16_t to_bf16(float x) {
  const uint32_t word = bits<uint32_t>(flush(x));
  if (std::isnan(x)) return static_cast<uint16_t>((word >> 16) | 0x40);
  return static_cast<uint16_t>((word + 0x7fff + ((word >> 16) & 1)) >> 16);
}

inline float multiply_add(float sum, uint16_t a, uint16_t b) {
  return flush(std::fma(flush(from_bf16(a)), flush(from_bf16(b)), flush(sum)));
}

inline float scale(float x, float n) {
  if (std::isnan(n)) return n;
  if (std::isinf(n)) return x * (n > 0 ? INFINITY : 0.0f);
  return std::scalbn(x, static_cast<int>(std::clamp(std::floor(n), -1000.0f, 1000.0f)));
}

// Within each 128 bits, the low or the high halves of a and b, element by element in turn.
template <class Vector>
inline Vector unpack(Vector a, Vector b, bool high) {
  constexpr int kCount = 16 / sizeof(a[0]);
  Vector result;
  for (int i = 0; i < 64 / static_cast<int>(sizeof(a[0])); ++i) {
    const int from = i / kCount * kCount + i % kCount / 2 + high * kCount / 2;
    result[i] = i % 2 == 0 ? a[from] : b[from];
  }
  return result;
}
}  // namespace emulated

// Memory.
inline __m512 _mm512_loadu_ps(const void* p) {
  __m512 x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
inline __m512i _mm512_loadu_si512(const void* p) {
  __m512i x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
inline void _mm512_storeu_ps(void* p, __m512 x) { std::memcpy(p, &x, sizeof x); }

// The same bits.
inline __m512 _mm512_castsi512_ps(__m512i x) { return (__m512)x; }
inline __m512 _mm512_castpd_ps(__m512d x) { return (__m512)x; }
inline __m512d _mm512_castps_pd(__m512 x) { return (__m512d)x; }
inline __m512i _mm512_zextsi256_si512(__m256i x) {
  __m512i wide = {};
  std::memcpy(&wide, &x, sizeof x);
  return wide;
}

// Each lane by itself.
inline __m512 _mm512_set1_ps(float x) {
  __m512 all;
  for (int i = 0; i < emulated::kLanes; ++i) all[i] = x;
  return all;
}
inline __m512i _mm512_set1_epi32(int x) {
  emulated::Words all;
  for (int i = 0; i < emulated::kLanes; ++i) all[i] = static_cast<uint32_t>(x);
  return (__m512i)all;
}
inline __m512 _mm512_add_ps(__m512 a, __m512 b) { return a + b; }
inline __m512 _mm512_sub_ps(__m512 a, __m512 b) { return a - b; }
inline __m512 _mm512_mul_ps(__m512 a, __m512 b) { return a * b; }
inline __m512 _mm512_div_ps(__m512 a, __m512 b) { return a / b; }
inline __m512 _mm512_fmadd_ps(__m512 a, __m512 b, __m512 c) {
  for (int i = 0; i < emulated::kLanes; ++i) c[i] = std::fma(a[i], b[i], c[i]);
  return c;
}
// The second, if either is NaN or both are zeros.
inline __m512 _mm512_min_ps(__m512 a, __m512 b) { return a < b ? a : b; }
inline __m512 _mm512_max_ps(__m512 a, __m512 b) { return a > b ? a : b; }
// To integers only, the nearest or else the even one.
inline __m512 _mm512_roundscale_ps(__m512 a, int mode) {
  if (mode != 0) __builtin_trap();
  for (int i = 0; i < emulated::kLanes; ++i) a[i] = std::nearbyint(a[i]);
  return a;
}
inline __m512 _mm512_scalef_ps(__m512 a, __m512 n) {
  for (int i = 0; i < emulated::kLanes; ++i) a[i] = emulated::scale(a[i], n[i]);
  return a;
}
inline __m512i _mm512_slli_epi32(__m512i a, unsigned count) {
  return (__m512i)((emulated::Words)a << count);
}
inline __m512i _mm512_cvtepu16_epi32(__m256i a) {
  uint16_t from[emulated::kLanes];
  std::memcpy(from, &a, sizeof from);
  emulated::Words to;
  for (int i = 0; i < emulated::kLanes; ++i) to[i] = from[i];
  return (__m512i)to;
}
inline __m256bh _mm512_cvtneps_pbh(__m512 a) {
  uint16_t to[emulated::kLanes];
  for (int i = 0; i < emulated::kLanes; ++i) to[i] = emulated::to_bf16(a[i]);
  return emulated::bits<__m256bh>(to);
}
// Two multiply-adds a lane, each rounded: first of the odd, then of the even elements.
inline __m512 _mm512_dpbf16_ps(__m512 sum, __m512bh a, __m512bh b) {
  const auto x = (emulated::Shorts)a, y = (emulated::Shorts)b;
  for (int i = 0; i < emulated::kLanes; ++i) {
    const float odd = emulated::multiply_add(sum[i], x[2 * i + 1], y[2 * i + 1]);
    sum[i] = emulated::multiply_add(odd, x[2 * i], y[2 * i]);
  }
  return sum;
}

// Between lanes.
inline __m512 _mm512_unpacklo_ps(__m512 a, __m512 b) { return emulated::unpack(a, b, false); }
inline __m512 _mm512_unpackhi_ps(__m512 a, __m512 b) { return emulated::unpack(a, b, true); }
inline __m512d _mm512_unpacklo_pd(__m512d a, __m512d b) { return emulated::unpack(a, b, false); }
inline __m512d _mm512_unpackhi_pd(__m512d a, __m512d b) { return emulated::unpack(a, b, true); }
inline __m512i _mm512_unpacklo_epi16(__m512i a, __m512i b) {
  return (__m512i)emulated::unpack((emulated::Shorts)a, (emulated::Shorts)b, false);
}
inline __m512i _mm512_unpackhi_epi16(__m512i a, __m512i b) {
  return (__m512i)emulated::unpack((emulated::Shorts)a, (emulated::Shorts)b, true);
}
// Four lanes at a time: two of a, then two of b, chosen by two bits of `choice` each.
inline __m512 _mm512_shuffle_f32x4(__m512 a, __m512 b, int choice) {
  __m512 result;
  for (int i = 0; i < emulated::kLanes; ++i) {
    const int from = ((choice >> (i / 4 * 2)) & 3) * 4 + i % 4;
    result[i] = i < emulated::kLanes / 2 ? a[from] : b[from];
  }
  return result;
}
// Halves onto halves.
inline float _mm512_reduce_add_ps(__m512 a) {
  for (int half = emulated::kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) a[i] += a[i + half];
  return a[0];
}
inline float _mm512_reduce_max_ps(__m512 a) {
  for (int half = emulated::kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) a[i] = a[i + half] > a[i] ? a[i + half] : a[i];
  return a[0];
}
}  // namespace tknp
