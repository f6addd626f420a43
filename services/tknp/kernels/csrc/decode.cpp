// C interface: decode attention.
#include "attention.h"

#include "interface.h"
#include "layers.h"

using namespace tknp;

namespace {
// Head sizes with a compiled decode kernel.
template <class Body>
int for_head_dim(int64_t head_dim, Body&& body) {
  switch (head_dim) {
#define TKNP_CASE(DH) \
  case DH:            \
    return guarded([&] { body(std::integral_constant<int, DH>{}); });
    TKNP_CASE(16)
    TKNP_CASE(32)
    TKNP_CASE(64)
    TKNP_CASE(80)
    TKNP_CASE(96)
    TKNP_CASE(128)
    TKNP_CASE(192)
    TKNP_CASE(256)
#undef TKNP_CASE
  }
  return kUnsupported;
}
}  // namespace

namespace tknp {
void attend_stage(Team team, const Decode& decode) {
  for_head_dim(decode.heads.head_dim,
               [&](auto head_dim) { attend_rows<head_dim>(team, decode); });
}
}  // namespace tknp

extern "C" {
int tknp_supports_head_dim(int64_t head_dim) {
  return for_head_dim(head_dim, [](auto) {}) == kDone;
}

int64_t tknp_plan(Step* step, int64_t page_size) { return plan_items(*step, page_size); }

int tknp_attend(const Heads* heads, const Step* step, const bf16* qkv, bf16* k, bf16* v, bf16* out,
                float* lse, int threads) {
  return for_head_dim(heads->head_dim, [&](auto head_dim) {
    attend<head_dim>(Decode{*heads, *step, qkv, k, v, out, lse}, threads);
  });
}
}
