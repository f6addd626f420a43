// The vocabulary every kernel is written in; one backend implements it for an instruction set.
//
//   bf16      16 bits in memory
//   Float     kLanes floats
//   Act       element of an activation held for a matrix product: bf16 or float
//   Operand   what one multiply-add takes from kLanes adjacent *pairs* of bf16. A pair (2i, 2i + 1)
//             is worked off in kSteps steps: both halves at once where the machine multiplies
//             bf16 pairs, else first the even and then the odd element.
//
// Every reduction over k is therefore the same sequence of operations for every row, whatever the
// number of rows: results do not depend on the batch.
#pragma once

#include <cstdint>
#include <cstring>

namespace tknp {
using bf16 = uint16_t;

inline float widen(bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float f;
  std::memcpy(&f, &bits, sizeof f);
  return f;
}

// Round to nearest even; a NaN stays a NaN.
inline bf16 narrow(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, sizeof bits);
  if (f != f) return static_cast<bf16>((bits >> 16) | 0x40);
  return static_cast<bf16>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }
}  // namespace tknp

#if defined(TKNP_AVX512_BF16)
#include "simd_avx512.h"
#elif defined(TKNP_AVX2)
#include "simd_avx2.h"
#else
#error "define TKNP_AVX512_BF16 or TKNP_AVX2"
#endif

namespace tknp {
// 2^x to about 2e-7 relative, x within [-126, 126]; NaN stays NaN.
inline Float power_of_two(Float x) {
  const Float whole = round_to_int(x);
  const Float f = sub(x, whole);
  Float p = fill(1.54035304e-4f);  // 2^f = sum (f ln 2)^k / k!, |f| <= 1/2
  p = fma(p, f, fill(1.33335581e-3f));
  p = fma(p, f, fill(9.61812911e-3f));
  p = fma(p, f, fill(5.55041087e-2f));
  p = fma(p, f, fill(2.40226507e-1f));
  p = fma(p, f, fill(6.93147181e-1f));
  p = fma(p, f, fill(1.0f));
  return scale_by_power_of_two(p, whole);
}

inline constexpr float kLog2E = 1.44269504f;

// exp(x), x clamped to +-87; NaN stays NaN.
inline Float exponential(Float x) {
  const Float clamped = minimum(fill(87.0f), maximum(fill(-87.0f), x));
  return power_of_two(mul(clamped, fill(kLog2E)));
}

inline void prefetch(const void* p, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64)
    __builtin_prefetch(static_cast<const char*>(p) + at, 0, 3);
}
}  // namespace tknp
