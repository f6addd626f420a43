// activations [M, K] x weights [N, K]^T with weights packed into panels of kPanel columns of the
// result:
//
//   packed[N / kPanel][K / 2][kPanel][2]      N and K are padded with zeros
//
// so that one pair of k of a panel is two vector loads and a panel is one sequential stream. A tile
// of at most kTileRows rows stays in registers for the whole of K and is handed to an epilogue,
// which stores, adds or applies an activation. Few rows are bound by reading weights (prefetched
// from memory), many by the multiply-adds (rows are cut into chunks that stay in the L2 cache while
// all panels pass by). In between a panel's multiply-adds take about as long as reading the next
// one does, so all its tiles prefetch, not only the first, which would wait for memory while the
// others left it idle.
#pragma once

#include <algorithm>
#include <utility>

#include "threads.h"

namespace tknp {
inline constexpr int kPanel = 2 * kLanes;
inline constexpr int64_t kPairBytes = 4 * kPanel;  // of a panel, in one step over k
inline constexpr int64_t kPrefetchBytes = 4096;
inline constexpr int64_t kChunkBytes = (kSteps == 2 ? 320 : 64) << 10;

inline int64_t packed_elements(int64_t rows, int64_t columns) {
  return round_up(rows, kPanel) * round_up(columns, 2);
}

// Of the element at `k` of a column, from the start of its panel.
inline int64_t packed_index(int64_t k, int64_t column) {
  return (k / 2 * kPanel + column) * 2 + k % 2;
}

// Pack rows `source(i)` of `weights` [*, columns] as packed row i; negative means a row of zeros.
template <class Source>
inline void pack_panel(const bf16* weights, int64_t columns, int64_t panel, Source&& source,
                       bf16* packed) {
  const int64_t pairs = ceil_div(columns, 2);
  bf16* out = packed + panel * pairs * 2 * kPanel;
  for (int i = 0; i < kPanel; ++i) {
    const int64_t row = source(panel * kPanel + i);
    for (int64_t k = 0; k < 2 * pairs; ++k) {
      const bool inside = row >= 0 && k < columns;
      out[packed_index(k, i)] = inside ? weights[row * columns + k] : bf16{0};
    }
  }
}

// How far one row of K activations is from the next. The odd stride keeps rows out of each other's
// cache sets where K is a power of two.
inline int64_t act_stride(int64_t k) { return round_up(k, kLanes) + 16; }

// One step of one pair of k: each row of activations times Panels panels, `panel_stride` apart.
template <int S, int Rows, int Panels, int... R>
[[gnu::always_inline]] inline void multiply_step(const ActRows& a, const bf16* w,
                                                 int64_t panel_stride, Mask mask,
                                                 Float (&acc)[Rows][Panels][2],
                                                 std::integer_sequence<int, R...>) {
  Operand b[Panels][2];
  for (int p = 0; p < Panels; ++p)
    for (int v = 0; v < 2; ++v) b[p][v] = operand<S>(w + p * panel_stride + v * kPair, mask);
  if constexpr (Panels == 1) {
    (multiply_row<R, S>(acc[R][0][0], acc[R][0][1], b[0][0], b[0][1], a), ...);
  } else {
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
      const Operand x = broadcast<S>(a.row(r));
#pragma GCC unroll 2
      for (int p = 0; p < Panels; ++p)
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) acc[r][p][v] = multiply_add(acc[r][p][v], b[p][v], x);
    }
  }
}

// What a tile prefetches of each of its panels: `step` bytes further for each pair of k.
struct Ahead {
  const char* from;
  int64_t step;

  // Tile `t` of `tiles` over the panel at `w`: far enough ahead in the same stream if it is alone,
  // else its part of the next panel.
  Ahead(const bf16* w, int64_t pairs, int64_t t, int64_t tiles)
      : from(reinterpret_cast<const char*>(w) + kPrefetchBytes), step(kPairBytes) {
    if (kSteps == 1 || tiles == 1) return;
    from = reinterpret_cast<const char*>(w) + pairs * kPairBytes * (tiles + t) / tiles;
    step = ceil_div(kPairBytes, tiles);
  }
};

// acc += Rows of activations times Panels panels; `next` is called for each pair of k.
template <int Rows, int Panels, class Next>
[[gnu::always_inline]] inline void multiply_tile(const Act* a, int64_t stride, const bf16* w,
                                                 int64_t pairs, Float (&acc)[Rows][Panels][2],
                                                 Next&& next) {
  constexpr auto each = std::make_integer_sequence<int, Rows>{};
  const int64_t panel_stride = pairs * 2 * kPanel;
  const Mask mask = odd_mask();
  ActRows rows(a, stride);
  for (const bf16* stop = w + panel_stride; w != stop; w += 2 * kPanel, rows.at += 2) {
    next();
    multiply_step<0>(rows, w, panel_stride, mask, acc, each);
    if constexpr (kSteps == 2) multiply_step<1>(rows, w, panel_stride, mask, acc, each);
  }
}

