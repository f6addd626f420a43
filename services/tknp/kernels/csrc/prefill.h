// Causal attention of one chunk of one request over its pages, as matrix products.
//
//   append the chunk's keys and values
//   for each span of kSpan tokens of context:
//     pack the span's keys and values into panels (gemm.h), shared by all threads
//     for each item (query tile, KV head), its group's heads folded into rows:
//       for each tile of kTileKeys keys, for each kTileRows rows:
//         S = Q K^T;  online softmax;  sums += P V
//
// Tiles lie at fixed positions of the context, so a query's result depends on neither how the
// prompt was cut into chunks nor the threads. Scratch grows with the chunk, not with the context.
#pragma once

#include <atomic>
#include <cmath>

#include "product.h"
#include "rope.h"

namespace tknp {
inline constexpr int kTileKeys = 64;
inline constexpr int kSpan = 1024;

struct Chunk {
  const Heads& heads;
  const bf16* qkv;  // [count, heads.width()]
  int64_t start, count;
  const int32_t* table;
  bf16* k;
  bf16* v;
  bf16* out;  // [count, q_heads * head_dim]

  int64_t total() const { return start + count; }
  int64_t queries_per_tile() const {
    return std::max<int64_t>(8 * kTileRows / heads.group(), 1);
  }
  int64_t rows_per_item() const { return queries_per_tile() * heads.group(); }
  int64_t value_stride() const { return round_up(heads.head_dim, kPanel); }
  int64_t packed_keys() const { return packed_elements(kTileKeys, heads.head_dim); }
  int64_t packed_values() const { return packed_elements(value_stride(), kTileKeys); }
};

// Keys (one column of S a token) and values (one pair of k two tokens) of one tile and head.
inline void pack_tile(const Chunk& c, int64_t first, int64_t head, bf16* keys, bf16* values) {
  static constexpr bf16 kNothing[kMaxHeadDim] = {};
  const int64_t dh = c.heads.head_dim, stride = c.value_stride();
  const auto row = [&](const bf16* pages, int64_t t) {
    return first + t < c.total() ? pages + c.heads.offset(c.table, first + t, head) : kNothing;
  };
  for (int64_t t = 0; t < kTileKeys; ++t) {
    const bf16* key = row(c.k, t);
    bf16* to = keys + t / kPanel * dh * kPanel + packed_index(0, t % kPanel);
    for (int64_t d = 0; d < dh; d += 2) std::memcpy(to + d * kPanel, key + d, 2 * sizeof(bf16));
  }
  for (int64_t t = 0; t < kTileKeys; t += 2) {
    const bf16 *even = row(c.v, t), *odd = row(c.v, t + 1);
    for (int64_t panel = 0; panel < stride; panel += kPanel) {
      bf16* to = values + panel * kTileKeys + packed_index(t, 0);
      const int64_t width = std::min<int64_t>(dh - panel, kPanel);
      for (int64_t d = 0; d < width; ++d) {
        to[2 * d] = even[panel + d];
        to[2 * d + 1] = odd[panel + d];
      }
      std::fill(to + 2 * width, to + 2 * kPanel, bf16{0});
    }
  }
}

// What an item carries from span to span, and a thread's workspace.
struct ItemState {
  float* sums;     // [rows_per_item, value_stride]
  float* highest;  // [rows_per_item]
  float* total;    // [rows_per_item]
};
struct Workspace {
  Act* queries;   // [rows_per_item, act_stride(head_dim)]
  float* scores;  // [kTileRows, kTileKeys]
  Act* weights;   // [kTileRows, act_stride(kTileKeys)]
};

// `count` rows of scores, of which each sees its first `seen(i)` keys -> weights, zero beyond; sums,
// `stride` apart, are rescaled to the new highest score, which is kept as a power of two. All rows
// pass a step before the next one, which would otherwise wait for what the row's last one computes.
template <class Seen>
inline void softmax(int64_t count, Seen&& seen, float scale, const Workspace& work,
                    int64_t weights_stride, const ItemState& state, int64_t stride) {
  const float powers = scale * kLog2E;
  float tops[kTileRows];
  for (int64_t i = 0; i < count; ++i) {
    float* scores = work.scores + i * kTileKeys;
    std::fill(scores + seen(i), scores + kTileKeys, -INFINITY);
    Float most = load(scores);
#pragma GCC unroll 8
    for (int t = kLanes; t < kTileKeys; t += kLanes) most = maximum(most, load(scores + t));
    tops[i] = largest(most) * powers;
  }
  for (int64_t i = 0; i < count; ++i) {
    if (!(tops[i] > state.highest[i])) continue;
    const float factor = std::exp2(state.highest[i] - tops[i]);  // 0 for the first tile
    state.total[i] *= factor;
    state.highest[i] = tops[i];
    for (float *at = state.sums + i * stride, *stop = at + stride; at != stop; at += kLanes)
      store(at, mul(load(at), fill(factor)));
  }
  for (int64_t i = 0; i < count; ++i) {
    const float* scores = work.scores + i * kTileKeys;
    Act* weights = work.weights + i * weights_stride;
    const Float less = fill(-state.highest[i]);
    Float all = fill(0.0f);
#pragma GCC unroll 2
    for (int t = 0; t < kTileKeys; t += kLanes) {
      const Float power = fma(load(scores + t), fill(powers), less);
      const Float weight = power_of_two(maximum(fill(-126.0f), power));
      all = add(all, weight);
      store_act(weights + t, weight);
    }
    state.total[i] += sum(all);
    std::fill(weights + seen(i), weights + kTileKeys, Act{0});
  }
}

// Rows of an item, few enough for one tile of a product, over one tile of context, which stays in the
// first cache for all of them. The item's first query comes `behind` the tile's first key.
inline void attend_tile(const Chunk& c, Range rows, int64_t behind, const bf16* keys,
                        const bf16* values, const ItemState& state, const Workspace& work) {
  const int64_t stride = c.value_stride(), q_stride = act_stride(c.heads.head_dim);
  const int64_t p_stride = act_stride(kTileKeys), count = rows.end - rows.begin;
  const auto seen = [&](int64_t i) {
    const int64_t visible = behind + (rows.begin + i) / c.heads.group() + 1;
    return std::clamp<int64_t>(visible, 0, kTileKeys);
  };
  const int64_t most = seen(count - 1);
  if (most == 0) return;
  const ItemState own{state.sums + rows.begin * stride, state.highest + rows.begin,
                      state.total + rows.begin};
  add_product<true>(work.queries + rows.begin * q_stride, q_stride, count, keys,
                    c.heads.head_dim / 2, c.heads.head_dim / 2, ceil_div(most, kPanel), work.scores,
                    kTileKeys);
  softmax(count, seen, c.heads.scale, work, p_stride, own, stride);
  add_product<false>(work.weights, p_stride, count, values, ceil_div(most, 2), kTileKeys / 2,
                     stride / kPanel, own.sums, stride);
}

// Queries [first, first + count) of the chunk, all heads of one group, over one span of context.
inline void attend_span(const Chunk& c, int64_t first, int64_t count, int64_t head, int64_t span,
                        const bf16* keys, const bf16* values, const ItemState& state,
                        const Workspace& work) {
  const int64_t group = c.heads.group(), dh = c.heads.head_dim, rows = count * group;
  const int64_t stride = c.value_stride(), q_stride = act_stride(dh);
  const int64_t last = c.start + first + count - 1;
  if (span == 0) {
    std::fill_n(state.sums, rows * stride, 0.0f);
    std::fill_n(state.highest, rows, -INFINITY);
    std::fill_n(state.total, rows, 0.0f);
  }
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t query = first + r / group, q_head = head * group + r % group;
    bf16 rotated[kMaxHeadDim];
    rotate(c.heads, c.qkv + query * c.heads.width() + q_head * dh, c.start + query, rotated);
    for (int64_t d = 0; d < dh; d += kLanes)
      store_act(work.queries + r * q_stride + d, load_bf16(rotated + d));
  }
  const int64_t row_tiles = ceil_div(rows, kTileRows);
  for (int64_t tile = 0; tile < kSpan / kTileKeys; ++tile) {
    const int64_t at = span + tile * kTileKeys;
    if (at > last) break;
    for (int64_t t = 0; t < row_tiles; ++t)
      attend_tile(c, {rows * t / row_tiles, rows * (t + 1) / row_tiles}, c.start + first - at,
                  keys + tile * c.packed_keys(), values + tile * c.packed_values(), state, work);
  }
  if (last >= span + kSpan) return;
  for (int64_t r = 0; r < rows; ++r) {
    bf16* out = c.out + ((first + r / group) * c.heads.q_heads + head * group + r % group) * dh;
    const Float scale = fill(1.0f / state.total[r]);
    for (int64_t d = 0; d < dh; d += kLanes)
      store_bf16(out + d, mul(load(state.sums + r * stride + d), scale));
  }
}

