// Sixteen lanes as one AVX-512 register (F, BW, DQ, VL). TM_VNNI and TM_BF16 add the dot-product instructions.
// Same names as simd_scalar.h.
#pragma once
#include <immintrin.h>

#include "numbers.h"

#define TM_EXPANDS  // sixteen bits at a time where the machine has VBMI2: asked at run time

namespace tokenmill {
namespace TM_NS {

constexpr int kRows = 6;
constexpr int kVectors = 4;
constexpr int kQuantRows = 6;
constexpr int quant_vectors(int rows) { return rows <= 3 ? 4 : 2; }
#if defined(TM_BF16)
constexpr bool kPairs = true;
#else
constexpr bool kPairs = false;
#endif

using F = __m512;
using I = __m512i;
using Line = __m512i;
// F and the others are built-in types: overloads below are told apart by name where they would clash.

TM_INLINE F zero() { return _mm512_setzero_ps(); }
TM_INLINE F splat(float x) { return _mm512_set1_ps(x); }
TM_INLINE F load(const float* p) { return _mm512_loadu_ps(p); }
TM_INLINE F load(const bf16* p) {
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
TM_INLINE F load_half(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
TM_INLINE void store(float* p, F x) { _mm512_storeu_ps(p, x); }
#if defined(TM_BF16)
TM_INLINE void store(bf16* p, F x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(x));
}
#else
TM_INLINE void store(bf16* p, F x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  up = _mm512_mask_or_epi32(up, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), bits, _mm512_set1_epi32(0x400000));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_srli_epi32(up, 16)));
}
#endif
TM_INLINE F add(F x, F y) { return _mm512_add_ps(x, y); }
TM_INLINE F sub(F x, F y) { return _mm512_sub_ps(x, y); }
TM_INLINE F mul(F x, F y) { return _mm512_mul_ps(x, y); }
TM_INLINE F div(F x, F y) { return _mm512_div_ps(x, y); }
TM_INLINE F fma(F x, F y, F z) { return _mm512_fmadd_ps(x, y, z); }
TM_INLINE F max(F x, F y) { return _mm512_max_ps(x, y); }
TM_INLINE F min(F x, F y) { return _mm512_min_ps(x, y); }
TM_INLINE F abs(F x) { return _mm512_abs_ps(x); }
TM_INLINE F copy_sign(F size, F from) {
  const __m512 sign = _mm512_set1_ps(-0.0f);
  return _mm512_or_ps(_mm512_andnot_ps(sign, size), _mm512_and_ps(sign, from));
}
TM_INLINE F round(F x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
TM_INLINE F zero_below(F y, F x, float limit) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(limit), _CMP_NLT_UQ), y);
}
TM_INLINE F power_of_two(F n) {
  return _mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
}
TM_INLINE F blend_first(F x, F y, int n) {
  const __mmask16 mask = n >= 16 ? 0xffff : n <= 0 ? 0 : static_cast<__mmask16>((1u << n) - 1);
  return _mm512_mask_mov_ps(y, mask, x);
}

#define TM_FOLDS
TM_INLINE float sum(F x) {
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}
TM_INLINE float largest(F x) {
  const __m256 eight = _mm256_max_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}

