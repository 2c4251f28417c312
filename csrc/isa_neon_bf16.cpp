// The kernels compiled for AArch64 with dot products of bytes and of bf16 (Armv8.6).
#include <vector>

#include "coding.h"
#include "ops.h"
#include "sparse.h"
#include "threads.h"
#include "numbers.h"

#if defined(__aarch64__)
#include <arm_neon.h>
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("dotprod,bf16"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("arch=armv8.6-a+dotprod+bf16")
#endif
#define TM_NS neon_bf16
#define TM_DOT
#define TM_BF16
#include "simd_neon.h"
#include "kernels.inl"
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
