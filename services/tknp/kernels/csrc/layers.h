// Whole layers in one parallel region, with the messages that their rows take between ranks:
//
//   root    project -> qkv -> send rows -> attend to own -> receive outputs -> finish -> x
//   owner                     receive rows -> attend -> send outputs
//
// each stage once a layer. Those that compute are the stages of the operations by themselves, with
// the same shares and barriers, so the results are bitwise theirs. What is saved is a call, a region
// and its threads' wake-up each. Messages are moved by the first thread; the others wait for it as
// for any stage.
#pragma once

#include <chrono>

#include "attention.h"
#include "dense.h"
#include "mailbox.h"

namespace tknp {
// Mirrored by ctypes in library.py. `count` layers, arrays in their order.
struct Layers {
  int64_t count;
  const Layer* const* weights;
  bf16* const* keys;
  bf16* const* values;
};

enum class Work : int64_t { kProject, kSend, kReceive, kAttend, kFinish };

// What is done in each layer: on rows [start, stop), with messages [first, last). Mirrored, too.
struct Stage {
  Work work;
  int64_t start, stop;
  int64_t first, last;
};

// Layers with the stages of `pattern`, from stage `at` (layer * stages + stage) on. Where no stage
// needs them, weights and `shape`, or pages, `heads` and `step`, or `lane` are null. qkv, attention
// and lse are memory for one layer, row 0 of the batch first.
struct Run {
  Layers layers;
  int64_t stages, at, rows;
  const Stage* pattern;
  const Shape* shape;
  const Heads* heads;
  const Step* step;
  mailbox::Lane* lane;
  mailbox::Part* parts;  // of a layer, finished but for those under way
  int64_t part_count;
  float* x;
  bf16* qkv;
  bf16* attention;
  float* lse;
  double* seconds;  // [layers, stages]; added to, as `waits` is, of which they are a part
  double* waits;
  int64_t begun, since_ns;  // together.h
};

// The stages as dense.cpp and decode.cpp compile them.
void project_stage(Team team, const Layer& layer, const Shape& shape, const float* x, int64_t rows,
                   bf16* qkv, const DenseAt& at, char* memory);
void finish_stage(int part, Team team, const Layer& layer, const Shape& shape, float* x,
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

inline void begin_messages(const Run& run, const Stage& stage) {
  for (int64_t i = stage.first; i < stage.last; ++i) run.parts[i].moved = -1;
}

// Send what there is room for; the rest goes with whatever is received next. False if this rank is
// lost.
inline bool send(const Run& run, const Stage& stage) {
  begin_messages(run, stage);
  if (mailbox::acquire(run.lane->lost)) return false;
  mailbox::progress(*run.lane, run.parts, run.part_count);
  return true;
}

// Until everything under way has been moved, the rest of earlier sends included. False if somebody
// else has to wait for it: it takes long, a rank is lost, or another message has arrived.
inline bool receive(const Run& run, const Stage& stage, double& waited) {
  begin_messages(run, stage);
  const int64_t began = mailbox::now_ns();
  int64_t now = began, unfinished = run.part_count;
  while (!mailbox::acquire(run.lane->lost)) {
    unfinished = mailbox::progress(*run.lane, run.parts, run.part_count);
    if (unfinished <= 0 || mailbox::settled(run.parts, 0, run.part_count)) break;
    if (now - began < mailbox::kSpinNs)
      mailbox::pause();
    else
      sched_yield();
    now = mailbox::now_ns();  // what others had of the core is waiting, the next look is not
    if (now - began >= mailbox::kYieldNs) break;
  }
  waited += static_cast<double>(now - began) * 1e-9;
  return unfinished == 0;
}

// Scratch memory of a run's stages; `memory` is reserved by the caller.
struct Room {
  DenseAt dense;
  DecodeAt decode;
  char* memory = nullptr;

  Room(const Run& run, int threads, Scratch::Plan& plan)
      : dense(plan, run.shape ? *run.shape : Shape{}, run.shape ? run.rows : 0),
        decode(plan, run.heads ? *run.heads : Heads{0, 1}, run.step ? *run.step : Step{}, threads) {
  }
};

inline void finish_part(int part, Team team, const Run& run, int64_t layer, const Room& room) {
  finish_stage(part, team, *run.layers.weights[layer], *run.shape, run.x, run.attention, run.rows,
               room.dense, room.memory);
}

// One stage of one layer, by one thread of a team. False, at the first, if its messages have to be
// waited for by somebody else.
inline bool run_stage(Team team, const Run& run, const Stage& stage, int64_t layer,
                      const Room& room, double& waited) {
  switch (stage.work) {
    case Work::kProject:
      project_stage(team, *run.layers.weights[layer], *run.shape, run.x, run.rows, run.qkv,
                    room.dense, room.memory);
      break;
    case Work::kSend:
      return team.rank != 0 || send(run, stage);
    case Work::kReceive:
      return team.rank != 0 || receive(run, stage, waited);
    case Work::kAttend: {
      const Heads& heads = *run.heads;
      Decode decode{heads,
                    *run.step,
                    run.qkv + stage.start * heads.width(),
                    run.layers.keys[layer],
                    run.layers.values[layer],
                    run.attention + stage.start * heads.q_heads * heads.head_dim,
                    run.lse};
      room.decode.place(decode, room.memory);
      attend_stage(team, decode);
      break;
    }
    case Work::kFinish:
      for (int part = 0; part < kFinishParts; ++part) {
        if (part > 0) team.barrier();
        finish_part(part, team, run, layer, room);
      }
      break;
  }
  return true;
}

// Returns with run.at behind the last stage; before that, with the stage whose messages somebody else
// has to wait for, after which the one behind it is next.
inline void run_layers(Run& run, int threads) {
  Scratch::Plan plan;
  Room room(run, threads, plan);
  room.memory = scratch().reserve(plan);
  const int64_t first = run.at, stop = run.layers.count * run.stages;
  // The last stage, told by the first thread. Threads that are still to begin a stage may read it
  // while that one ends there: they run it, too.
  std::atomic<int64_t> last{stop - 1};
  parallel(threads, [&](Team team) {
    Watch watch;
    for (int64_t at = first; at <= last.load(std::memory_order_relaxed); ++at) {
      double waited = 0.0;
      const bool done = run_stage(team, run, run.pattern[at % run.stages], at / run.stages,
                                  room, waited);
      if (!done) last.store(at, std::memory_order_relaxed);
      team.barrier();
      if (team.rank != 0) continue;
      run.seconds[at] += watch.seconds();
      run.waits[at] += waited;
      run.at = done ? at + 1 : at;
    }
  });
}
}  // namespace tknp
