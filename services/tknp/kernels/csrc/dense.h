// The dense operations of one decoder layer and of the two ends of the network.
//
//   project   x -> RMSNorm -> qkv
//   finish    x += attention Wo;  x += (silu(gate) * up) Wd   with gate, up from RMSNorm(x)
//   output    attention Wo        mlp   (silu(gate) * up) Wd  as partial sums for tensor parallelism
//   head      x -> RMSNorm -> logits        embed   ids -> x
//
// x is the float residual stream [rows, hidden]. Stages of one operation are separated by barriers.
#pragma once

#include <cmath>

#include "gemm.h"

namespace tknp {
// Mirrored by ctypes in library.py. Norms are float, matrices packed (gemm.h).
struct Layer {
  const float* input_norm;
  const bf16* qkv;
  const bf16* output;
  const float* mlp_norm;
  const bf16* gate_up;
  const bf16* down;
};

struct Shape {
  int64_t hidden, qkv_width, q_width, mlp_columns, vocabulary;
  float norm_eps;
};

inline Float load_tail(const float* p, int64_t n) {
  float padded[kLanes] = {};
  std::copy(p, p + n, padded);
  return load(padded);
}

// Four running sums hide the latency of the additions; the order is the same for every row.
inline float sum_of_squares(const float* x, int64_t n) {
  Float total[4] = {fill(0.0f), fill(0.0f), fill(0.0f), fill(0.0f)};
  int64_t at = 0;
  for (; at + 4 * kLanes <= n; at += 4 * kLanes)
    for (int i = 0; i < 4; ++i) {
      const Float v = load(x + at + i * kLanes);
      total[i] = fma(v, v, total[i]);
    }
  for (; at < n; at += kLanes) {
    const Float v = n - at >= kLanes ? load(x + at) : load_tail(x + at, n - at);
    total[0] = fma(v, v, total[0]);
  }
  return sum(add(add(total[0], total[1]), add(total[2], total[3])));
}

// RMSNorm of one row; `out` is zero from n up to the next multiple of kLanes.
inline void rms_norm(const float* x, const float* weight, float eps, int64_t n, Act* out) {
  const float mean_square = sum_of_squares(x, n) / static_cast<float>(n);
  const Float scale = fill(1.0f / std::sqrt(mean_square + eps));
  int64_t at = 0;
  for (; at + kLanes <= n; at += kLanes)
    store_act(out + at, mul(mul(load(x + at), scale), load(weight + at)));
  if (at < n)
    store_act(out + at, mul(mul(load_tail(x + at, n - at), scale), load_tail(weight + at, n - at)));
}

inline void norm_rows(Team team, const float* x, const float* weight, float eps, int64_t rows,
                      int64_t n, Act* out) {
  const Range mine = team.share(rows);
  for (int64_t r = mine.begin; r < mine.end; ++r)
    rms_norm(x + r * n, weight, eps, n, out + r * act_stride(n));
  team.barrier();
}

// bf16 rows -> activations, zero from n up to the next multiple of kLanes.
inline void widen_rows(Team team, const bf16* x, int64_t rows, int64_t n, Act* out) {
  const Range mine = team.share(rows);
  for (int64_t r = mine.begin; r < mine.end; ++r) {
    const bf16* in = x + r * n;
    Act* to = out + r * act_stride(n);
    int64_t at = 0;
    for (; at + kLanes <= n; at += kLanes) store_act(to + at, load_bf16(in + at));
    for (; at < round_up(n, kLanes); ++at) to[at] = at < n ? to_act(widen(in[at])) : Act{0};
  }
  team.barrier();
}

// Columns of `panels` of the product.
template <class Epilogue>
inline void linear_panels(Team team, const Act* a, int64_t rows, int64_t k, const bf16* packed,
                          Range panels, Epilogue&& epilogue) {
  const Range mine = team.share(panels.end - panels.begin);
  multiply(a, act_stride(k), rows, packed, ceil_div(k, 2),
           Range{panels.begin + mine.begin, panels.begin + mine.end}, epilogue);
}

template <class Epilogue>
inline void linear(Team team, const Act* a, int64_t rows, int64_t k, const bf16* packed, int64_t n,
                   Epilogue&& epilogue) {
  linear_panels(team, a, rows, k, packed, Range{0, ceil_div(n, kPanel)}, epilogue);
}

// Part `part` of `parts` of the activated columns.
inline void gate_up(Team team, const Layer& layer, const Shape& shape, const Act* normed,
                    int64_t rows, Act* out, int part = 0, int parts = 1) {
  const int64_t panels = ceil_div(2 * round_up(shape.mlp_columns, kLanes), kPanel);
  linear_panels(team, normed, rows, shape.hidden, layer.gate_up,
                Range{panels * part / parts, panels * (part + 1) / parts},
                SwiGlu{out, act_stride(shape.mlp_columns)});
}

// Starts in scratch memory of what the operations of a layer hand from stage to stage.
struct DenseAt {
  size_t attention, normed, columns;

