// C interface: packing of weights, the dense operations, and what memory was refused.
#include "dense.h"

#include "interface.h"
#include "layers.h"

using namespace tknp;

namespace tknp {
void project_stage(Team team, const Layer& layer, const Shape& shape, const float* x, int64_t rows,
                   bf16* qkv, const DenseAt& at, char* memory) {
  project_rows(team, layer, shape, x, rows, qkv, at, memory);
}

void finish_stage(int part, Team team, const Layer& layer, const Shape& shape, float* x,
                  const bf16* attention, int64_t rows, const DenseAt& at, char* memory) {
  finish_part(part, team, layer, shape, x, attention, rows, at, memory);
}
}  // namespace tknp

extern "C" {
int64_t tknp_refused_bytes() { return refused_bytes(); }

int64_t tknp_packed_elements(int64_t rows, int64_t columns) {
  return packed_elements(rows, columns);
}
int64_t tknp_packed_gate_up_elements(int64_t mlp_columns, int64_t hidden) {
  return packed_elements(2 * round_up(mlp_columns, kLanes), hidden);
}

void tknp_pack(const bf16* weights, int64_t rows, int64_t columns, bf16* packed, int threads) {
  parallel(threads, [&](Team team) {
    const Range mine = team.share(ceil_div(rows, kPanel));
    for (int64_t panel = mine.begin; panel < mine.end; ++panel)
      pack_panel(weights, columns, panel, [&](int64_t i) { return i < rows ? i : -1; }, packed);
  });
}

// [gate rows | up rows] -> panels of kLanes gate and the same kLanes up columns (SwiGlu).
void tknp_pack_gate_up(const bf16* weights, int64_t mlp_columns, int64_t hidden, bf16* packed,
                       int threads) {
  const auto source = [&](int64_t i) {
    const int64_t column = i / kPanel * kLanes + i % kLanes;
    if (column >= mlp_columns) return int64_t{-1};
    return i % kPanel < kLanes ? column : mlp_columns + column;
  };
  parallel(threads, [&](Team team) {
    const Range mine = team.share(ceil_div(mlp_columns, kLanes));
    for (int64_t panel = mine.begin; panel < mine.end; ++panel)
      pack_panel(weights, hidden, panel, source, packed);
  });
}

void tknp_embed(const bf16* packed, const Shape* shape, const int64_t* ids, int64_t rows, float* x,
                int threads) {
  embed(packed, *shape, ids, rows, x, threads);
}

int tknp_project(const Layer* layer, const Shape* shape, const float* x, int64_t rows, bf16* qkv,
                 int threads) {
  return guarded([&] { project(*layer, *shape, x, rows, qkv, threads); });
}

int tknp_finish(const Layer* layer, const Shape* shape, float* x, const bf16* attention,
                int64_t rows, int threads) {
  return guarded([&] { finish(*layer, *shape, x, attention, rows, threads); });
}

int tknp_output(const Layer* layer, const Shape* shape, const bf16* attention, int64_t rows,
                bf16* out, int threads) {
  return guarded([&] { output(*layer, *shape, attention, rows, out, threads); });
}

int tknp_mlp(const Layer* layer, const Shape* shape, const float* x, int64_t rows, bf16* out,
             int threads) {
  return guarded([&] { mlp(*layer, *shape, x, rows, out, threads); });
}

int tknp_head(const float* norm, const bf16* packed, const Shape* shape, const float* x,
              int64_t rows, float* logits, int threads) {
  return guarded([&] { head(norm, packed, *shape, x, rows, logits, threads); });
}
}
