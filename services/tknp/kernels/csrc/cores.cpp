// C interface: which cores the threads of kernels run on.
#include <sched.h>

#include <atomic>

#include "interface.h"
#include "threads.h"

using namespace tknp;

// Keeps each of `count` threads that compute for the calling one, itself included, on one of
// `cores`. Returns how many are kept.
extern "C" int tknp_keep_cores(const int32_t* cores, int count) {
  std::atomic<int> kept{0};
  parallel(count, [&](Team team) {
    cpu_set_t core;
    CPU_ZERO(&core);
    CPU_SET(cores[team.rank], &core);
    if (sched_setaffinity(0, sizeof core, &core) == 0) ++kept;
  });
  return kept;
}
