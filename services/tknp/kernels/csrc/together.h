// Runs of several streams of one rank (layers.h), in turns: while one waits for messages, another
// computes.
//
// Of the stages that are ready the first of these goes on, as `Turns.place` of layout/turns.py has
// it: projecting, since owners wait for the rows; attending to rows that another rank roots; to own
// ones; what is left of a layer. Who may root here at all is up to the caller, who leaves out those
// that may not.
//
// What is left of a layer is the longest stage, and owners elsewhere wait meanwhile: between its
// parts whatever goes before it is computed.
//
// Each stage is a region of its own, or three, and its time is what has passed since the one before
// it ended: waiting, for messages or for other streams, and work.
#pragma once

#include <vector>

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

// The stage that `run` is at is over; it was worked on since `began`, but for `others_ns`.
inline void end_stage(Run& run, int64_t began, int64_t others_ns = 0) {
  const int64_t now = mailbox::now_ns();
  run.seconds[run.at] += static_cast<double>(now - run.since_ns) * 1e-9;
  run.waits[run.at] += static_cast<double>(began - run.since_ns + others_ns) * 1e-9;
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

// Runs that go on together, and their scratch memory.
class Together {
 public:
  Together(Run* const* runs, State* states, int64_t count, int threads)
      : runs_(runs), states_(states), count_(count), threads_(threads) {
    Scratch::Plan plan;
    rooms_.reserve(count);
    for (int64_t i = 0; i < count; ++i) rooms_.emplace_back(*runs[i], threads, plan);
    char* memory = scratch().reserve(plan);
    for (Room& room : rooms_) room.memory = memory;
  }

  // The run whose stage goes on, and goes before `last`; -1: none. Messages are moved, and states
  // noted, on the way.
  int64_t next(int last) {
    int64_t found = -1;
    for (int64_t i = 0; i < count_; ++i) {
      states_[i] = exchange(*runs_[i]);
      if (states_[i] != State::kComputes) continue;
      const int at = place(*runs_[i], work(i));
      if (at < last) found = i, last = at;
    }
    return found;
  }

  void compute(int64_t i) {
    Run& run = *runs_[i];
    const int64_t began = mailbox::now_ns(), layer = run.at / run.stages;
    int64_t others_ns = 0;
    if (work(i) == Work::kFinish) {
      for (int part = 0; part < kFinishParts; ++part) {
        if (part > 0) others_ns += relieve(place(run, Work::kFinish));
        parallel(threads_, [&](Team team) { finish_part(part, team, run, layer, rooms_[i]); });
      }
    } else {
      parallel(threads_, [&](Team team) {
        double waited = 0.0;
        run_stage(team, run, run.pattern[run.at % run.stages], layer, rooms_[i], waited);
      });
    }
    end_stage(run, began, others_ns);
  }

 private:
  Work work(int64_t i) const { return runs_[i]->pattern[runs_[i]->at % runs_[i]->stages].work; }

  // Compute what goes before `last`; returns how long that took.
  int64_t relieve(int last) {
    const int64_t began = mailbox::now_ns();
    for (int64_t i; (i = next(last)) >= 0;) compute(i);
    return mailbox::now_ns() - began;
  }

  Run* const* runs_;
  State* states_;
  int64_t count_;
  int threads_;
  std::vector<Room> rooms_;
};

// Until a run is over or stuck, as all are that have waited for 2 ms together, or `called` is not 0;
// with `once`, until a stage has been computed, and what it let in between, or none is ready.
// `states` [count] says how the runs stand.
inline void run_together(Run* const* runs, State* states, int64_t count, const uint64_t* called,
                         bool once, int threads) {
  constexpr int kAny = 5;
  Together together(runs, states, count, threads);
  int64_t idle_ns = 0;
  for (int64_t i = 0; i < count; ++i)
    if (runs[i]->since_ns == 0) runs[i]->since_ns = mailbox::now_ns();
  while (true) {
    const int64_t next = together.next(kAny);
    const bool leave = std::any_of(states, states + count, [](State state) {
      return state == State::kStuck || state == State::kOver;
    });
    if (leave || mailbox::acquire(called) != 0) return;
    if (next >= 0) {
      together.compute(next);
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
