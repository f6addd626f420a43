// Teams of threads and the memory they work in.
//
// A kernel is one parallel region: each thread takes a contiguous share of every stage and meets
// the others at a barrier. Shares never change what is computed, only who computes it. OpenMP is
// used because its pool is torch's: the loader maps one libgomp for both, so the two never
// compete for cores. Barriers are ours: OpenMP's puts a thread to sleep that waits for one which
// other processes hold up, and waking it takes longer than most stages; ours lets others have the
// core and looks again.
#pragma once

#include <immintrin.h>
#include <omp.h>
#include <sched.h>

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <new>

#include "simd.h"

namespace tknp {
struct Range {
  int64_t begin, end;
};

// Where the threads of one region wait for each other, any number of times.
class Meeting {
 public:
  void wait(int size) {
    const unsigned mine = round_.load(std::memory_order_relaxed);
    if (here_.fetch_add(1, std::memory_order_acq_rel) + 1 == size) {
      here_.store(0, std::memory_order_relaxed);
      round_.store(mine + 1, std::memory_order_release);
      return;
    }
    for (int looks = 0; round_.load(std::memory_order_acquire) == mine; ++looks) {
      if (looks < kSpins)
        _mm_pause();
      else
        sched_yield();
    }
  }

 private:
  static constexpr int kSpins = 1000;  // some tens of microseconds
  alignas(64) std::atomic<int> here_{0};
  alignas(64) std::atomic<unsigned> round_{0};
};

struct Team {
  int rank, size;
  Meeting* meeting;

  // This thread's part of [0, count).
  Range share(int64_t count) const { return {count * rank / size, count * (rank + 1) / size}; }

  void barrier() const {
    if (size > 1) meeting->wait(size);
  }
};

template <class Body>
void parallel(int threads, Body&& body) {
  if (threads <= 1) {
    body(Team{0, 1, nullptr});
    return;
  }
  Meeting meeting;
#pragma omp parallel num_threads(threads)
  body(Team{omp_get_thread_num(), omp_get_num_threads(), &meeting});
}

// There was no memory for `bytes` of scratch space.
struct NoScratch : std::bad_alloc {
  explicit NoScratch(size_t wanted) : bytes(wanted) {}
  const size_t bytes;
};

// One growing block of memory, carved up afresh by each call. A thread that calls kernels owns one
// (`scratch()`), so calls from several Python threads never share memory. Throws NoScratch.
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { std::free(data_); }

  // Sizes of up to N arrays in elements -> their starts, 64-byte aligned and uninitialised.
  class Plan {
   public:
    template <class T>
    size_t add(int64_t elements) {
      const size_t at = bytes_;
      bytes_ += static_cast<size_t>(round_up(elements * static_cast<int64_t>(sizeof(T)), 64));
      return at;
    }
    size_t bytes() const { return bytes_; }

   private:
    size_t bytes_ = 0;
  };

  char* reserve(const Plan& plan) {
    if (plan.bytes() > capacity_) {
      std::free(data_);
      capacity_ = 0;
      data_ = static_cast<char*>(std::aligned_alloc(4096, round_up(plan.bytes(), 4096)));
      if (data_ == nullptr) throw NoScratch(plan.bytes());
      capacity_ = plan.bytes();
    }
    return data_;
  }

 private:
  char* data_ = nullptr;
  size_t capacity_ = 0;
};

inline Scratch& scratch() {
  static thread_local Scratch mine;
  return mine;
}
}  // namespace tknp
