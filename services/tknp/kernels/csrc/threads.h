// Teams of threads and the memory they work in.
//
// A kernel is one parallel region: each thread takes a contiguous share of every stage and meets
// the others at a barrier. Shares never change what is computed, only who computes it. OpenMP is
// used because its pool is torch's: the loader maps one libgomp for both, so the two never
// compete for cores.
#pragma once

#include <omp.h>

#include <cstddef>
#include <cstdlib>
#include <new>

#include "simd.h"

namespace tknp {
struct Range {
  int64_t begin, end;
};

struct Team {
  int rank, size;

  // This thread's part of [0, count).
  Range share(int64_t count) const { return {count * rank / size, count * (rank + 1) / size}; }

  void barrier() const {
#pragma omp barrier
  }
};

template <class Body>
void parallel(int threads, Body&& body) {
  if (threads <= 1) {
    body(Team{0, 1});
    return;
  }
#pragma omp parallel num_threads(threads)
  body(Team{omp_get_thread_num(), omp_get_num_threads()});
}

// One growing block of memory, carved up afresh by each call. A thread that calls kernels owns one
// (`scratch()`), so calls from several Python threads never share memory. Throws std::bad_alloc.
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
      if (data_ == nullptr) throw std::bad_alloc();
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
