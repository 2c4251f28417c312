// Sixteen lanes in the compilers' own vector types: the fallback for every machine (SSE2 on x86-64, NEON on ARM), and
// the yardstick of the other two files. Each simd_*.h defines the same names: F (16 floats), I (16 int32), Line (64
// bytes of weights).
#pragma once
#include <cmath>

#include "numbers.h"

namespace tokenmill {
namespace TM_NS {

constexpr int kRows = 2;  // register tile of matmuls: rows x vectors of 16 columns
constexpr int kVectors = 1;
constexpr int kQuantRows = 2;
constexpr int quant_vectors(int) { return 1; }
constexpr bool kPairs = false;  // a dot product of bf16 pairs in one instruction

typedef float F __attribute__((vector_size(64)));
typedef int32_t I __attribute__((vector_size(64)));
typedef uint32_t U __attribute__((vector_size(64)));
typedef uint16_t Half __attribute__((vector_size(32)));
typedef int8_t Bytes16 __attribute__((vector_size(16)));
using Line = U;

template <class To, class From>
TM_INLINE To bits(From x) {
  static_assert(sizeof(To) == sizeof(From), "only between types of one size");
  To r;
  std::memcpy(&r, &x, sizeof(To));
  return r;
}

TM_INLINE F splat(float x) { return F{} + x; }
TM_INLINE F zero() { return F{}; }
TM_INLINE F load(const float* p) { F r; std::memcpy(&r, p, 64); return r; }
TM_INLINE F load(const bf16* p) {
  Half h;
  std::memcpy(&h, p, 32);
  return bits<F>(__builtin_convertvector(h, U) << 16);
}
TM_INLINE F load_half(const uint16_t* p) {
  float v[16];
  for (int i = 0; i < 16; ++i) v[i] = half_to_float(p[i]);
  return load(v);
}
TM_INLINE void store(float* p, F x) { std::memcpy(p, &x, 64); }
TM_INLINE void store(bf16* p, F x) {
  const U wide = bits<U>(x);
  const U up = (wide + 0x7fff + (wide >> 16 & 1)) >> 16;
  const U result = (wide & 0x7fffffff) > 0x7f800000 ? (wide >> 16 | 0x40) : up;
  const Half h = __builtin_convertvector(result, Half);
  std::memcpy(p, &h, 32);
}
TM_INLINE F add(F a, F b) { return a + b; }
TM_INLINE F sub(F a, F b) { return a - b; }
TM_INLINE F mul(F a, F b) { return a * b; }
TM_INLINE F div(F a, F b) { return a / b; }
TM_INLINE F fma(F a, F b, F c) { return a * b + c; }
TM_INLINE F max(F a, F b) { return a > b ? a : b; }
TM_INLINE F min(F a, F b) { return a < b ? a : b; }
TM_INLINE F abs(F a) { return bits<F>(bits<U>(a) & 0x7fffffff); }
TM_INLINE F copy_sign(F size, F sign) {
  return bits<F>((bits<U>(size) & 0x7fffffff) | (bits<U>(sign) & 0x80000000u));
}
// To nearest even for |a| < 2^22, which is all that exp and int8 need.
TM_INLINE F round(F a) { return (a + 12582912.0f) - 12582912.0f; }
// a where x >= limit, 0 elsewhere
TM_INLINE F zero_below(F a, F x, float limit) { return x < limit ? F{} : a; }
TM_INLINE F power_of_two(F n) { return bits<F>((__builtin_convertvector(n, I) + 127) << 23); }
// The first n lanes of a, the others of b.
TM_INLINE F blend_first(F a, F b, int n) {
  const I lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return lane < n ? a : b;
}

TM_INLINE I isplat(int32_t x) { return I{} + x; }
TM_INLINE F to_f(I a) { return __builtin_convertvector(a, F); }
TM_INLINE void store_int8(int8_t* p, F a) {
  const Bytes16 b = __builtin_convertvector(__builtin_convertvector(a, I), Bytes16);
  std::memcpy(p, &b, 16);
}
TM_INLINE int32_t sum_int8(const int8_t* p) {  // sixteen
  int32_t s = 0;
  for (int i = 0; i < 16; ++i) s += p[i];
  return s;
}
TM_INLINE F load_int8(const int8_t* p) {
  Bytes16 b;
  std::memcpy(&b, p, 16);
  return __builtin_convertvector(b, F);
}
TM_INLINE F load_low_nibbles(const uint8_t* p) {
  F r;
  for (int i = 0; i < 16; ++i) r[i] = static_cast<float>(p[i] & 15);
  return r;
}
TM_INLINE F load_high_nibbles(const uint8_t* p) {
  F r;
  for (int i = 0; i < 16; ++i) r[i] = static_cast<float>(p[i] >> 4);
  return r;
}
TM_INLINE F load_e4m3(const uint8_t* p) {
  F r;
  for (int i = 0; i < 16; ++i) r[i] = e4m3_to_float(p[i]);
  return r;
}
// Byte kByte of each dword. As a float of their bits they are 2^-120 of the values.
template <int kByte>
TM_INLINE F e4m3_of(Line a) {
  const I top = bits<I>(a << (24 - 8 * kByte));
  return bits<F>(bits<U>(top >> 4) & 0x87f00000u) * 1.329227995784916e36f;
}
TM_INLINE F load_power(const uint8_t* p) {  // 2^(byte - 128); 0 and 1 are denormal
  U r;
  for (int i = 0; i < 16; ++i) r[i] = p[i] < 2 ? 0x00200000u << p[i] : (p[i] - 1u) << 23;
  return bits<F>(r);
}

TM_INLINE Line load_line(const void* p) { Line r; std::memcpy(&r, p, 64); return r; }
TM_INLINE void store_line(void* p, Line a) { std::memcpy(p, &a, 64); }
TM_INLINE Line as_line(F a) { return bits<Line>(a); }
TM_INLINE F as_f(Line a) { return bits<F>(a); }
TM_INLINE Line low_nibbles(Line a) { return a & 0x0f0f0f0fu; }
TM_INLINE Line high_nibbles(Line a) { return a >> 4 & 0x0f0f0f0fu; }
// Bits of bytes moved down by kBy (up where that is negative); what crosses a byte's border is for `masked` to remove.
template <int kBy>
TM_INLINE Line shifted(Line a) {
  if constexpr (kBy >= 0) return a >> kBy;
  else return a << -kBy;
}
TM_INLINE Line masked(Line a, uint8_t mask) { return a & mask * 0x01010101u; }
TM_INLINE Line either(Line a, Line b) { return a | b; }
TM_INLINE Line looked_up(Line codes, const uint8_t* table) {
  uint8_t b[64];
  std::memcpy(b, &codes, 64);
  for (uint8_t& code : b) code = table[code];
  std::memcpy(&codes, b, 64);
  return codes;
}
// 16 columns x 4 weights against 4 activations. int8 weights are stored as weight + 128, int4 as weight + 8.
// A sum of bytes that starts at kStart8 times the activations' sum ends at the product of the signed weights.
constexpr int32_t kStart8 = -128;
using Quad = const int8_t*;
TM_INLINE Quad splat_quad(const int8_t* x) { return x; }
TM_INLINE I dot4(I acc, Line w, Quad x) {
  for (int k = 0; k < 4; ++k) acc += bits<I>(w >> (8 * k) & 255) * static_cast<int32_t>(x[k]);
  return acc;
}
TM_INLINE I dot8bit(I acc, Line w, Quad x) { return dot4(acc, w, x); }
TM_INLINE I dot4bit(I acc, Line w, Quad x) { return dot4(acc, w, x); }

TM_INLINE Line splat_pair(const void* x) {
  uint32_t pair;
  std::memcpy(&pair, x, 4);
  return Line{} + pair;
}
TM_INLINE F even_half(Line a) { return bits<F>(a << 16); }  // the first bf16 of each pair
TM_INLINE F odd_half(Line a) { return bits<F>(a & 0xffff0000u); }
TM_INLINE void prefetch(const void* p) { __builtin_prefetch(p); }
TM_INLINE void prefetch_read(const void* p) { __builtin_prefetch(p); }
TM_INLINE void hold(I&) {}
// 16 rows of 16 dwords become 16 columns: out[c] lane r = rows[r][c].
TM_INLINE void transpose(const Line* rows, Line* out) {
  uint32_t from[256], to[256];
  std::memcpy(from, rows, sizeof(from));
  for (int r = 0; r < 16; ++r) {
    for (int c = 0; c < 16; ++c) to[16 * c + r] = from[16 * r + c];
  }
  std::memcpy(out, to, sizeof(to));
}

}  // namespace TM_NS
}  // namespace tokenmill
