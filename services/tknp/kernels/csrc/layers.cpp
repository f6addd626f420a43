// C interface: whole layers of a decode step.
#include "interface.h"
#include "together.h"

using namespace tknp;

extern "C" int tknp_layers(Run* run, int threads) {
  return guarded([&] { run_layers(*run, threads); });
}

// Runs of several streams; `states` [count] says how each stands afterwards.
extern "C" int tknp_layers_together(Run* const* runs, State* states, int64_t count,
                                    const uint64_t* called, int once, int threads) {
  return guarded([&] { run_together(runs, states, count, called, once != 0, threads); });
}
