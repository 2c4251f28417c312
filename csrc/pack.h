// Weights in the one layout that every instruction set multiplies. Owns: the layout; must not know how it is used.
//
// [tile of 64 columns][k]: f32, bf16 and f16: for each k (or pair of adjacent k) four lines of 64 bytes, 16 columns each.
// The others: see coding.h. Columns and k that do not exist are zeros (scale 0).
#pragma once
#include "ops.h"

namespace tokenmill {

int64_t packed_bytes(Format format, int64_t n, int64_t k, int group);

// weight [n, k] with `stride` elements between rows -> packed f32 or bf16 (converting if the types differ), or f16, whose
// numbers must come as such (`type` says nothing then).
void pack_dense(const void* weight, Type type, int64_t n, int64_t k, int64_t stride, Format format, void* out);

// q [n, k] int8 (int4: -8..7, int2 and int3 alike; those with zeros: from 0 on, but int8_zero: -128..127), scales (and zeros) [n, k / group] half precision -> packed.
void pack_quantised(const int8_t* q, const uint16_t* scales, const uint16_t* zeros, int64_t n, int64_t k, int group,
                    Format format, void* out);

// Codes [n, k] below 16 of table entries (each 128 more than it is), with scales (table: half precision per group;
// nvfp4, whose table is its own: e4m3 per 16 columns) and a factor per row. k: whole groups of 32.
struct Table16 {
  const uint8_t* codes;
  const void* scales;
  const float* factors;
  const uint8_t* table;
};
void pack_table(const Table16& from, int64_t n, int64_t k, int group, Format format, void* out);

// data [n, k] e4m3 and scales [n, k / group (group 0: 1)] -> packed fp8.
void pack_eights(const uint8_t* data, const float* scales, int64_t n, int64_t k, int group, void* out);

// Rows of GGUF blocks, row_bytes each -> packed: Q4_0 (int4) and Q8_0 (int8) in groups of 32, others in their own format.
// The numbers are the file's, bit for bit.
bool has_blocks(Format format);
void pack_blocks(const uint8_t* raw, int64_t row_bytes, int64_t n, int64_t k, Format format, void* out);

// Round to nearest, scale = largest magnitude / 127 (int4: the magnitude's owner becomes -8) -> q and scales as above.
void quantise(const void* weight, Type type, int64_t n, int64_t k, int64_t stride, Format format, int group, int8_t* q,
              uint16_t* scales);

// Rows `ids` of a packed matrix of `count` parts, dequantised -> out [wanted, k].
void unpack_rows(const Part* parts, int64_t count, int64_t k, const int64_t* ids, int64_t wanted, Type type, void* out);

}  // namespace tokenmill
