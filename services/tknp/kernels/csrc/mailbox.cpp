// C interface: messages between ranks of one host.
#include "mailbox.h"

using namespace tknp::mailbox;

extern "C" {
// Send what there is room for of a message that nothing waits before: the bytes sent, -1 if none, not
// even its header.
int64_t tknp_mailbox_push(End* end, char* address, int64_t size, int64_t code) {
  Part part{end, address, size, code, -1};
  push(*end, part);
  return part.moved;
}

int64_t tknp_mailbox_progress(Lane* lane, Part* parts, int64_t count) {
  return progress(*lane, parts, count);
}

// Progress until parts [first, stop) are finished, this rank or a peer that they need is lost, or
// the monotonic clock shows `until_ns`. `since_ns`: when this wait began; the longer ago, the less
// it takes of the core, which a rank that it waits for may need. Returns as `progress` does.
int64_t tknp_mailbox_wait(Lane* lane, Part* parts, int64_t count, int64_t first, int64_t stop,
                          int64_t since_ns, int64_t until_ns) {
  int looks = kLooks;
  while (true) {
    int64_t unfinished = 0;
    for (int look = 0; look < looks; ++look) {
      unfinished = progress(*lane, parts, count);
      if (unfinished <= 0 || settled(parts, first, stop)) return unfinished;
      pause();
    }
    const int64_t now = now_ns();
    if (now >= until_ns || acquire(lane->lost)) return unfinished;
    if (now - since_ns < kSpinNs) continue;
    looks = 1;
    if (now - since_ns < kYieldNs) {
      sched_yield();
    } else {
      const timespec sleep{0, kSleepNs};
      nanosleep(&sleep, nullptr);
    }
  }
}
}
