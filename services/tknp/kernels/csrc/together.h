// Runs of several streams of one rank (layers.h), in turns: while one waits for messages, another
// computes.
//
// Of the stages that are ready the first of these goes on, as `Turns.place` of layout/turns.py has
// it: projecting, since owners wait for the rows; attending to rows that another rank roots; to own
// ones; what is left of a layer. Who may root here at all is up to the caller, who leaves out those
// that may not.
//
// Each stage is a region of its own, and its time is what has passed since the one before it ended:
// waiting, for messages or for other streams, then work.
#pragma once

#include "layers.h"

namespace tknp {
// Mirrored by layers.py: computes next; waits for messages; somebody else has to wait for them
// (`receive` of layers.h says when); is behind its last stage.
enum class State : int64_t { kComputes, kWaits, kStuck, kOver };

inline int place(const Run& run, Work work) {
  switch (work) {
    case Work::kProject:
      return 1;
    case Work::kAttend:
      return run.x == nullptr ? 2 : 3;
    default:
      return 4;
  }
}

// The stage that `run` is at is over; it was worked on since `began`.
inline void end_stage(Run& run, int64_t began) {
  const int64_t now = mailbox::now_ns();
  run.seconds[run.at] += static_cast<double>(now - run.since_ns) * 1e-9;
  run.waits[run.at] += static_cast<double>(began - run.since_ns) * 1e-9;
  run.since_ns = now;
  run.begun = 0;
  ++run.at;
}

// Moves messages, as many stages on as that goes.
inline State exchange(Run& run) {
  while (run.at < run.layers.count * run.stages) {
    const Stage& stage = run.pattern[run.at % run.stages];
    if (stage.work != Work::kSend && stage.work != Work::kReceive) return State::kComputes;
    const int64_t began = mailbox::now_ns();
    if (run.begun == 0) begin_messages(run, stage);
    run.begun = 1;
    if (mailbox::acquire(run.lane->lost)) return State::kStuck;
    const int64_t unfinished = mailbox::progress(*run.lane, run.parts, run.part_count);
    if (unfinished < 0) return State::kStuck;
    if (stage.work == Work::kReceive && unfinished > 0)
      return mailbox::settled(run.parts, 0, run.part_count) ? State::kStuck : State::kWaits;
    end_stage(run, began);
  }
  return State::kOver;
}

inline void compute(Run& run, int threads) {
  const int64_t began = mailbox::now_ns();
  const Room room(run, threads);
  parallel(threads, [&](Team team) {
    double waited = 0.0;
    run_stage(team, run, run.pattern[run.at % run.stages], run.at / run.stages, room, waited);
  });
  end_stage(run, began);
}

// Until a run is over or stuck, as all are that have waited for 2 ms together, or `called` is not 0;
// with `once`, until a stage has been computed or none is ready. `states` [count] says how the runs
// stand.
inline void run_together(Run* const* runs, State* states, int64_t count, const uint64_t* called,
                         bool once, int threads) {
  int64_t idle_ns = 0;
  for (int64_t i = 0; i < count; ++i)
    if (runs[i]->since_ns == 0) runs[i]->since_ns = mailbox::now_ns();
  while (true) {
    bool leave = mailbox::acquire(called) != 0;
    int64_t next = -1;
    for (int64_t i = 0, first = 5; i < count; ++i) {
      states[i] = exchange(*runs[i]);
      leave = leave || states[i] == State::kStuck || states[i] == State::kOver;
      if (states[i] != State::kComputes) continue;
      const int at = place(*runs[i], runs[i]->pattern[runs[i]->at % runs[i]->stages].work);
      if (at < first) next = i, first = at;
    }
    if (leave) return;
    if (next >= 0) {
      compute(*runs[next], threads);
      idle_ns = 0;
      if (once) return;
      continue;
    }
    if (once) return;
    const int64_t now = mailbox::now_ns();
    if (idle_ns == 0) idle_ns = now;
    if (now - idle_ns >= mailbox::kYieldNs) {
      std::fill_n(states, count, State::kStuck);
      return;
    }
    if (now - idle_ns < mailbox::kSpinNs)
      mailbox::pause();
    else
      sched_yield();
  }
}
}  // namespace tknp
