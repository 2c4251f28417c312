// The kernels compiled for AVX-512 with VNNI and BF16, and AMX.
#include <vector>

#include "coding.h"
#include "ops.h"
#include "sparse.h"
#include "threads.h"
#include "numbers.h"

#if defined(__x86_64__)
#include <immintrin.h>
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16,amx-tile,amx-bf16")
#define TM_NS avx512_amx
#define TM_VNNI
#define TM_BF16
#define TM_AMX
#include "simd_avx512.h"
#include "kernels.inl"
#pragma GCC pop_options
#endif
