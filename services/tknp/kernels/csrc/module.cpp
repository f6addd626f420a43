// The C interface that ctypes loads. Arguments are checked in Python; pointers are to contiguous
// tensors, which the caller keeps alive. Functions return 0, or kOutOfMemory if scratch memory can't
// be had. No state outlives a call but each calling thread's scratch block.

#include <new>

#include "attention.h"
#include "dense.h"
#include "prefill.h"

using namespace tknp;

namespace {
constexpr int kDone = 0, kOutOfMemory = 1, kUnsupported = 2;

template <class Body>
int guarded(Body&& body) {
  try {
    body();
    return kDone;
  } catch (const std::bad_alloc&) {
    return kOutOfMemory;
  }
}

// Head sizes with a compiled decode kernel.
template <class Body>
int for_head_dim(int64_t head_dim, Body&& body) {
  switch (head_dim) {
#define TKNP_CASE(DH) \
  case DH:            \
    return guarded([&] { body(std::integral_constant<int, DH>{}); });
    TKNP_CASE(16)
    TKNP_CASE(32)
    TKNP_CASE(64)
    TKNP_CASE(80)
    TKNP_CASE(96)
    TKNP_CASE(128)
    TKNP_CASE(192)
    TKNP_CASE(256)
#undef TKNP_CASE
  }
  return kUnsupported;
}
}  // namespace

extern "C" {
const char* tknp_isa() { return kIsa; }

int tknp_supports_head_dim(int64_t head_dim) {
  return for_head_dim(head_dim, [](auto) {}) == kDone;
}

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

int64_t tknp_plan(Step* step, int64_t page_size) { return plan_items(*step, page_size); }

int tknp_attend(const Heads* heads, const Step* step, const bf16* qkv, bf16* k, bf16* v, bf16* out,
                float* lse, int threads) {
  return for_head_dim(heads->head_dim, [&](auto head_dim) {
    attend<head_dim>(Decode{*heads, *step, qkv, k, v, out, lse}, threads);
  });
}

int tknp_prefill(const Heads* heads, const bf16* qkv, int64_t start, int64_t count,
                 const int32_t* table, bf16* k, bf16* v, bf16* out, int threads) {
  return guarded([&] { prefill(Chunk{*heads, qkv, start, count, table, k, v, out}, threads); });
}

// Reads all of `bytes` at `p` (a multiple of 64) once: what bench/kernels.py measures bandwidth with.
uint64_t tknp_read(const uint64_t* p, int64_t bytes, int threads) {
  std::atomic<uint64_t> all{0};
  parallel(threads, [&](Team team) {
    const Range lines = team.share(bytes / 64);
    uint64_t lanes[8] = {};
    for (int64_t i = lines.begin; i < lines.end; ++i) {
      prefetch(reinterpret_cast<const char*>(p + 8 * i) + kPrefetchBytes, 64);
      for (int j = 0; j < 8; ++j) lanes[j] ^= p[8 * i + j];
    }
    for (const uint64_t lane : lanes) all ^= lane;
  });
  return all;
}
}
