// The vocabulary of csrc/simd_avx512.h as functions of arrays, for test_simd.py.
#include "simd.h"

using namespace tknp;

extern "C" {
void tknp_narrow(const float* x, bf16* out) { store_bf16(out, load(x)); }
void tknp_widen(const bf16* x, float* out) { store(out, load_bf16(x)); }
void tknp_exponential(const float* x, float* out) { store(out, exponential(load(x))); }
void tknp_sum_each(const float* x, float* out) {
  Float rows[kLanes];
  for (int i = 0; i < kLanes; ++i) rows[i] = load(x + i * kLanes);
  store(out, sum_each(rows));
}
float tknp_sum(const float* x) { return sum(load(x)); }
float tknp_largest(const float* x) { return largest(load(x)); }

// sums [kLanes] += pairs of `a` [kPair] times one pair.
void tknp_multiply_add(float* sums, const bf16* a, const Act* pair) {
  store(sums, multiply_add(load(sums), operand<0>(a), broadcast<0>(pair)));
}

// Product of a slice of a key, or of half of one, with a query in the order of its elements.
float tknp_score(const bf16* key, const Act* elements, int half) {
  Act slice[kPair] = {};
  for (int i = 0; i < kPair; ++i) slice[query_index(i)] = elements[i];
  const Operand keys = half ? operand<0, true>(key) : operand<0>(key);
  return sum(multiply_add(fill(0.0f), keys, query<0>(slice)));
}

// out [kPair], in the order of elements: the values of two tokens times a pair of weights.
void tknp_weigh(const bf16* first, const bf16* second, const Act* weights, int half, float* out) {
  Operand low, high;
  if (half)
    values<0, true>(first, second, low, high);
  else
    values<0>(first, second, low, high);
  float lanes[2][kLanes];
  store(lanes[0], multiply_add(fill(0.0f), low, broadcast<0>(weights)));
  store(lanes[1], multiply_add(fill(0.0f), high, broadcast<0>(weights)));
  for (int v = 0; v < 2; ++v)
    for (int i = 0; i < kLanes; ++i) out[value_index(v, i)] = lanes[v][i];
}
}