  DenseAt(Scratch::Plan& plan, const Shape& shape, int64_t rows)
      : attention(plan.add<Act>(rows * act_stride(shape.q_width))),
        normed(plan.add<Act>(rows * act_stride(shape.hidden))),
        columns(plan.add<Act>(rows * act_stride(shape.mlp_columns))) {}
};

// `project` and `finish` for one thread of a team; they end without a barrier. `finish` has parts of
// nearly equal length, with a barrier between each two.
inline constexpr int kFinishParts = 3;

inline void project_rows(Team team, const Layer& layer, const Shape& shape, const float* x,
                         int64_t rows, bf16* qkv, const DenseAt& at, char* memory) {
  Act* normed = reinterpret_cast<Act*>(memory + at.normed);
  norm_rows(team, x, layer.input_norm, shape.norm_eps, rows, shape.hidden, normed);
  linear(team, normed, rows, shape.hidden, layer.qkv, shape.qkv_width,
         StoreBf16{qkv, shape.qkv_width});
}

inline void finish_part(int part, Team team, const Layer& layer, const Shape& shape, float* x,
                        const bf16* attention, int64_t rows, const DenseAt& at, char* memory) {
  Act* a = reinterpret_cast<Act*>(memory + at.attention);
  Act* normed = reinterpret_cast<Act*>(memory + at.normed);
  Act* columns = reinterpret_cast<Act*>(memory + at.columns);
  if (part == 0) {
    widen_rows(team, attention, rows, shape.q_width, a);
    linear(team, a, rows, shape.q_width, layer.output, shape.hidden, AddFloat{x, shape.hidden});
    team.barrier();
    norm_rows(team, x, layer.mlp_norm, shape.norm_eps, rows, shape.hidden, normed);
  }
  if (part < 2)
    gate_up(team, layer, shape, normed, rows, columns, part, 2);
  else
    linear(team, columns, rows, shape.mlp_columns, layer.down, shape.hidden,
           AddFloat{x, shape.hidden});
}

inline void project(const Layer& layer, const Shape& shape, const float* x, int64_t rows, bf16* qkv,
                    int threads) {
  Scratch::Plan plan;
  const DenseAt at(plan, shape, rows);
  char* memory = scratch().reserve(plan);
  parallel(threads,
           [&](Team team) { project_rows(team, layer, shape, x, rows, qkv, at, memory); });
}

inline void output(const Layer& layer, const Shape& shape, const bf16* attention, int64_t rows,
                   bf16* out, int threads) {
  Scratch::Plan plan;
  plan.add<Act>(rows * act_stride(shape.q_width));
  Act* a = reinterpret_cast<Act*>(scratch().reserve(plan));
  parallel(threads, [&](Team team) {
    widen_rows(team, attention, rows, shape.q_width, a);
    linear(team, a, rows, shape.q_width, layer.output, shape.hidden, StoreBf16{out, shape.hidden});
  });
}

inline void mlp(const Layer& layer, const Shape& shape, const float* x, int64_t rows, bf16* out,
                int threads) {
  Scratch::Plan plan;
  plan.add<Act>(rows * act_stride(shape.hidden));
  const size_t columns_at = plan.add<Act>(rows * act_stride(shape.mlp_columns));
  char* memory = scratch().reserve(plan);
  Act* normed = reinterpret_cast<Act*>(memory);
  Act* columns = reinterpret_cast<Act*>(memory + columns_at);
  parallel(threads, [&](Team team) {
    norm_rows(team, x, layer.mlp_norm, shape.norm_eps, rows, shape.hidden, normed);
    gate_up(team, layer, shape, normed, rows, columns);
    team.barrier();
    linear(team, columns, rows, shape.mlp_columns, layer.down, shape.hidden,
           StoreBf16{out, shape.hidden});
  });
}

inline void finish(const Layer& layer, const Shape& shape, float* x, const bf16* attention,
                   int64_t rows, int threads) {
  Scratch::Plan plan;
  const DenseAt at(plan, shape, rows);
  char* memory = scratch().reserve(plan);
  parallel(threads, [&](Team team) {
    for (int part = 0; part < kFinishParts; ++part) {
      if (part > 0) team.barrier();
      finish_part(part, team, layer, shape, x, attention, rows, at, memory);
    }
  });
}

inline void head(const float* norm, const bf16* packed, const Shape& shape, const float* x,
                 int64_t rows, float* logits, int threads) {
  Scratch::Plan plan;
  plan.add<Act>(rows * act_stride(shape.hidden));
  Act* normed = reinterpret_cast<Act*>(scratch().reserve(plan));
  parallel(threads, [&](Team team) {
    norm_rows(team, x, norm, shape.norm_eps, rows, shape.hidden, normed);
    linear(team, normed, rows, shape.hidden, packed, shape.vocabulary,
           StoreFloat{logits, shape.vocabulary});
  });
}

// Rows of a packed [vocabulary, hidden] matrix; ids outside it give zeros.
inline void embed(const bf16* packed, const Shape& shape, const int64_t* ids, int64_t rows,
                  float* x, int threads) {
  const int64_t pairs = ceil_div(shape.hidden, 2);
  parallel(threads, [&](Team team) {
    const Range mine = team.share(rows);
    for (int64_t r = mine.begin; r < mine.end; ++r) {
      const int64_t id = ids[r];
      const bool inside = id >= 0 && id < shape.vocabulary;
      const bf16* row = packed + (id / kPanel * pairs * kPanel + id % kPanel) * 2;
      for (int64_t k = 0; k < shape.hidden; ++k)
        x[r * shape.hidden + k] = inside ? widen(row[k / 2 * 2 * kPanel + k % 2]) : 0.0f;
    }
  });
}
}  // namespace tknp
