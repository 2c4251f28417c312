// The kernels compiled for AArch64.
#include <vector>

#include "coding.h"
#include "ops.h"
#include "sparse.h"
#include "threads.h"
#include "numbers.h"

#if defined(__aarch64__)
#include <arm_neon.h>
#define TM_NS neon
#include "simd_neon.h"
#include "kernels.inl"
#endif