TM_INLINE I isplat(int32_t x) { return _mm512_set1_epi32(x); }
TM_INLINE F to_f(I x) { return _mm512_cvtepi32_ps(x); }
TM_INLINE void store_int8(int8_t* p, F x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x)));
}
TM_INLINE int32_t sum_int8(const int8_t* p) {  // sixteen
  const __m128i up = _mm_xor_si128(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)), _mm_set1_epi8(-128));
  const __m128i s = _mm_sad_epu8(up, _mm_setzero_si128());
  return _mm_cvtsi128_si32(s) + _mm_extract_epi32(s, 2) - 16 * 128;
}
TM_INLINE __m128i load_bytes(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
TM_INLINE F load_int8(const int8_t* p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_bytes(p))); }
TM_INLINE F load_low_nibbles(const uint8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_and_si128(load_bytes(p), _mm_set1_epi8(15))));
}
TM_INLINE F load_high_nibbles(const uint8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_and_si128(_mm_srli_epi16(load_bytes(p), 4), _mm_set1_epi8(15))));
}
TM_INLINE __m256i halves_of_e4m3(__m128i x) {  // 2^-8 of the values
  const __m256i top = _mm256_slli_epi16(_mm256_cvtepu8_epi16(x), 8);
  return _mm256_and_si256(_mm256_srai_epi16(top, 1), _mm256_set1_epi16(static_cast<int16_t>(0xbf80)));
}
TM_INLINE F load_e4m3(const uint8_t* p) {
  return _mm512_mul_ps(_mm512_cvtph_ps(halves_of_e4m3(load_bytes(p))), _mm512_set1_ps(256.0f));
}
// Byte kByte of each dword. As a float of their bits they are 2^-120 of the values.
template <int kByte>
TM_INLINE F e4m3_of(Line x) {
  const __m512i top = _mm512_srai_epi32(_mm512_slli_epi32(x, 24 - 8 * kByte), 4);
  const __m512i kept = _mm512_and_si512(top, _mm512_set1_epi32(static_cast<int>(0x87f00000)));
  return _mm512_mul_ps(_mm512_castsi512_ps(kept), _mm512_set1_ps(1.329227995784916e36f));
}
TM_INLINE F load_power(const uint8_t* p) {  // 2^(byte - 128); 0 and 1 are denormal
  const __m512i e = _mm512_cvtepu8_epi32(load_bytes(p));
  const __m512i plain = _mm512_slli_epi32(_mm512_sub_epi32(e, _mm512_set1_epi32(1)), 23);
  const __mmask16 small = _mm512_cmplt_epi32_mask(e, _mm512_set1_epi32(2));
  return _mm512_castsi512_ps(_mm512_mask_sllv_epi32(plain, small, _mm512_set1_epi32(0x00200000), e));
}

TM_INLINE F first_halves(Line x) { return _mm512_cvtph_ps(_mm512_castsi512_si256(x)); }  // 16 of half precision
TM_INLINE F second_halves(Line x) { return _mm512_cvtph_ps(_mm512_extracti64x4_epi64(x, 1)); }
TM_INLINE Line load_line(const void* p) { return _mm512_loadu_si512(p); }
TM_INLINE Line low_nibbles(Line x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
TM_INLINE Line high_nibbles(Line x) { return low_nibbles(_mm512_srli_epi16(x, 4)); }
// Bits of bytes moved down by kBy (up where that is negative); what crosses a byte's border is for `masked` to remove.
template <int kBy>
TM_INLINE Line shifted(Line x) {
  if constexpr (kBy >= 0) return _mm512_srli_epi16(x, kBy);
  else return _mm512_slli_epi16(x, -kBy);
}
TM_INLINE Line masked(Line x, uint8_t mask) { return _mm512_and_si512(x, _mm512_set1_epi8(static_cast<char>(mask))); }
TM_INLINE Line either(Line x, Line y) { return _mm512_or_si512(x, y); }
TM_INLINE Line looked_up(Line codes, const uint8_t* table) {
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(load_bytes(table)), codes);
}
using Quad = __m512i;
TM_INLINE Quad splat_quad(const int8_t* x) {
  int32_t quad;
  std::memcpy(&quad, x, 4);
  return _mm512_set1_epi32(quad);
}
#if defined(TM_VNNI)
// The weights are the unsigned side (stored + 128), so the correction is a start value and costs nothing.
constexpr int32_t kStart8 = -128;
TM_INLINE I dot8bit(I acc, Line w, Quad x) { return _mm512_dpbusd_epi32(acc, w, x); }
TM_INLINE I dot4bit(I acc, Line w, Quad x) { return _mm512_dpbusd_epi32(acc, w, x); }
#else
constexpr int32_t kStart8 = 0;
TM_INLINE I dot8bit(I acc, Line w, Quad x) {
  const __m512i value = _mm512_xor_si512(w, _mm512_set1_epi8(-128));
  const __m512i turned = _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(value), _mm512_setzero_si512(), x);
  const __m512i words = _mm512_maddubs_epi16(_mm512_abs_epi8(value), turned);
  return _mm512_add_epi32(acc, _mm512_madd_epi16(words, _mm512_set1_epi16(1)));
}
TM_INLINE I dot4bit(I acc, Line w, Quad x) {
  return _mm512_add_epi32(acc, _mm512_madd_epi16(_mm512_maddubs_epi16(w, x), _mm512_set1_epi16(1)));
}
#endif
#if defined(TM_BF16)
TM_INLINE F dot_pairs(F acc, Line w, Line x) { return _mm512_dpbf16_ps(acc, (__m512bh)w, (__m512bh)x); }
// Rows a and b of 32 bf16 -> 32 dwords (a[i], b[i]) in the order that `unmix` undoes on sums.
TM_INLINE Line mix_low(Line a, Line b) { return _mm512_unpacklo_epi16(a, b); }
TM_INLINE Line mix_high(Line a, Line b) { return _mm512_unpackhi_epi16(a, b); }
TM_INLINE void unmix(F low, F high, F* first, F* second) {
  const __m512i front = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i back = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  *first = _mm512_permutex2var_ps(low, front, high);
  *second = _mm512_permutex2var_ps(low, back, high);
}
#endif

