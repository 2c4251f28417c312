// Sixteen lanes as two AVX2 registers (AVX2, FMA, F16C). Same names as simd_scalar.h.
#pragma once
#include <immintrin.h>

#include "numbers.h"

namespace tokenmill {
namespace TM_NS {

constexpr int kRows = 3;
constexpr int kVectors = 2;
constexpr int kQuantRows = 2;
constexpr int quant_vectors(int rows) { return rows == 1 ? 2 : 1; }
constexpr bool kPairs = false;

struct F {
  __m256 a, b;
};
struct I {
  __m256i a, b;
};
struct Line {
  __m256i a, b;
};

TM_INLINE F zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
TM_INLINE F splat(float x) { const __m256 v = _mm256_set1_ps(x); return {v, v}; }
TM_INLINE F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
TM_INLINE __m256 widen(__m128i half) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16)); }
TM_INLINE F load(const bf16* p) {
  const auto* q = reinterpret_cast<const __m128i*>(p);
  return {widen(_mm_loadu_si128(q)), widen(_mm_loadu_si128(q + 1))};
}
TM_INLINE F load_half(const uint16_t* p) {
  const auto* q = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(q)), _mm256_cvtph_ps(_mm_loadu_si128(q + 1))};
}
TM_INLINE void store(float* p, F x) { _mm256_storeu_ps(p, x.a); _mm256_storeu_ps(p + 8, x.b); }
TM_INLINE __m256i narrow(__m256 x) {  // rounds to bf16, result in the low half of each dword
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i up = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  const __m256i nan = _mm256_or_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(0x40));
  return _mm256_blendv_epi8(up, nan, _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
}
TM_INLINE void store(bf16* p, F x) {
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(narrow(x.a), narrow(x.b)), 0xd8);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), packed);
}
TM_INLINE F add(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
TM_INLINE F sub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
TM_INLINE F mul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
TM_INLINE F div(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
TM_INLINE F fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
TM_INLINE F max(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
TM_INLINE F min(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
TM_INLINE F abs(F x) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
TM_INLINE F copy_sign(F size, F from) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_or_ps(_mm256_andnot_ps(sign, size.a), _mm256_and_ps(sign, from.a)),
          _mm256_or_ps(_mm256_andnot_ps(sign, size.b), _mm256_and_ps(sign, from.b))};
}
TM_INLINE F round(F x) {
  return {_mm256_round_ps(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
          _mm256_round_ps(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
TM_INLINE F zero_below(F y, F x, float limit) {
  const __m256 edge = _mm256_set1_ps(limit);
  return {_mm256_andnot_ps(_mm256_cmp_ps(x.a, edge, _CMP_LT_OQ), y.a),
          _mm256_andnot_ps(_mm256_cmp_ps(x.b, edge, _CMP_LT_OQ), y.b)};
}
TM_INLINE __m256 power(__m256 n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
TM_INLINE F power_of_two(F n) { return {power(n.a), power(n.b)}; }
TM_INLINE __m256 blend8(__m256 x, __m256 y, int n) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256 mask = _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(n), lane));
  return _mm256_blendv_ps(y, x, mask);
}
TM_INLINE F blend_first(F x, F y, int n) { return {blend8(x.a, y.a, n), blend8(x.b, y.b, n - 8)}; }

TM_INLINE I isplat(int32_t x) { const __m256i v = _mm256_set1_epi32(x); return {v, v}; }
TM_INLINE F to_f(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
TM_INLINE void store_int8(int8_t* p, F x) {
  const __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b));
  const __m256i order = _mm256_permute4x64_epi64(words, 0xd8);
  const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(order), _mm256_extracti128_si256(order, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}
TM_INLINE int32_t sum_int8(const int8_t* p) {  // sixteen
  const __m128i up = _mm_xor_si128(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)), _mm_set1_epi8(-128));
  const __m128i s = _mm_sad_epu8(up, _mm_setzero_si128());
  return _mm_cvtsi128_si32(s) + _mm_extract_epi32(s, 2) - 16 * 128;
}
TM_INLINE __m128i load_bytes(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
TM_INLINE I widen_bytes(__m128i x) {  // unsigned
  return {_mm256_cvtepu8_epi32(x), _mm256_cvtepu8_epi32(_mm_srli_si128(x, 8))};
}
TM_INLINE F load_int8(const int8_t* p) {
  const __m128i x = load_bytes(p);
  return to_f(I{_mm256_cvtepi8_epi32(x), _mm256_cvtepi8_epi32(_mm_srli_si128(x, 8))});
}
TM_INLINE F load_low_nibbles(const uint8_t* p) {
  return to_f(widen_bytes(_mm_and_si128(load_bytes(p), _mm_set1_epi8(15))));
}
TM_INLINE F load_high_nibbles(const uint8_t* p) {
  return to_f(widen_bytes(_mm_and_si128(_mm_srli_epi16(load_bytes(p), 4), _mm_set1_epi8(15))));
}
TM_INLINE __m256 power_of_byte(__m256i e) {
  const __m256i plain = _mm256_slli_epi32(_mm256_sub_epi32(e, _mm256_set1_epi32(1)), 23);
  const __m256i denormal = _mm256_sllv_epi32(_mm256_set1_epi32(0x00200000), e);
  return _mm256_castsi256_ps(_mm256_blendv_epi8(plain, denormal, _mm256_cmpgt_epi32(_mm256_set1_epi32(2), e)));
}
TM_INLINE F load_e4m3(const uint8_t* p) {  // as half precision they are 2^-8 of the values
  const __m256i top = _mm256_slli_epi16(_mm256_cvtepu8_epi16(load_bytes(p)), 8);
  const __m256i h = _mm256_and_si256(_mm256_srai_epi16(top, 1), _mm256_set1_epi16(static_cast<int16_t>(0xbf80)));
  const __m256 up = _mm256_set1_ps(256.0f);
  return {_mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(h)), up),
          _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(h, 1)), up)};
}
// Byte kByte of each dword. As a float of their bits they are 2^-120 of the values.
template <int kByte>
TM_INLINE __m256 e4m3_byte(__m256i x) {
  const __m256i top = _mm256_srai_epi32(_mm256_slli_epi32(x, 24 - 8 * kByte), 4);
  const __m256i kept = _mm256_and_si256(top, _mm256_set1_epi32(static_cast<int>(0x87f00000)));
  return _mm256_mul_ps(_mm256_castsi256_ps(kept), _mm256_set1_ps(1.329227995784916e36f));
}
template <int kByte>
TM_INLINE F e4m3_of(Line x) { return {e4m3_byte<kByte>(x.a), e4m3_byte<kByte>(x.b)}; }
TM_INLINE F load_power(const uint8_t* p) {  // 2^(byte - 128); 0 and 1 are denormal
  const I e = widen_bytes(load_bytes(p));
  return {power_of_byte(e.a), power_of_byte(e.b)};
}

