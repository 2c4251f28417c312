// The kernels compiled for AArch64 with dot products of bytes (Armv8.2).
#include <vector>

#include "coding.h"
#include "ops.h"
#include "sparse.h"
#include "threads.h"
#include "numbers.h"

#if defined(__aarch64__)
#include <arm_neon.h>
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("dotprod"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("arch=armv8.2-a+dotprod")
#endif
#define TM_NS neon_dot
#define TM_DOT
#include "simd_neon.h"
#include "kernels.inl"
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
