// The kernels compiled for any machine.
#include <vector>

#include "coding.h"
#include "ops.h"
#include "sparse.h"
#include "threads.h"
#include <cmath>
#include "numbers.h"

#define TM_NS scalar

#include "simd_scalar.h"
#include "kernels.inl"

