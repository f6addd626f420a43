// C interface: whole layers of one chunk of a prompt in one call.
#include <chrono>

#include "dense.h"
#include "rope.h"

using namespace tknp;

namespace {
// `Layers` of library.py: `count` layers, arrays in their order.
struct ChunkLayers {
  int64_t count;
  const Layer* const* weights;
  bf16* const* keys;
  bf16* const* values;
};

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point& last) {
  const Clock::time_point before = last;
  last = Clock::now();
  return std::chrono::duration<double>(last - before).count();
}
}  // namespace

extern "C" {
// Of dense.cpp and prefill.cpp: a chunk's layers are its operations, one after another.
int tknp_project(const Layer* layer, const Shape* shape, const float* x, int64_t rows, bf16* qkv,
                 int threads);
int tknp_prefill(const Heads* heads, const bf16* qkv, int64_t start, int64_t count,
                 const int32_t* table, bf16* k, bf16* v, bf16* out, int threads);
int tknp_finish(const Layer* layer, const Shape* shape, float* x, const bf16* attention,
                int64_t rows, int threads);

// x [count, hidden] passes all layers; qkv and out are memory for one of them. `seconds` [layers, 3]
// tells how long each took to project, to attend and to finish.
int tknp_chunk(const ChunkLayers* layers, const Shape* shape, const Heads* heads, int64_t start,
               int64_t count, const int32_t* table, float* x, bf16* qkv, bf16* out,
               double* seconds, int threads) {
  Clock::time_point last = Clock::now();
  for (int64_t i = 0; i < layers->count; ++i, seconds += 3) {
    const Layer* layer = layers->weights[i];
    if (const int failed = tknp_project(layer, shape, x, count, qkv, threads)) return failed;
    seconds[0] = seconds_since(last);
    if (const int failed = tknp_prefill(heads, qkv, start, count, table, layers->keys[i],
                                        layers->values[i], out, threads))
      return failed;
    seconds[1] = seconds_since(last);
    if (const int failed = tknp_finish(layer, shape, x, out, count, threads)) return failed;
    seconds[2] = seconds_since(last);
  }
  return 0;
}
}
