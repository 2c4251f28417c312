// Chooses the instruction set once, at run time. Owns: what was compiled, and which table of kernels is used.
#include <atomic>

#include "machine.h"

namespace tokenmill {
namespace {

struct Compiled {
  Isa isa;
  const Table* table;
};

#define TM_COMPILED(name) {Isa::name, &table_##name}
#define TM_ONLY(name) TM_COMPILED(name)
constexpr Compiled kCompiled[] = {  // from the least to the best
#if defined(TOKENMILL_ONLY)
    TM_ONLY(TOKENMILL_ONLY),
#else
    TM_COMPILED(scalar),
#if defined(__x86_64__)
    TM_COMPILED(avx2), TM_COMPILED(avx512), TM_COMPILED(avx512_vnni), TM_COMPILED(avx512_bf16),
    TM_COMPILED(avx512_amx),
#elif defined(__aarch64__)
    TM_COMPILED(neon), TM_COMPILED(neon_dot), TM_COMPILED(neon_bf16),
#endif
#endif
};

std::atomic<int> chosen{-1};

}  // namespace

alignas(64) const unsigned char kZeroRow[kMaxHeadDim * 4] = {};

std::vector<Isa> isas() {
  std::vector<Isa> usable;
  for (const Compiled& each : kCompiled) {
    if (each.isa <= machine_isa()) usable.push_back(each.isa);
  }
  return usable;
}

Isa best_isa() {
  static const Isa best = isas().back();
  return best;
}

Isa current_isa() {
  const int isa = chosen.load(std::memory_order_relaxed);
  return isa < 0 ? best_isa() : static_cast<Isa>(isa);
}

bool set_isa(Isa isa) {
  for (const Isa usable : isas()) {
    if (usable != isa) continue;
    chosen.store(static_cast<int>(isa), std::memory_order_relaxed);
    return true;
  }
  return false;
}

const Table& table() {
  const Isa isa = current_isa();
  for (const Compiled& each : kCompiled) {
    if (each.isa == isa) return *each.table;
  }
  return *kCompiled[0].table;
}

}  // namespace tokenmill
