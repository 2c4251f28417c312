// Number formats and small helpers that every instruction set shares. Everything here is inlined always: a shared
// out-of-line copy could be compiled for one instruction set and called from another.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#define TM_INLINE inline __attribute__((always_inline))
#define TM_SHARED __attribute__((noinline))  // called from many places: keeps the binary and the build small

namespace tokenmill {

struct bf16 {
  uint16_t bits;
};

TM_INLINE float to_float(float x) { return x; }
TM_INLINE float to_float(bf16 x) {
  const uint32_t wide = static_cast<uint32_t>(x.bits) << 16;
  float result;
  std::memcpy(&result, &wide, 4);
  return result;
}

TM_INLINE bf16 to_bf16(float x) {
  uint32_t wide;
  std::memcpy(&wide, &x, 4);
  if ((wide & 0x7fffffff) > 0x7f800000) return {static_cast<uint16_t>(wide >> 16 | 0x40)};
  return {static_cast<uint16_t>((wide + 0x7fff + (wide >> 16 & 1)) >> 16)};
}
TM_INLINE void from_float(float x, float* out) { *out = x; }
TM_INLINE void from_float(float x, bf16* out) { *out = to_bf16(x); }

TM_INLINE float half_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
  const uint32_t rest = static_cast<uint32_t>(half & 0x7fff) << 13;
  float value;
  uint32_t bits = rest;
  std::memcpy(&value, &bits, 4);
  value *= 5.192296858534828e33f;  // 2^112 moves the exponent bias from 15 to 127; exact, subnormals too
  std::memcpy(&bits, &value, 4);
  if ((half & 0x7c00) == 0x7c00) bits |= 0x7f800000;
  bits |= sign;
  std::memcpy(&value, &bits, 4);
  return value;
}

TM_INLINE float e4m3_to_float(uint8_t x) {  // the bits of 2^-8 of it in half precision; NaN becomes 480
  return half_to_float(static_cast<uint16_t>((x & 0x80) << 8 | (x & 0x7f) << 7)) * 256.0f;
}

TM_INLINE uint16_t float_to_half(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint32_t sign = bits >> 16 & 0x8000;
  bits &= 0x7fffffff;
  if (bits >= 0x7f800000) return static_cast<uint16_t>(sign | 0x7c00 | (bits > 0x7f800000 ? 0x200 : 0));
  if (bits >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);
  if (bits < 0x38800000) {  // subnormal half: let one addition do the rounding
    float value;
    std::memcpy(&value, &bits, 4);
    value += 0.5f;
    std::memcpy(&bits, &value, 4);
    return static_cast<uint16_t>(sign | (bits - 0x3f000000));
  }
  bits += 0xfff + (bits >> 13 & 1);
  return static_cast<uint16_t>(sign | (bits - 0x38000000) >> 13);
}

TM_INLINE int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }
TM_INLINE int64_t at_least(int64_t a, int64_t b) { return a > b ? a : b; }
TM_INLINE int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace tokenmill
