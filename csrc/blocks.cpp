// GGUF blocks -> packed tiles, without decoding: codes move from the file's order to ours in words of four.
// Owns: the bit layout of each block type. Every function here reads exactly one block.
#include "pack.h"
#include "planes.h"
#include "threads.h"

namespace tokenmill {
namespace {

constexpr uint32_t kNibbles = 0x0f0f0f0fu, kPairs = 0x03030303u, kBits = 0x01010101u;

uint16_t read16(const uint8_t* p) {
  uint16_t x;
  std::memcpy(&x, p, 2);
  return x;
}

// Four adjacent bits -> the lowest bit of each byte.
TM_INLINE uint32_t spread(uint32_t bits) { return ((bits & 15) * 0x00204081u) & kBits; }

// 16 bytes of nibbles -> 32 codes: low ones first.
TM_INLINE void nibbles(const uint8_t* p, uint32_t* quads) {
  for (int j = 0; j < 4; ++j) {
    const uint32_t x = read32(p + 4 * j);
    quads[j] = x & kNibbles;
    quads[j + 4] = x >> 4 & kNibbles;
  }
}

template <Format kFormat>
struct Column {
  static constexpr Coding kind = coding(kFormat);
  uint8_t* head;
  int64_t column;

  TM_INLINE void half(int which, const uint8_t* from) const {
    std::memcpy(head + (which * kTileColumns + column) * 2, from, 2);
  }
  TM_INLINE uint8_t* part(int p) const { return head + unit_head(kind) + p * part_bytes(kind); }
  TM_INLINE void codes(int p, const uint32_t* quads) const {
    write_quads(kind, quads, column, part(p) + part_scales(kind));
  }
  TM_INLINE void byte(int p, int64_t which, int value) const {
    part(p)[which * kTileColumns + column] = static_cast<uint8_t>(value);
  }
};

// Eight scales and eight minima of six bits each in twelve bytes.
TM_INLINE int six_bits(const uint8_t* p, int i) {
  return i < 4 ? p[i] & 63 : (p[i + 4] & 15) | (p[i - 4] >> 2 & 48);
}
TM_INLINE int six_bits_minimum(const uint8_t* p, int i) {
  return i < 4 ? p[i + 4] & 63 : (p[i + 4] >> 4) | (p[i] >> 2 & 48);
}

// Blocks of 32 numbers.
template <Format kFormat>
TM_INLINE void small_block(const uint8_t* raw, const Column<kFormat>& to) {
  uint32_t quads[8];
  switch (kFormat) {
    case Format::int4:
    case Format::iq4_nl:
      to.half(0, raw);
      nibbles(raw + 2, quads);
      return to.codes(0, quads);
    case Format::q4_1:
      to.half(0, raw);
      to.half(1, raw + 2);
      nibbles(raw + 4, quads);
      return to.codes(0, quads);
    case Format::q5_0:
    case Format::q5_1: {
      const int at = kFormat == Format::q5_0 ? 2 : 4;
      to.half(0, raw);
      if (kFormat == Format::q5_1) to.half(1, raw + 2);
      nibbles(raw + at + 4, quads);
      const uint32_t high = read32(raw + at);
      for (int j = 0; j < 8; ++j) quads[j] |= spread(high >> 4 * j) << 4;
      return to.codes(0, quads);
    }
    case Format::int8:
      to.half(0, raw);
      for (int j = 0; j < 8; ++j) quads[j] = read32(raw + 2 + 4 * j) ^ 0x80808080u;
      return to.codes(0, quads);
    case Format::mxfp4:
      to.head[to.column] = raw[0];
      nibbles(raw + 1, quads);
      return to.codes(0, quads);
    default:
      return;
  }
}

// Blocks of 256 numbers.
template <Format kFormat>
TM_INLINE void large_block(const uint8_t* raw, const Column<kFormat>& to) {
  uint32_t quads[8];
  switch (kFormat) {
    case Format::q2_k:
      to.half(0, raw + 80);
      to.half(1, raw + 82);
      for (int p = 0; p < 8; ++p) {
        for (int j = 0; j < 8; ++j) quads[j] = read32(raw + 16 + p / 4 * 32 + 4 * j) >> p % 4 * 2 & kPairs;
        to.byte(p, 0, raw[2 * p]);
        to.byte(p, 1, raw[2 * p + 1]);
        to.codes(p, quads);
      }
      return;
    case Format::q3_k:
      to.half(0, raw + 108);
      for (int p = 0; p < 8; ++p) {
        for (int j = 0; j < 8; ++j) {
          quads[j] = read32(raw + 32 + p / 4 * 32 + 4 * j) >> p % 4 * 2 & kPairs;
          quads[j] |= (read32(raw + 4 * j) >> p & kBits) << 2;
        }
        for (int i = 2 * p; i < 2 * p + 2; ++i) {
          const int low = raw[96 + i % 8] >> (i < 8 ? 0 : 4) & 15, high = raw[104 + i % 4] >> i / 4 * 2 & 3;
          to.byte(p, i % 2, (low | high << 4) - 32);
        }
        to.codes(p, quads);
      }
      return;
    case Format::q4_k:
    case Format::q5_k: {
      const uint8_t* low = raw + (kFormat == Format::q4_k ? 16 : 48);
      to.half(0, raw);
      to.half(1, raw + 2);
      for (int p = 0; p < 8; ++p) {
        for (int j = 0; j < 8; ++j) {
          quads[j] = read32(low + p / 2 * 32 + 4 * j) >> p % 2 * 4 & kNibbles;
          if (kFormat == Format::q5_k) quads[j] |= (read32(raw + 16 + 4 * j) >> p & kBits) << 4;
        }
        to.byte(p, 0, six_bits(raw + 4, p));
        to.byte(p, 1, six_bits_minimum(raw + 4, p));
        to.codes(p, quads);
      }
      return;
    }
    case Format::q6_k:
      to.half(0, raw + 208);
      for (int p = 0; p < 8; ++p) {
        const uint8_t* low = raw + p / 4 * 64 + p % 2 * 32;
        const uint8_t* high = raw + 128 + p / 4 * 32;
        for (int j = 0; j < 8; ++j) {
          quads[j] = read32(low + 4 * j) >> p % 4 / 2 * 4 & kNibbles;
          quads[j] |= (read32(high + 4 * j) >> p % 4 * 2 & kPairs) << 4;
        }
        to.byte(p, 0, raw[192 + 2 * p]);
        to.byte(p, 1, raw[192 + 2 * p + 1]);
        to.codes(p, quads);
      }
      return;
    case Format::iq4_xs:
      to.half(0, raw);
      for (int p = 0; p < 8; ++p) {
        nibbles(raw + 8 + 16 * p, quads);
        const int low = raw[4 + p / 2] >> p % 2 * 4 & 15, high = read16(raw + 2) >> 2 * p & 3;
        to.byte(p, 0, (low | high << 4) - 32);
        to.codes(p, quads);
      }
      return;
    default:
      return;
  }
}

constexpr int64_t block_bytes(Format format) {
  switch (format) {
    case Format::int8: return 34;
    case Format::int4:
    case Format::iq4_nl: return 18;
    case Format::q4_1: return 20;
    case Format::q5_0: return 22;
    case Format::q5_1: return 24;
    case Format::q2_k: return 84;
    case Format::q3_k: return 110;
    case Format::q4_k: return 144;
    case Format::q5_k: return 176;
    case Format::q6_k: return 210;
    case Format::iq4_xs: return 136;
    case Format::mxfp4: return 17;
    default: return 0;
  }
}

template <Format kFormat>
void pack_typed(const uint8_t* raw, int64_t row_bytes, int64_t n, int64_t k, uint8_t* out) {
  constexpr Coding kind = coding(kFormat);
  constexpr int64_t kBytes = block_bytes(kFormat);
  const int64_t units = k / unit_columns(kind, kGroup), bytes = unit_bytes(kind, kGroup);
  auto task = [&](int64_t tile) {
    uint8_t* to = out + tile * units * bytes;
    const int64_t first = tile * kTileColumns, columns = at_most(kTileColumns, n - first);
    if (columns < kTileColumns) std::memset(to, 0, static_cast<size_t>(units * bytes));
    for (int64_t unit = 0; unit < units; ++unit, to += bytes) {
      for (int64_t c = 0; c < columns; ++c) {
        const uint8_t* from = raw + (first + c) * row_bytes + unit * kBytes;
        __builtin_prefetch(from + 4 * kBytes);
        if constexpr (scales_of_scales(kind)) large_block<kFormat>(from, {to, c});
        else small_block<kFormat>(from, {to, c});
      }
    }
  };
  parallel_for(divide_up(n, kTileColumns), task);
}

}  // namespace

bool has_blocks(Format format) { return block_bytes(format) > 0; }

void pack_blocks(const uint8_t* raw, int64_t row_bytes, int64_t n, int64_t k, Format format, void* out) {
  auto* to = static_cast<uint8_t*>(out);
  switch (format) {
    case Format::int8: return pack_typed<Format::int8>(raw, row_bytes, n, k, to);
    case Format::int4: return pack_typed<Format::int4>(raw, row_bytes, n, k, to);
    case Format::q4_1: return pack_typed<Format::q4_1>(raw, row_bytes, n, k, to);
    case Format::q5_0: return pack_typed<Format::q5_0>(raw, row_bytes, n, k, to);
    case Format::q5_1: return pack_typed<Format::q5_1>(raw, row_bytes, n, k, to);
    case Format::q2_k: return pack_typed<Format::q2_k>(raw, row_bytes, n, k, to);
    case Format::q3_k: return pack_typed<Format::q3_k>(raw, row_bytes, n, k, to);
    case Format::q4_k: return pack_typed<Format::q4_k>(raw, row_bytes, n, k, to);
    case Format::q5_k: return pack_typed<Format::q5_k>(raw, row_bytes, n, k, to);
    case Format::q6_k: return pack_typed<Format::q6_k>(raw, row_bytes, n, k, to);
    case Format::iq4_nl: return pack_typed<Format::iq4_nl>(raw, row_bytes, n, k, to);
    case Format::iq4_xs: return pack_typed<Format::iq4_xs>(raw, row_bytes, n, k, to);
    case Format::mxfp4: return pack_typed<Format::mxfp4>(raw, row_bytes, n, k, to);
    default: return;
  }
}

}  // namespace tokenmill
