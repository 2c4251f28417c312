// Writing a column's codes into the planes of a packed tile (coding.h). Shared by the two packers.
#pragma once
#include "coding.h"

namespace tokenmill {

TM_INLINE uint32_t read32(const uint8_t* p) {
  uint32_t x;
  std::memcpy(&x, p, 4);
  return x;
}
TM_INLINE void write32(uint8_t* p, uint32_t x) { std::memcpy(p, &x, 4); }

// quads: eight dwords of four codes each, codes of 32 adjacent k.
TM_INLINE void write_quads(const Coding& c, const uint32_t* quads, int64_t column, uint8_t* planes) {
  uint8_t* at = planes + column * 4;
  if (c.whole) {
    for (int j = 0; j < 8; ++j) write32(at + j * kColumnLine, quads[j]);
    return;
  }
  if (c.nibble) {
    for (int j = 0; j < 4; ++j) {
      write32(at + nibble_step(c, j) * kColumnLine, (quads[j] & 0x0f0f0f0fu) | (quads[j + 4] & 0x0f0f0f0fu) << 4);
    }
  }
  if (c.pair) {
    const int place = pair_bit(c);
    for (int h = 0; h < 2; ++h) {
      const uint32_t fields[4] = {quads[2 * h], quads[2 * h + 4], quads[2 * h + 1], quads[2 * h + 5]};
      uint32_t all = 0;
      for (int i = 0; i < 4; ++i) all |= (fields[i] >> place & 0x03030303u) << 2 * i;
      write32(at + pair_step(c, h) * kColumnLine, all);
    }
  }
  if (c.single) {
    uint32_t all = 0;
    for (int j = 0; j < 8; ++j) all |= (quads[j] >> single_bit(c) & 0x01010101u) << j;
    write32(at, all);
  }
}

TM_INLINE void write_codes(const Coding& c, const uint8_t* codes, int64_t column, uint8_t* planes) {
  uint32_t quads[8];
  std::memcpy(quads, codes, sizeof(quads));
  write_quads(c, quads, column, planes);
}

}  // namespace tokenmill
