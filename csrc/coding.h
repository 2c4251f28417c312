// How integer weights are stored, format by format. Owns: which bits a code has, what scales it, and where in a packed
// tile that lies; packing and the kernels both read it from here.
//
//     weight = scale * (code - less) + offset          (lookup: the code names an entry of a table first)
//
// A tile of 64 columns is a row of units along k; where the format says so behind a head: the table of 16 entries (each
// 128 more than it is, in 64 bytes), and a float a column that multiplies its sum. A unit: its half-precision scales (and
// offsets, or zero points), 64 each; then for each 32 k the scale bytes (formats with scales of scales), then planes of
// code bits. A plane is steps of 256 bytes, a dword a column, a byte a weight: byte b of a dword belongs to k = 4 quad + b
// of these 32. Planes: nibbles (4 steps; step j: quad j low, quad j + 4 high), pairs (2 steps; step h: quads 2h, 2h + 4,
// 2h + 1, 2h + 5 from the low end), single bits (1 step; quad j is bit j), or whole bytes (8 steps) alone. Steps lie in
// the order in which products need them: single bits, then each pair step before the two nibble steps that it completes.
// A processor that sees reads in ascending order fetches ahead by itself, and better than it can be told to.
#pragma once
#include "numbers.h"
#include "ops.h"

