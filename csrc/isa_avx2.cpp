// The kernels compiled for AVX2 and FMA.
#include <vector>

#include "coding.h"
#include "ops.h"
#include "sparse.h"
#include "threads.h"
#include "numbers.h"

#if defined(__x86_64__)
#include <immintrin.h>
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#define TM_NS avx2

#include "simd_avx2.h"
#include "kernels.inl"
#pragma GCC pop_options
#endif
