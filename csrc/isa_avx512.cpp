// The kernels compiled for AVX-512 (F, BW, DQ, VL).
#include <vector>

#include "coding.h"
#include "ops.h"
#include "sparse.h"
#include "threads.h"
#include "numbers.h"

#if defined(__x86_64__)
#include <immintrin.h>
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")
#define TM_NS avx512

#include "simd_avx512.h"
#include "kernels.inl"
#pragma GCC pop_options
#endif