// Rows x (Panels * kPanel) results; epilogue(row, panel, low, high) for each row of each panel. A
// function of its own: inlined, GCC keeps some of the sums in memory.
template <int Rows, int Panels, class Epilogue>
[[gnu::noinline]] void tile(const Act* a, int64_t stride, const bf16* w, int64_t pairs, Ahead ahead,
                            Epilogue&& epilogue) {
  Float acc[Rows][Panels][2];
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 2
    for (int p = 0; p < Panels; ++p) acc[r][p][0] = acc[r][p][1] = fill(0.0f);
  multiply_tile(a, stride, w, pairs, acc, [&] {
    for (int p = 0; p < Panels; ++p) prefetch(ahead.from + p * pairs * kPairBytes, kPairBytes);
    ahead.from += ahead.step;
  });
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 2
    for (int p = 0; p < Panels; ++p) epilogue(r, p, acc[r][p][0], acc[r][p][1]);
}

// tile<rows, Panels> for a row count known only now.
template <int Panels, int Most, class Epilogue>
inline void tile_of(int rows, const Act* a, int64_t stride, const bf16* w, int64_t pairs,
                    Ahead ahead, Epilogue&& epilogue) {
  if (rows == Most)
    tile<Most, Panels>(a, stride, w, pairs, ahead, epilogue);
  else if constexpr (Most > 1)
    tile_of<Panels, Most - 1>(rows, a, stride, w, pairs, ahead, epilogue);
}

// All `rows` of `a` times `panels` of `packed`; epilogue(row, first column, low, high).
template <class Epilogue>
inline void multiply(const Act* a, int64_t stride, int64_t rows, const bf16* packed, int64_t pairs,
                     Range panels, Epilogue&& epilogue) {
  const int64_t row_bytes = stride * static_cast<int64_t>(sizeof(Act));
  const int64_t chunk = std::max<int64_t>(kChunkBytes / row_bytes / kTileRows, 1) * kTileRows;
  constexpr int kFewRows = 2;  // too few accumulators to hide latency: take two panels at once
  for (int64_t start = 0; start < rows; start += chunk) {
    const int64_t count = std::min(chunk, rows - start);
    const int64_t tiles = ceil_div(count, kTileRows);
    const int width = count <= kFewRows ? 2 : 1;
    for (int64_t panel = panels.begin; panel < panels.end; panel += width) {
      const bf16* w = packed + panel * pairs * 2 * kPanel;
      for (int64_t t = 0; t < tiles; ++t) {
        const int64_t first = start + count * t / tiles;
        const int height = static_cast<int>(start + count * (t + 1) / tiles - first);
        const auto place = [&](int r, int p, Float low, Float high) {
          epilogue(first + r, (panel + p) * kPanel, low, high);
        };
        const Act* x = a + first * stride;
        const Ahead ahead(w, pairs, t, tiles);
        if (width == 2 && panel + 1 < panels.end)
          tile_of<2, kFewRows>(height, x, stride, w, pairs, ahead, place);
        else
          tile_of<1, kTileRows>(height, x, stride, w, pairs, ahead, place);
      }
    }
  }
}

// Epilogues. `columns` is the true width of the result: what a padded last panel holds beyond it is
// dropped.

template <class T, class Put>
inline void clip(T* out, int64_t valid, Put&& put) {
  if (valid >= kPanel) return put(out);
  T whole[kPanel];
  std::copy(out, out + valid, whole);
  put(whole);
  std::copy(whole, whole + valid, out);
}

struct StoreFloat {
  float* out;
  int64_t columns;
  void operator()(int64_t row, int64_t column, Float low, Float high) const {
    clip(out + row * columns + column, columns - column, [&](float* p) {
      store(p, low);
      store(p + kLanes, high);
    });
  }
};

struct AddFloat {
  float* out;
  int64_t columns;
  void operator()(int64_t row, int64_t column, Float low, Float high) const {
    clip(out + row * columns + column, columns - column, [&](float* p) {
      store(p, add(load(p), low));
      store(p + kLanes, add(load(p + kLanes), high));
    });
  }
};

struct StoreBf16 {
  bf16* out;
  int64_t columns;
  void operator()(int64_t row, int64_t column, Float low, Float high) const {
    clip(out + row * columns + column, columns - column, [&](bf16* p) {
      store_bf16(p, low);
      store_bf16(p + kLanes, high);
    });
  }
};

// A panel of gate_up holds kLanes gate columns and the same kLanes up columns.
struct SwiGlu {
  Act* out;
  int64_t stride;
  void operator()(int64_t row, int64_t column, Float gate, Float up) const {
    const Float e = exponential(sub(fill(0.0f), gate));
    const Float silu = div(gate, add(fill(1.0f), e));
    store_act(out + row * stride + column / 2, mul(silu, up));
  }
};
}  // namespace tknp
