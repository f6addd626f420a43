// Rotary embedding (half-split: element i pairs with i + dh / 2) and the store of new keys and
// values in their page.
#pragma once

#include <algorithm>

#include "threads.h"

namespace tknp {
// Mirrored by ctypes in library.py. Pages are [pages, kv_heads, page_size, head_dim].
struct Heads {
  int64_t q_heads, kv_heads, head_dim, page_size;
  const float* cos;  // [max_position, head_dim / 2]
  const float* sin;
  float scale;

  int64_t group() const { return q_heads / kv_heads; }
  int64_t width() const { return (q_heads + 2 * kv_heads) * head_dim; }
  int64_t page_elements() const { return kv_heads * page_size * head_dim; }

  // Where `token` of a request lies for one head, from the start of the layer's pages.
  int64_t offset(const int32_t* table, int64_t token, int64_t head) const {
    const int64_t page = table[token / page_size], slot = token % page_size;
    return page * page_elements() + (head * page_size + slot) * head_dim;
  }
};

inline constexpr int kMaxHeadDim = 256;

// Computed in float and rounded to bf16, as pages hold keys.
inline void rotate(const Heads& heads, const bf16* x, int64_t position, bf16* out) {
  const int64_t half = heads.head_dim / 2;
  const float* cos = heads.cos + position * half;
  const float* sin = heads.sin + position * half;
  int64_t i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const Float a = load_bf16(x + i), b = load_bf16(x + i + half);
    const Float c = load(cos + i), s = load(sin + i);
    store_bf16(out + i, sub(mul(a, c), mul(b, s)));
    store_bf16(out + i + half, add(mul(b, c), mul(a, s)));
  }
  for (; i < half; ++i) {
    const float a = widen(x[i]), b = widen(x[i + half]);
    out[i] = narrow(a * cos[i] - b * sin[i]);
    out[i + half] = narrow(b * cos[i] + a * sin[i]);
  }
}

// Store the rotated keys and the values of one row [q | k | v] at `token` of its request.
inline void append(const Heads& heads, const bf16* row, int64_t position, const int32_t* table,
                   int64_t token, bf16* k_pages, bf16* v_pages) {
  const bf16* keys = row + heads.q_heads * heads.head_dim;
  const bf16* values = keys + heads.kv_heads * heads.head_dim;
  for (int64_t h = 0; h < heads.kv_heads; ++h) {
    const int64_t at = heads.offset(table, token, h);
    rotate(heads, keys + h * heads.head_dim, position, k_pages + at);
    std::copy_n(values + h * heads.head_dim, heads.head_dim, v_pages + at);
  }
}
}  // namespace tknp
