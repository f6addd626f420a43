// C interface: prefill attention, and a read of memory for bench/kernels.py.
#include "interface.h"
#include "prefill.h"

using namespace tknp;

extern "C" {
int tknp_prefill(const Heads* heads, const bf16* qkv, int64_t start, int64_t count,
                 const int32_t* table, bf16* k, bf16* v, bf16* out, int threads) {
  return guarded([&] { prefill(Chunk{*heads, qkv, start, count, table, k, v, out}, threads); });
}

// Reads all of `bytes` at `p` (a multiple of 64) once: what bench/kernels.py measures bandwidth with.
uint64_t tknp_read(const uint64_t* p, int64_t bytes, int threads) {
  std::atomic<uint64_t> all{0};
  parallel(threads, [&](Team team) {
    const Range lines = team.share(bytes / 64);
    uint64_t lanes[8] = {};
    for (int64_t i = lines.begin; i < lines.end; ++i) {
      prefetch(reinterpret_cast<const char*>(p + 8 * i) + kPrefetchBytes, 64);
      for (int j = 0; j < 8; ++j) lanes[j] ^= p[8 * i + j];
    }
    for (const uint64_t lane : lanes) all ^= lane;
  });
  return all;
}
}
