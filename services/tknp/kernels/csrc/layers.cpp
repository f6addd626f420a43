// C interface: whole layers of a decode step.
#include "layers.h"

#include "interface.h"

using namespace tknp;

extern "C" int tknp_layers(Run* run, int threads) {
  return guarded([&] { run_layers(*run, threads); });
}
