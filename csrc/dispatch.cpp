// Chooses the instruction set once, at run time. Owns: what the machine can do and which table of kernels is used.
#include <atomic>

#include "ops.h"

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace tokenmill {
namespace {

#if defined(__aarch64__)
#if defined(__APPLE__)
bool says(const char* name) {
  int value = 0;
  size_t size = sizeof(value);
  return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value != 0;
}
bool has_dot() { return says("hw.optional.arm.FEAT_DotProd"); }
bool has_bf16() { return says("hw.optional.arm.FEAT_BF16"); }
#elif defined(__linux__)
bool has_dot() { return getauxval(AT_HWCAP) >> 20 & 1; }     // HWCAP_ASIMDDP
bool has_bf16() { return getauxval(AT_HWCAP2) >> 14 & 1; }   // HWCAP2_BF16
#else
bool has_dot() { return false; }
bool has_bf16() { return false; }
#endif
#endif

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
#elif defined(__aarch64__)
  return !has_dot() ? Isa::neon : has_bf16() ? Isa::neon_bf16 : Isa::neon_dot;
#else
  return Isa::scalar;
#endif
}

std::atomic<int> chosen{-1};

}  // namespace

alignas(64) const unsigned char kZeroRow[kMaxHeadDim * 4] = {};

const char* isa_name(Isa isa) {
#if defined(__aarch64__)
  constexpr const char* kNames[] = {"scalar", "neon", "neon_dot", "neon_bf16"};
#else
  constexpr const char* kNames[] = {"scalar", "avx2", "avx512", "avx512_vnni", "avx512_bf16"};
#endif
  return kNames[static_cast<int>(isa)];
}

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
#elif defined(__aarch64__)
    case Isa::neon:
      return table_neon;
    case Isa::neon_dot:
      return table_neon_dot;
    case Isa::neon_bf16:
      return table_neon_bf16;
#endif
    default:
      return table_scalar;
  }
}

}  // namespace tokenmill
