// What every function of the C interface shares. ctypes loads them (library.py). Arguments are
// checked in Python; pointers are to contiguous tensors, which the caller keeps alive. No state
// outlives a call but each calling thread's scratch block.
#pragma once

#include <new>

namespace tknp {
enum Status : int { kDone = 0, kOutOfMemory = 1, kUnsupported = 2 };

template <class Body>
int guarded(Body&& body) {
  try {
    body();
    return kDone;
  } catch (const std::bad_alloc&) {
    return kOutOfMemory;
  }
}
}  // namespace tknp
