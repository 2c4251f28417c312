// What this machine can do. A header, because the build asks it, too: see TOKENMILL_THIS_MACHINE in CMakeLists.txt.
#pragma once

#include "ops.h"

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace tokenmill {

#if defined(__aarch64__)
#if defined(__APPLE__)
inline bool says(const char* name) {
  int value = 0;
  size_t size = sizeof(value);
  return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value != 0;
}
inline bool has_dot() { return says("hw.optional.arm.FEAT_DotProd"); }
inline bool has_bf16() { return says("hw.optional.arm.FEAT_BF16"); }
#elif defined(__linux__)
inline bool has_dot() { return getauxval(AT_HWCAP) >> 20 & 1; }    // HWCAP_ASIMDDP
inline bool has_bf16() { return getauxval(AT_HWCAP2) >> 14 & 1; }  // HWCAP2_BF16
#else
inline bool has_dot() { return false; }
inline bool has_bf16() { return false; }
#endif
#endif

#if defined(__x86_64__)
// Tile registers exist, and the system keeps them for this process. (They are asked for once.)
inline bool has_amx() {
#if defined(__linux__)
  static const bool has = [] {
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    const bool tiles = (d >> 22 & 1) && (d >> 24 & 1);  // amx-bf16, amx-tile
    return tiles && syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0;
  }();
  return has;
#else
  return false;
#endif
}
#endif

inline Isa machine_isa() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("f16c")) {
    return Isa::scalar;
  }
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (!avx512) return Isa::avx2;
  if (!__builtin_cpu_supports("avx512vnni")) return Isa::avx512;
  if (!__builtin_cpu_supports("avx512bf16")) return Isa::avx512_vnni;
  return has_amx() ? Isa::avx512_amx : Isa::avx512_bf16;
#elif defined(__aarch64__)
  return !has_dot() ? Isa::neon : has_bf16() ? Isa::neon_bf16 : Isa::neon_dot;
#else
  return Isa::scalar;
#endif
}

// Puts one instruction numbers of 16 bits where a mask says? Only then are matrices without zeros fast.
inline bool machine_expands() {
#if defined(__x86_64__)
  return machine_isa() >= Isa::avx512 && __builtin_cpu_supports("avx512vbmi2");
#else
  return false;
#endif
}

inline const char* isa_name(Isa isa) {
#if defined(__aarch64__)
  constexpr const char* kNames[] = {"scalar", "neon", "neon_dot", "neon_bf16"};
#else
  constexpr const char* kNames[] = {"scalar", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "avx512_amx"};
#endif
  return kNames[static_cast<int>(isa)];
}

}  // namespace tokenmill
