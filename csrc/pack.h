// Weights in the one layout that every instruction set multiplies. Owns: the layout; must not know how it is used.
//
// [tile of 64 columns][k]: f32 and bf16: for each k (or pair of adjacent k) four lines of 16 dwords, a dword a column.
// int8 and int4: for each weight group 64 half-precision scales, then for each 32 k eight (int8) or four (int4) steps
// of four lines; a dword holds 4 weights of one column, stored + 128 (int8) or two nibbles + 8 (int4: the low nibble is
// k = 4 step + byte, the high one 16 later). Columns and k that do not exist are zeros (scale 0).
#pragma once
#include "ops.h"

namespace tokenmill {

int64_t packed_bytes(Format format, int64_t n, int64_t k, int group);

// weight [n, k] with `stride` elements between rows -> packed f32 or bf16 (converting if the types differ).
void pack_dense(const void* weight, Type type, int64_t n, int64_t k, int64_t stride, Format format, void* out);

// q [n, k] int8 (int4: -8..7), scales [n, k / group] half precision -> packed int8 or int4.
void pack_quantised(const int8_t* q, const uint16_t* scales, int64_t n, int64_t k, int group, Format format, void* out);

// Round to nearest, scale = largest magnitude / 127 (int4: the magnitude's owner becomes -8) -> q and scales as above.
void quantise(const void* weight, Type type, int64_t n, int64_t k, int64_t stride, Format format, int group, int8_t* q,
              uint16_t* scales);

// Rows `ids` of the packed matrix, dequantised -> out [count, k].
void unpack_rows(const void* packed, Format format, int64_t n, int64_t k, int group, const int64_t* ids, int64_t count,
                 Type type, void* out);

}  // namespace tokenmill
