// Chooses the instruction set once, at run time. Owns: what the machine can do and which table of kernels is used.
#include <atomic>

#include "ops.h"

namespace tokenmill {
namespace {

Isa detect() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("f16c")) {
    return Isa::scalar;
  }
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (!avx512) return Isa::avx2;
  if (!__builtin_cpu_supports("avx512vnni")) return Isa::avx512;
  return __builtin_cpu_supports("avx512bf16") ? Isa::avx512_bf16 : Isa::avx512_vnni;
#else
  return Isa::scalar;
#endif
}

std::atomic<int> chosen{-1};

}  // namespace

alignas(64) const unsigned char kZeroRow[kMaxHeadDim * 4] = {};

Isa best_isa() {
  static const Isa best = detect();
  return best;
}

Isa current_isa() {
  const int isa = chosen.load(std::memory_order_relaxed);
  return isa < 0 ? best_isa() : static_cast<Isa>(isa);
}

bool set_isa(Isa isa) {
  if (isa < Isa::scalar || isa > best_isa()) return false;
  chosen.store(static_cast<int>(isa), std::memory_order_relaxed);
  return true;
}

const Table& table() {
  switch (current_isa()) {
#if defined(__x86_64__)
    case Isa::avx2:
      return table_avx2;
    case Isa::avx512:
      return table_avx512;
    case Isa::avx512_vnni:
      return table_avx512_vnni;
    case Isa::avx512_bf16:
      return table_avx512_bf16;
#endif
    default:
      return table_scalar;
  }
}

}  // namespace tokenmill