inline void prefill(const Chunk& c, int threads) {
  const int64_t kv_heads = c.heads.kv_heads, rows = c.rows_per_item();
  const int64_t tiles = ceil_div(c.count, c.queries_per_tile()), items = tiles * kv_heads;
  const int64_t span_tiles = std::min<int64_t>(kSpan / kTileKeys, ceil_div(c.total(), kTileKeys));
  const int64_t q_elements = rows * act_stride(c.heads.head_dim);
  const int64_t p_elements = kTileRows * act_stride(kTileKeys);
  Scratch::Plan plan;
  const size_t keys_at = plan.add<bf16>(kv_heads * span_tiles * c.packed_keys());
  const size_t values_at = plan.add<bf16>(kv_heads * span_tiles * c.packed_values());
  const size_t sums_at = plan.add<float>(items * rows * c.value_stride());
  const size_t highest_at = plan.add<float>(items * rows);
  const size_t total_at = plan.add<float>(items * rows);
  const size_t queries_at = plan.add<Act>(threads * q_elements);
  const size_t scores_at = plan.add<float>(threads * kTileRows * kTileKeys);
  const size_t weights_at = plan.add<Act>(threads * p_elements);
  char* memory = scratch().reserve(plan);
  bf16* keys = reinterpret_cast<bf16*>(memory + keys_at);
  bf16* values = reinterpret_cast<bf16*>(memory + values_at);
  std::atomic<int64_t> next{0};

  parallel(threads, [&](Team team) {
    const Range mine = team.share(c.count);
    for (int64_t i = mine.begin; i < mine.end; ++i)
      append(c.heads, c.qkv + i * c.heads.width(), c.start + i, c.table, c.start + i, c.k, c.v);
    const Workspace work{
        reinterpret_cast<Act*>(memory + queries_at) + team.rank * q_elements,
        reinterpret_cast<float*>(memory + scores_at) + team.rank * kTileRows * kTileKeys,
        reinterpret_cast<Act*>(memory + weights_at) + team.rank * p_elements};
    for (int64_t span = 0; span < c.total(); span += kSpan) {
      team.barrier();
      if (team.rank == 0) next.store(0, std::memory_order_relaxed);
      const int64_t filled = std::min(span_tiles, ceil_div(c.total() - span, kTileKeys));
      const Range packs = team.share(kv_heads * filled);
      for (int64_t i = packs.begin; i < packs.end; ++i) {
        const int64_t head = i / filled, tile = i % filled, to = head * span_tiles + tile;
        pack_tile(c, span + tile * kTileKeys, head, keys + to * c.packed_keys(),
                  values + to * c.packed_values());
      }
      team.barrier();
      for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < items;) {
        const int64_t tile = tiles - 1 - i / kv_heads, head = i % kv_heads;  // the longest first
        const int64_t first = tile * c.queries_per_tile();
        const int64_t count = std::min(c.queries_per_tile(), c.count - first);
        if (c.start + first + count - 1 < span) continue;
        const int64_t item = tile * kv_heads + head;
        const ItemState state{
            reinterpret_cast<float*>(memory + sums_at) + item * rows * c.value_stride(),
            reinterpret_cast<float*>(memory + highest_at) + item * rows,
            reinterpret_cast<float*>(memory + total_at) + item * rows};
        attend_span(c, first, count, head, span, keys + head * span_tiles * c.packed_keys(),
                    values + head * span_tiles * c.packed_values(), state, work);
      }
    }
  });
}
}  // namespace tknp
