// Matrices of 16 bit numbers of which many are zero: the tiles of pack.h without their zeros. Owns: the layout, packing,
// reading a row.
//
// First where each tile begins, in bytes from the matrix's begin, and where the last one ends: int64 [tiles + 1]. A tile
// is steps of two k: four masks of 32 bits, one for each line of 64 bytes as bf16 or f16 has it, the lowest bit for its
// first number; then the numbers of these lines that are not zero. Behind the last tile lie kLineBytes that nobody means:
// whole lines are read.
#pragma once
#include "coding.h"

namespace tokenmill {

constexpr int64_t kLineBytes = 64;
constexpr bool sparse(Format format) { return format == Format::bf16_sparse || format == Format::f16_sparse; }

TM_INLINE int64_t sparse_begin(const void* weight, int64_t tile) {
  int64_t at;
  std::memcpy(&at, static_cast<const uint8_t*>(weight) + tile * 8, 8);
  return at;
}

// weight [n, k] (16 bits each, `stride` between rows) without its zeros -> out, unless that is null; returns the bytes.
int64_t pack_sparse(const uint16_t* weight, int64_t n, int64_t k, int64_t stride, Format format, void* out);

// One row of a tile -> out [k].
void read_sparse(const uint8_t* tile, Format format, int64_t column, int64_t k, float* out);

}  // namespace tokenmill
