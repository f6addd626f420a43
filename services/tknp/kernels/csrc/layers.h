// Whole layers in one parallel region, where no rows leave this rank in between:
//
//   for each layer   project -> qkv -> attend -> out -> finish -> x
//
// The stages are those of the operations by themselves, with the same shares and barriers, so the
// results are bitwise theirs. What is saved is a call, a region and its threads' wake-up each.
#pragma once

#include <chrono>

#include "attention.h"
#include "dense.h"

namespace tknp {
// Mirrored by ctypes in library.py. `count` layers, arrays in their order.
struct Layers {
  int64_t count;
  const Layer* const* weights;
  bf16* const* keys;
  bf16* const* values;
};

// The stages as dense.cpp and decode.cpp compile them.
void project_stage(Team team, const Layer& layer, const Shape& shape, const float* x, int64_t rows,
                   bf16* qkv, const DenseAt& at, char* memory);
void finish_stage(Team team, const Layer& layer, const Shape& shape, float* x,
                  const bf16* attention, int64_t rows, const DenseAt& at, char* memory);
void attend_stage(Team team, const Decode& decode);

// Hands out the time since it was last asked, as one thread of a team sees it.
class Watch {
 public:
  double seconds() {
    const Clock::time_point last = last_;
    last_ = Clock::now();
    return std::chrono::duration<double>(last_ - last).count();
  }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point last_ = Clock::now();
};

// x [rows, hidden] passes all layers; qkv, out and lse are memory for one of them. `seconds`
// [count, 3] tells how long each took to project, to attend and to finish.
inline void run_layers(const Layers& layers, const Shape& shape, const Heads& heads,
                       const Step& step, float* x, bf16* qkv, bf16* out, float* lse,
                       double* seconds, int threads) {
  Scratch::Plan plan;
  const DenseAt dense_at(plan, shape, step.rows);
  const DecodeAt decode_at(plan, heads, step, threads);
  char* memory = scratch().reserve(plan);
  parallel(threads, [&](Team team) {
    Watch watch;
    const auto stage = [&](int64_t layer, int part, auto&& body) {
      body();
      team.barrier();
      if (team.rank == 0) seconds[3 * layer + part] = watch.seconds();
    };
    for (int64_t i = 0; i < layers.count; ++i) {
      const Layer& layer = *layers.weights[i];
      Decode decode{heads, step, qkv, layers.keys[i], layers.values[i], out, lse};
      decode_at.place(decode, memory);
      stage(i, 0, [&] {
        project_stage(team, layer, shape, x, step.rows, qkv, dense_at, memory);
      });
      stage(i, 1, [&] { attend_stage(team, decode); });
      stage(i, 2, [&] {
        finish_stage(team, layer, shape, x, out, step.rows, dense_at, memory);
      });
    }
  });
}
}  // namespace tknp
