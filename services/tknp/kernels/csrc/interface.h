// What every function of the C interface shares. ctypes loads them (library.py). Arguments are
// checked in Python; pointers are to contiguous tensors, which the caller keeps alive. No state
// outlives a call but each calling thread's scratch block, and how much more it last wanted in vain.
#pragma once

#include "threads.h"

namespace tknp {
enum Status : int { kDone = 0, kOutOfMemory = 1, kUnsupported = 2 };

// What the calling thread last got kOutOfMemory for.
inline int64_t& refused_bytes() {
  static thread_local int64_t bytes = 0;
  return bytes;
}

template <class Body>
int guarded(Body&& body) {
  try {
    body();
    return kDone;
  } catch (const NoScratch& refused) {
    refused_bytes() = static_cast<int64_t>(refused.bytes);
    return kOutOfMemory;
  } catch (const std::bad_alloc&) {
    refused_bytes() = 0;  // some small list
    return kOutOfMemory;
  }
}
}  // namespace tknp