namespace tokenmill {

// bytes, nibbles: multiples of a half a 256 k; power: of two; floats: e4m3 per 16 k.
enum class Scales { half, bytes, nibbles, power, floats };

struct Coding {
  bool nibble, pair, single, whole;  // planes, low bits first
  int less;                          // what a code (or table entry) is above its value
  int lookup;                        // 0: none; kOwnTable: the one at the tile's head; else kLookup[lookup - 1]
  int columns;                       // that share a scale; 0: as the matrix says
  bool offset;                       // added to the product
  bool zero;                         // the offset is a zero point, subtracted from codes
  Scales scales;
};

constexpr int kOwnTable = 3;
constexpr uint8_t kLookup[2][16] = {
    {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241},  // IQ4_NL, less 128
    {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0},                // twice the 4 bit floats, less 12
};

constexpr Coding coding(Format format) {
  switch (format) {
    case Format::int8: return {false, false, false, true, 128, 0, 0, false, false, Scales::half};
    case Format::int4: return {true, false, false, false, 8, 0, 0, false, false, Scales::half};
    case Format::int4_zero: return {true, false, false, false, 0, 0, 0, true, true, Scales::half};
    case Format::q4_1: return {true, false, false, false, 0, 0, 32, true, false, Scales::half};
    case Format::q5_0: return {true, false, true, false, 16, 0, 32, false, false, Scales::half};
    case Format::q5_1: return {true, false, true, false, 0, 0, 32, true, false, Scales::half};
    case Format::q2_k: return {false, true, false, false, 0, 0, 16, true, false, Scales::nibbles};
    case Format::q3_k: return {false, true, true, false, 4, 0, 16, false, false, Scales::bytes};
    case Format::q4_k: return {true, false, false, false, 0, 0, 32, true, false, Scales::bytes};
    case Format::q5_k: return {true, false, true, false, 0, 0, 32, true, false, Scales::bytes};
    case Format::q6_k: return {true, true, false, false, 32, 0, 16, false, false, Scales::bytes};
    case Format::iq4_nl: return {true, false, false, false, 128, 1, 32, false, false, Scales::half};
    case Format::iq4_xs: return {true, false, false, false, 128, 1, 32, false, false, Scales::bytes};
    case Format::mxfp4: return {true, false, false, false, 12, 2, 32, false, false, Scales::power};
    case Format::int2: return {false, true, false, false, 2, 0, 0, false, false, Scales::half};
    case Format::int2_zero: return {false, true, false, false, 0, 0, 0, true, true, Scales::half};
    case Format::int3: return {false, true, true, false, 4, 0, 0, false, false, Scales::half};
    case Format::int3_zero: return {false, true, true, false, 0, 0, 0, true, true, Scales::half};
    case Format::int5_zero: return {true, false, true, false, 0, 0, 0, true, true, Scales::half};
    case Format::int6_zero: return {true, true, false, false, 0, 0, 0, true, true, Scales::half};
    case Format::int8_zero: return {false, false, false, true, 128, 0, 0, true, true, Scales::half};
    case Format::table: return {true, false, false, false, 128, kOwnTable, 0, false, false, Scales::half};
    case Format::nvfp4: return {true, false, false, false, 12, 2, 16, false, false, Scales::floats};
    default: return {};
  }
}

constexpr int64_t kColumnLine = kTileColumns * 4;  // bytes of one step
constexpr bool scales_of_scales(const Coding& c) { return c.scales == Scales::bytes || c.scales == Scales::nibbles; }
constexpr int64_t plane_steps(const Coding& c) { return c.whole ? 8 : 4 * c.nibble + 2 * c.pair + c.single; }
constexpr int64_t pair_step(const Coding& c, int h) { return c.single + (c.nibble ? 3 * h : h); }  // single bits: step 0
constexpr int64_t nibble_step(const Coding& c, int j) { return c.single + j + (c.pair ? 1 + j / 2 : 0); }
constexpr int64_t unit_columns(const Coding& c, int group) {
  if (c.scales == Scales::floats) return kGroup;
  return scales_of_scales(c) ? 256 : c.columns ? c.columns : group;
}
// Any multiple of 32 columns may share a scale, as the matrix says.
constexpr bool grouped(Format format) {
  return coding(format).columns == 0 && !scales_of_scales(coding(format)) && plane_steps(coding(format)) > 0;
}
constexpr int64_t kTableBytes = 64;  // of a tile's own table
constexpr int64_t tile_head(const Coding& c) {
  return c.lookup == kOwnTable || c.scales == Scales::floats ? kTableBytes + kTileColumns * 4 : 0;
}
constexpr int64_t unit_head(const Coding& c) {
  if (c.scales == Scales::floats) return 0;
  return c.scales == Scales::power ? kTileColumns : kTileColumns * 2 * (c.offset ? 2 : 1);
}
constexpr int64_t part_groups(const Coding& c) { return c.columns == 16 ? 2 : 1; }
constexpr int64_t part_scales(const Coding& c) {  // nibbles: scale and offset share a byte
  if (c.scales == Scales::floats) return kTileColumns * part_groups(c);
  return scales_of_scales(c) ? kTileColumns * part_groups(c) * (c.offset && c.scales == Scales::bytes ? 2 : 1) : 0;
}
constexpr int64_t part_bytes(const Coding& c) { return part_scales(c) + plane_steps(c) * kColumnLine; }
constexpr int64_t unit_bytes(const Coding& c, int group) {
  return unit_head(c) + unit_columns(c, group) / kGroup * part_bytes(c);
}
constexpr int64_t tile_units(const Coding& c, int64_t k, int group) {
  const int64_t columns = unit_columns(c, group);
  return (k + columns - 1) / columns;
}
constexpr int64_t tile_size(const Coding& c, int64_t k, int group) {
  return tile_head(c) + tile_units(c, k, group) * unit_bytes(c, group);
}
constexpr int pair_bit(const Coding& c) { return c.nibble ? 4 : 0; }  // the place of a plane's bits in the code
constexpr int single_bit(const Coding& c) { return c.nibble ? 4 : 2; }


// Numbers without scales: a tile is steps of k. f32: one k a step, a dword a column. bf16: two k, which share a column's
// dword. f16: two k, each in 16 halves side by side, which machines widen at once: of every 16 columns the first k's, then
// the second k's.
constexpr bool plain(Format format) { return format == Format::f32 || format == Format::bf16 || format == Format::f16; }
constexpr int64_t plain_steps(Format format, int64_t k) { return format == Format::f32 ? k : (k + 1) / 2; }
constexpr int64_t half_place(int64_t column, int64_t i) {  // in halves, from the tile's begin
  return (i / 2 * kTileColumns + column / 16 * 16) * 2 + i % 2 * 16 + column % 16;
}

// e4m3: a tile is units of columns that share a scale (group; 0: all of a row): 64 float32 scales, then steps of four k,
// a dword a column.
constexpr int64_t eight_head = kTileColumns * 4;
constexpr int64_t eight_columns(int64_t k, int group) { return group ? group : k; }
constexpr int64_t eight_unit(int64_t columns) { return eight_head + (columns + 3) / 4 * kColumnLine; }
constexpr int64_t eight_tile(int64_t k, int group) {
  const int64_t columns = eight_columns(k, group), whole = k / columns, rest = k % columns;
  return whole * eight_unit(columns) + (rest ? eight_unit(rest) : 0);
}

}  // namespace tokenmill