TM_INLINE Line load_line(const void* p) {
  const auto* q = static_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
TM_INLINE Line low_nibbles(Line x) {
  const __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(x.a, mask), _mm256_and_si256(x.b, mask)};
}
TM_INLINE Line high_nibbles(Line x) {
  return low_nibbles({_mm256_srli_epi16(x.a, 4), _mm256_srli_epi16(x.b, 4)});
}
// Bits of bytes moved down by kBy (up where that is negative); what crosses a byte's border is for `masked` to remove.
template <int kBy>
TM_INLINE Line shifted(Line x) {
  if constexpr (kBy >= 0) return {_mm256_srli_epi16(x.a, kBy), _mm256_srli_epi16(x.b, kBy)};
  else return {_mm256_slli_epi16(x.a, -kBy), _mm256_slli_epi16(x.b, -kBy)};
}
TM_INLINE Line masked(Line x, uint8_t mask) {
  const __m256i m = _mm256_set1_epi8(static_cast<char>(mask));
  return {_mm256_and_si256(x.a, m), _mm256_and_si256(x.b, m)};
}
TM_INLINE Line either(Line x, Line y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
TM_INLINE Line looked_up(Line codes, const uint8_t* table) {
  const __m256i t = _mm256_broadcastsi128_si256(load_bytes(table));
  return {_mm256_shuffle_epi8(t, codes.a), _mm256_shuffle_epi8(t, codes.b)};
}
using Quad = __m256i;
TM_INLINE Quad splat_quad(const int8_t* x) {
  int32_t quad;
  std::memcpy(&quad, x, 4);
  return _mm256_set1_epi32(quad);
}
// Without VNNI the product is |w| * (x with w's sign): two of them fit 16 bits, an unsigned weight would not.
constexpr int32_t kStart8 = 0;
TM_INLINE __m256i signed_dot(__m256i acc, __m256i w, __m256i x) {
  const __m256i value = _mm256_xor_si256(w, _mm256_set1_epi8(-128));
  const __m256i words = _mm256_maddubs_epi16(_mm256_abs_epi8(value), _mm256_sign_epi8(x, value));
  return _mm256_add_epi32(acc, _mm256_madd_epi16(words, _mm256_set1_epi16(1)));
}
TM_INLINE I dot8bit(I acc, Line w, Quad quad) {
  return {signed_dot(acc.a, w.a, quad), signed_dot(acc.b, w.b, quad)};
}
TM_INLINE __m256i small_dot(__m256i acc, __m256i w, __m256i x) {
  return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(w, x), _mm256_set1_epi16(1)));
}
TM_INLINE I dot4bit(I acc, Line w, Quad quad) {
  return {small_dot(acc.a, w.a, quad), small_dot(acc.b, w.b, quad)};
}

