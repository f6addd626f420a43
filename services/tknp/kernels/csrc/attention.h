// Decode attention: one query token a row, KV in pages, grouped heads; output and log-sum-exp.
//
//   rotate and append      each row                 -> queries; k, v in their page
//   attend                 each (item, KV head)     -> highest score, sum of weights, weighted sum
//   merge                  each (row, query head)   -> out, lse
//
// An item is up to kItemTokens tokens of one row, cut at multiples of kItemTokens of its own
// length. Items are what threads share, by their cost; their results are merged in token order. So
// a row's result depends on neither its batch, nor its pages, nor the threads.
#pragma once

#include <cmath>

#include "attention_block.h"
#include "rope.h"

namespace tknp {
// Mirrored by ctypes in library.py; `plan_items` fills the last four arrays.
struct Step {
  int64_t rows, table_width, items;
  const int32_t* block_tables;  // [rows, table_width]
  const int32_t* positions;     // [rows]
  const int32_t* lengths;       // [rows]
  const uint8_t* append;        // [rows]
  int32_t* item_row;            // [items]
  int32_t* item_first;          // [items] first token
  int64_t* item_blocks;         // [items + 1] blocks of all items before
  int64_t* row_items;           // [rows + 1] items of all rows before

  const int32_t* table(int64_t row) const { return block_tables + row * table_width; }
  int item_tokens(int64_t item) const {
    return std::min(lengths[item_row[item]] - item_first[item], kItemTokens);
  }
};

// Returns the highest page that the step touches, or -1 if one is negative.
inline int64_t plan_items(Step& step, int64_t page_size) {
  int64_t item = 0, blocks = 0, highest = 0;
  for (int64_t row = 0; row < step.rows; ++row) {
    step.row_items[row] = item;
    const int64_t length = step.lengths[row];
    for (int64_t first = 0; first < length; first += kItemTokens, ++item) {
      step.item_row[item] = static_cast<int32_t>(row);
      step.item_first[item] = static_cast<int32_t>(first);
      step.item_blocks[item] = blocks;
      blocks += ceil_div(std::min<int64_t>(length - first, kItemTokens), kBlock);
    }
    for (int64_t page = 0; page < ceil_div(length, page_size); ++page) {
      const int64_t id = step.table(row)[page];
      if (id < 0) return -1;
      highest = std::max(highest, id);
    }
  }
  step.item_blocks[item] = blocks;
  step.row_items[step.rows] = item;
  return highest;
}

// One layer of one step, and the memory that its stages hand on.
struct Decode {
  const Heads& heads;
  const Step& step;
  const bf16* qkv;
  bf16* k;
  bf16* v;
  bf16* out;
  float* lse;
  // Scratch: queries [rows, q_heads, stride]; for each (item, query head) highest score, sum of
  // weights and weighted sum [stride]; for each thread scores and weights [group, kItemTokens].
  Act* queries = nullptr;
  float* highest = nullptr;
  float* total = nullptr;
  float* sums = nullptr;
  float* scores = nullptr;
  Act* weights = nullptr;
};

// Scores, which are overwritten -> weights exp(score - highest), their sum; weights from n to a
// whole number of vectors are zero.
inline void softmax(float* scores, int n, Act* weights, float& highest, float& total) {
  const int whole = static_cast<int>(round_up(n, kLanes));
  std::fill(scores + n, scores + whole, -INFINITY);
  Float most = load(scores);
  for (int t = kLanes; t < whole; t += kLanes) most = maximum(most, load(scores + t));
  highest = largest(most);
  const Float shift = fill(highest);
  Float all = fill(0.0f);
  for (int t = 0; t < whole; t += kLanes) {
    Float weight = exponential(sub(load(scores + t), shift));
    if (t + kLanes > n) {
      store(scores + t, weight);
      std::fill(scores + n, scores + whole, 0.0f);
      weight = load(scores + t);
    }
    all = add(all, weight);
    store_act(weights + t, weight);
  }
  total = sum(all);
}

// Calls body(std::integral_constant<G>, first head) for tiles of nearly equal size.
template <int G, class Body>
inline void for_tile(int heads, int first, Body&& body) {
  if (heads == G)
    body(std::integral_constant<int, G>{}, first);
  else if constexpr (G > 1)
    for_tile<G - 1>(heads, first, body);
}
template <class Body>
inline void for_head_tiles(int group, Body&& body) {
  if (group <= kTileHeads) return for_tile<kTileHeads>(group, 0, body);  // saves the divisions
  const int tiles = static_cast<int>(ceil_div(group, kTileHeads));
  for (int i = 0; i < tiles; ++i)
    for_tile<kTileHeads>(group * (i + 1) / tiles - group * i / tiles, group * i / tiles, body);
}

template <int DH>
struct ItemKernel {
  static constexpr int kStride = HeadLayout<DH>::kStride;
  static constexpr int kMostBlocks = kItemTokens / kBlock;
  const Decode& d;

