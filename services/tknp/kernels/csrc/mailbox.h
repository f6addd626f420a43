// Messages between ranks of one host: rings of shared memory, moved without waiting.
//
// Rings and headers are laid out as in transport/ring.py, whose Python end may be at the other side.
// Structures are mirrored by ctypes in mailbox.py and layers.py. One thread at a time uses a lane.
#pragma once

#include <sched.h>
#include <time.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tknp::mailbox {
inline constexpr uint64_t kLine = 64;
inline constexpr int kHead = 0, kTail = 8, kData = 16;  // in 8-byte words
// A message is published piece by piece, so that its reader copies while its writer still does.
inline constexpr uint64_t kPiece = 8192;
inline constexpr int kLooks = 64;  // between two looks at the clock, while spinning
// Looking without leaving the core: short, as the peer may share it and not run meanwhile. Then
// looking and yielding, then sleeping.
inline constexpr int64_t kSpinNs = 5'000;
inline constexpr int64_t kYieldNs = 2'000'000;
inline constexpr int64_t kSleepNs = 50'000;

// One end of a ring: the writer's if `sends`.
struct End {
  uint64_t* words;
  const uint64_t* lost;  // not 0: the peer takes no part any more
  uint64_t capacity;
  uint64_t position;  // the head of a writer, the tail of a reader
  uint64_t seen;      // the other end's position when last looked at
  uint64_t messages;
  int64_t sends;
  uint64_t blocked;  // the last pass in which a message of this end was left unfinished
};

struct Part {
  End* end;
  char* address;
  int64_t size;
  int64_t code;
  int64_t moved;  // -1: its header has not been moved either
};

struct Lane {
  const uint64_t* lost;  // not 0: this rank takes no part any more
  uint64_t pass;
};

inline uint64_t acquire(const uint64_t* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
inline void release(uint64_t* word, uint64_t value) {
  __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

inline uint64_t* header(const End& end) {
  return end.words + kData + end.position % end.capacity / 8;
}

// One contiguous copy of at most `size` bytes between the part and the ring, around whose end the
// next one goes on. Both sides pad to a line at the end of a message.
inline void copy(End& end, Part& part, uint64_t size) {
  const uint64_t at = end.position % end.capacity;
  const uint64_t run = std::min(size, end.capacity - at);
  char* ring = reinterpret_cast<char*>(end.words + kData) + at;
  char* mine = part.address + part.moved;
  if (end.sends) {
    std::memcpy(ring, mine, run);
  } else {
    std::memcpy(mine, ring, run);
  }
  part.moved += static_cast<int64_t>(run);
  end.position += (run + kLine - 1) / kLine * kLine;
}

inline bool push(End& end, Part& part) {
  do {
    const auto left = static_cast<uint64_t>(part.size - std::max<int64_t>(part.moved, 0));
    uint64_t room = end.capacity - (end.position - end.seen);
    if (room < left + kLine) {
      end.seen = acquire(end.words + kTail);
      room = end.capacity - (end.position - end.seen);
      if (room == 0) return false;
    }
    if (part.moved < 0) {
      uint64_t* line = header(end);
      line[0] = end.messages++;
      line[1] = static_cast<uint64_t>(part.size);
      line[2] = static_cast<uint64_t>(part.code);
      end.position += kLine;
      room -= kLine;
      part.moved = 0;
    }
    const uint64_t size = std::min({room, left, kPiece});
    if (size > 0) copy(end, part, size);
    release(end.words + kHead, end.position);
  } while (part.moved < part.size);
  return true;
}

enum class Pulled { kSome, kAll, kMismatch };

inline Pulled pull(End& end, Part& part) {
  do {
    if (end.seen == end.position) {
      end.seen = acquire(end.words + kHead);
      if (end.seen == end.position) return Pulled::kSome;
    }
    if (part.moved < 0) {
      const uint64_t* line = header(end);
      if (line[0] != end.messages || line[1] != static_cast<uint64_t>(part.size) ||
          line[2] != static_cast<uint64_t>(part.code))
        return Pulled::kMismatch;
      ++end.messages;
      end.position += kLine;
      part.moved = 0;
    }
    const auto left = static_cast<uint64_t>(part.size - part.moved);
    const uint64_t size = std::min(left, end.seen - end.position);
    if (size > 0) copy(end, part, size);
    release(end.words + kTail, end.position);
  } while (part.moved < part.size);
  return Pulled::kAll;
}

// Move what can be moved now, in order within each end. Returns how many parts are unfinished, or
// -1 - i if the message that arrived is not the one that part i expects.
inline int64_t progress(Lane& lane, Part* parts, int64_t count) {
  ++lane.pass;
  int64_t unfinished = 0;
  for (int64_t i = 0; i < count; ++i) {
    Part& part = parts[i];
    if (part.moved == part.size) continue;
    End& end = *part.end;
    bool finished = false;
    if (end.blocked != lane.pass) {
      if (end.sends) {
        finished = push(end, part);
      } else {
        const Pulled pulled = pull(end, part);
        if (pulled == Pulled::kMismatch) return -1 - i;
        finished = pulled == Pulled::kAll;
      }
    }
    if (!finished) {
      end.blocked = lane.pass;
      ++unfinished;
    }
  }
  return unfinished;
}

// Whether parts [first, stop) need no more waiting: finished, or with a peer that is lost.
inline bool settled(const Part* parts, int64_t first, int64_t stop) {
  bool finished = true;
  for (int64_t i = first; i < stop; ++i) {
    if (parts[i].moved == parts[i].size) continue;
    if (acquire(parts[i].end->lost)) return true;
    finished = false;
  }
  return finished;
}

inline int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1'000'000'000LL + now.tv_nsec;
}

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}
}  // namespace tknp::mailbox