TM_INLINE Line splat_pair(const void* x) {
  int32_t pair;
  std::memcpy(&pair, x, 4);
  const __m256i v = _mm256_set1_epi32(pair);
  return {v, v};
}
TM_INLINE F even_half(Line x) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(x.a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(x.b, 16))};
}
TM_INLINE F odd_half(Line x) {
  const __m256i mask = _mm256_set1_epi32(static_cast<int>(0xffff0000));
  return {_mm256_castsi256_ps(_mm256_and_si256(x.a, mask)), _mm256_castsi256_ps(_mm256_and_si256(x.b, mask))};
}
// Not the intrinsic: compilers gather a loop's prefetches in one place, and there they wait for each other. `hold` keeps
// what comes before it, and what depends on x afterwards, where they are. `prefetch_read` says that it reads, before
// which compilers store every sum that lies in an array: ruin for float tiles, and a third faster for 4 bit ones.
TM_INLINE void prefetch(const void* p) { asm volatile("prefetcht0 (%0)" : : "r"(p)); }
TM_INLINE void prefetch_read(const void* p) { asm volatile("prefetcht0 %0" : : "m"(*static_cast<const char*>(p))); }
TM_INLINE void hold(I&) {}
TM_INLINE void store_line(void* p, const Line& x) {
  _mm256_storeu_si256(static_cast<__m256i*>(p), x.a);
  _mm256_storeu_si256(static_cast<__m256i*>(p) + 1, x.b);
}
TM_INLINE Line as_line(F x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
TM_INLINE F as_f(Line x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
TM_INLINE __m256i halves(__m256i x, __m256i y, int from) {  // the low, or high, half of each 128-bit lane of both
  return from ? _mm256_unpackhi_epi64(x, y) : _mm256_unpacklo_epi64(x, y);
}
TM_INLINE void transpose8(const __m256i* rows, __m256i* columns) {
  __m256i t[8], u[8];
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_epi32(rows[i], rows[i + 1]);
    t[i + 1] = _mm256_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  for (int g = 0; g < 8; g += 4) {
    for (int i = 0; i < 4; ++i) u[g + i] = halves(t[g + i / 2], t[g + i / 2 + 2], i % 2);
  }
  for (int i = 0; i < 4; ++i) {  // u[4g + i]: 128-bit lane l holds column 4l + i of rows 4g..4g+3
    columns[i] = _mm256_permute2x128_si256(u[i], u[4 + i], 0x20);
    columns[4 + i] = _mm256_permute2x128_si256(u[i], u[4 + i], 0x31);
  }
}
TM_INLINE void transpose(const Line* rows, Line* out) {
  for (int half = 0; half < 2; ++half) {
    __m256i from[8], left[8], right[8];
    for (int r = 0; r < 8; ++r) from[r] = rows[8 * half + r].a;
    transpose8(from, left);
    for (int r = 0; r < 8; ++r) from[r] = rows[8 * half + r].b;
    transpose8(from, right);
    for (int c = 0; c < 8; ++c) {
      (half ? out[c].b : out[c].a) = left[c];
      (half ? out[8 + c].b : out[8 + c].a) = right[c];
    }
  }
}

}  // namespace TM_NS
}  // namespace tokenmill