  // Offsets of up to `most` blocks of one (item, KV head).
  int blocks(int64_t item, int64_t head, int most, int64_t* out) const {
    const int count = static_cast<int>(ceil_div(d.step.item_tokens(item), kBlock));
    const int32_t* table = d.step.table(d.step.item_row[item]);
    for (int b = 0; b < std::min(count, most); ++b)
      out[b] = d.heads.offset(table, d.step.item_first[item] + b * kBlock, head);
    return std::min(count, most);
  }

  // Keys first, then values; `next` is the (item, head) that this thread works off afterwards.
  void operator()(int64_t item, int64_t head, int64_t next_item, int64_t next_head,
                  float* scores, Act* weights) const {
    const int group = static_cast<int>(d.heads.group());
    const int64_t row = d.step.item_row[item], first_head = head * group;
    int64_t at[kMostBlocks];
    const int count = blocks(item, head, kMostBlocks, at);
    const bf16* order[2 * kMostBlocks + kAhead];  // as they will be read
    for (int b = 0; b < count; ++b) {
      order[b] = d.k + at[b];
      order[count + b] = d.v + at[b];
    }
    std::fill_n(order + 2 * count, kAhead, nullptr);
    if (next_item < d.step.items) {
      int64_t following[kAhead];
      const int more = blocks(next_item, next_head, kAhead, following);
      for (int b = 0; b < more; ++b) order[2 * count + b] = d.k + following[b];
    }

    const int n = d.step.item_tokens(item);
    const Act* queries = d.queries + (row * d.heads.q_heads + first_head) * kStride;
    const int64_t result = item * d.heads.q_heads + first_head;
    float* sums = d.sums + result * kStride;
    for (int b = 0; b < count; ++b)
      for_head_tiles(group, [&](auto heads, int g) {
        score<DH, heads>(queries + g * kStride, order[b], std::min(n - b * kBlock, kBlock),
                         g == 0 ? order[b + kAhead] : nullptr, d.heads.scale,
                         scores + g * kItemTokens + b * kBlock);
      });
    for (int g = 0; g < group; ++g)
      softmax(scores + g * kItemTokens, n, weights + g * kItemTokens, d.highest[result + g],
              d.total[result + g]);
    std::fill_n(sums, group * kStride, 0.0f);
    for (int b = 0; b < count; ++b)
      for_head_tiles(group, [&](auto heads, int g) {
        weigh<DH, heads>(weights + g * kItemTokens + b * kBlock, order[count + b],
                         std::min(n - b * kBlock, kBlock),
                         g == 0 ? order[count + b + kAhead] : nullptr, sums + g * kStride);
      });
  }
};

inline void prepare_row(const Decode& d, int64_t row, int stride) {
  const Heads& heads = d.heads;
  const bf16* qkv = d.qkv + row * heads.width();
  const int64_t position = d.step.positions[row];
  if (d.step.append[row])
    append(heads, qkv, position, d.step.table(row), d.step.lengths[row] - 1, d.k, d.v);
  for (int64_t h = 0; h < heads.q_heads; ++h) {
    bf16 rotated[kMaxHeadDim];
    rotate(heads, qkv + h * heads.head_dim, position, rotated);
    Act* query = d.queries + (row * heads.q_heads + h) * stride;
    std::fill_n(query, stride, Act{0});
    for (int i = 0; i < heads.head_dim; ++i)
      query[query_index(i)] = to_act(widen(rotated[i]));
  }
}

inline void merge_row(const Decode& d, int64_t row, int64_t head, int stride) {
  const int64_t first = d.step.row_items[row], last = d.step.row_items[row + 1];
  const auto at = [&](int64_t item) { return item * d.heads.q_heads + head; };
  float highest = -INFINITY, total = 0.0f;
  for (int64_t i = first; i < last; ++i) highest = std::max(highest, d.highest[at(i)]);
  float merged[kMaxHeadDim] = {};
  for (int64_t i = first; i < last; ++i) {
    const float weight = std::exp(d.highest[at(i)] - highest);
    total += weight * d.total[at(i)];
    const float* sums = d.sums + at(i) * stride;
    for (int64_t e = 0; e < stride; ++e) merged[e] += weight * sums[e];
  }
  const float scale = first < last ? 1.0f / total : 0.0f;
  const int64_t result = row * d.heads.q_heads + head;
  bf16* out = d.out + result * d.heads.head_dim;
  for (int e = 0; e < stride; ++e) {
    const int i = e / kPair * kPair + value_index(e % kPair / kLanes, e % kLanes);
    if (i < d.heads.head_dim) out[i] = narrow(merged[e] * scale);
  }
  d.lse[result] = first < last ? highest + std::log(total) : -INFINITY;
}

// The first unit (item * kv_heads + head) of a thread whose share begins at `cost` of all blocks.
inline int64_t unit_at(const Step& step, int64_t kv_heads, int64_t cost) {
  const int64_t* begin = step.item_blocks;
  const int64_t* end = begin + step.items;
  if (cost >= *end * kv_heads) return step.items * kv_heads;
  const int64_t item = std::upper_bound(begin, end, cost / kv_heads) - begin - 1;
  return item * kv_heads + (cost - begin[item] * kv_heads) / (begin[item + 1] - begin[item]);
}

// Give `d` its scratch memory: `plan` is added to, `place` called once that is reserved.
struct DecodeAt {
  size_t queries, highest, total, sums, scores, weights;

