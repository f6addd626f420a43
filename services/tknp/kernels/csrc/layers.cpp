// C interface: whole layers of a decode step.
#include "layers.h"

#include "interface.h"

using namespace tknp;

extern "C" int tknp_layers(const Layers* layers, const Shape* shape, const Heads* heads,
                           const Step* step, float* x, bf16* qkv, bf16* out, float* lse,
                           double* seconds, int threads) {
  return guarded([&] {
    run_layers(*layers, *shape, *heads, *step, x, qkv, out, lse, seconds, threads);
  });
}