TM_INLINE Line splat_pair(const void* x) {
  int32_t pair;
  std::memcpy(&pair, x, 4);
  return _mm512_set1_epi32(pair);
}
TM_INLINE F even_half(Line x) { return _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)); }
TM_INLINE F odd_half(Line x) {
  return _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
}
// Not the intrinsic: compilers gather a loop's prefetches in one place, and there they wait for each other. `hold` keeps
// what comes before it, and what depends on x afterwards, where they are. `prefetch_read` says that it reads, before
// which compilers store every sum that lies in an array: ruin for float tiles, and a third faster for 4 bit ones.
TM_INLINE void prefetch(const void* p) { asm volatile("prefetcht0 (%0)" : : "r"(p)); }
TM_INLINE void prefetch_read(const void* p) { asm volatile("prefetcht0 %0" : : "m"(*static_cast<const char*>(p))); }
TM_INLINE void hold(I& x) { asm volatile("" : "+v"(x)); }
TM_INLINE void store_line(void* p, Line x) { _mm512_storeu_si512(p, x); }
TM_INLINE Line as_line(F x) { return _mm512_castps_si512(x); }
TM_INLINE F as_f(Line x) { return _mm512_castsi512_ps(x); }
TM_INLINE void transpose(const Line* rows, Line* out) {
  __m512i t[16], u[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    u[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    u[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    u[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    u[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {  // u[4g + i]: 128-bit lane l holds column 4l + i of rows 4g..4g+3
    const __m512i low01 = _mm512_shuffle_i32x4(u[i], u[4 + i], 0x44);
    const __m512i high01 = _mm512_shuffle_i32x4(u[i], u[4 + i], 0xee);
    const __m512i low23 = _mm512_shuffle_i32x4(u[8 + i], u[12 + i], 0x44);
    const __m512i high23 = _mm512_shuffle_i32x4(u[8 + i], u[12 + i], 0xee);
    out[i] = _mm512_shuffle_i32x4(low01, low23, 0x88);
    out[4 + i] = _mm512_shuffle_i32x4(low01, low23, 0xdd);
    out[8 + i] = _mm512_shuffle_i32x4(high01, high23, 0x88);
    out[12 + i] = _mm512_shuffle_i32x4(high01, high23, 0xdd);
  }
}

}  // namespace TM_NS
}  // namespace tokenmill