  DecodeAt(Scratch::Plan& plan, const Heads& heads, const Step& step, int threads) {
    const int64_t parts = step.items * heads.q_heads;
    const int64_t stride = round_up(heads.head_dim, kPair);
    const int64_t together = threads * heads.group() * kItemTokens;
    queries = plan.add<Act>(step.rows * heads.q_heads * stride);
    highest = plan.add<float>(parts);
    total = plan.add<float>(parts);
    sums = plan.add<float>(parts * stride);
    scores = plan.add<float>(together);
    weights = plan.add<Act>(together);
  }

  void place(Decode& d, char* memory) const {
    d.queries = reinterpret_cast<Act*>(memory + queries);
    d.highest = reinterpret_cast<float*>(memory + highest);
    d.total = reinterpret_cast<float*>(memory + total);
    d.sums = reinterpret_cast<float*>(memory + sums);
    d.scores = reinterpret_cast<float*>(memory + scores);
    d.weights = reinterpret_cast<Act*>(memory + weights);
  }
};

// `attend` for one thread of a team; ends without a barrier.
template <int DH>
inline void attend_rows(Team team, const Decode& d) {
  constexpr int kStride = HeadLayout<DH>::kStride;
  const int64_t q_heads = d.heads.q_heads, kv_heads = d.heads.kv_heads, rows = d.step.rows;
  const int64_t scratch_at = team.rank * d.heads.group() * kItemTokens;
  const Range mine = team.share(rows);
  for (int64_t row = mine.begin; row < mine.end; ++row) prepare_row(d, row, kStride);
  team.barrier();
  const ItemKernel<DH> kernel{d};
  const Range cost = team.share(d.step.item_blocks[d.step.items] * kv_heads);
  const int64_t stop = unit_at(d.step, kv_heads, cost.end);
  for (int64_t u = unit_at(d.step, kv_heads, cost.begin); u < stop; ++u)
    kernel(u / kv_heads, u % kv_heads, (u + 1) / kv_heads, (u + 1) % kv_heads,
           d.scores + scratch_at, d.weights + scratch_at);
  team.barrier();
  const Range merges = team.share(rows * q_heads);
  for (int64_t i = merges.begin; i < merges.end; ++i)
    merge_row(d, i / q_heads, i % q_heads, kStride);
}

template <int DH>
inline void attend(Decode d, int threads) {
  Scratch::Plan plan;
  const DecodeAt at(plan, d.heads, d.step, threads);
  at.place(d, scratch().reserve(plan));
  parallel(threads, [&](Team team) { attend_rows<DH>(team, d); });
}
}  // namespace tknp
