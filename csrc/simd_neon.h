// Sixteen lanes as four NEON registers (AArch64). Same names as simd_scalar.h; TM_DOT: dot products of bytes, TM_BF16: of
// pairs of bf16 (both one instruction where the machine has them).
#pragma once
#include <arm_neon.h>

#include "numbers.h"

namespace tokenmill {
namespace TM_NS {

constexpr int kRows = 3;  // six accumulators are 24 of the 32 registers
constexpr int kVectors = 2;
constexpr int kQuantRows = 4;
constexpr int quant_vectors(int rows) { return rows == 1 ? 4 : rows == 2 ? 2 : 1; }
#if defined(TM_BF16)
constexpr bool kPairs = true;
#else
constexpr bool kPairs = false;
#endif

struct F {
  float32x4_t v[4];
};
struct I {
  int32x4_t v[4];
};
struct Line {
  uint8x16_t v[4];
};

// Each of the four registers through `one`.
template <class To, class One>
TM_INLINE To each(One one) {
  return {{one(0), one(1), one(2), one(3)}};
}

TM_INLINE F splat(float x) { const float32x4_t v = vdupq_n_f32(x); return {{v, v, v, v}}; }
TM_INLINE F zero() { return splat(0.0f); }
TM_INLINE F load(const float* p) {
  return {{vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}};
}
TM_INLINE float32x4_t widen(uint16x4_t half) { return vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(half), 16)); }
TM_INLINE F load(const bf16* p) {
  const auto* q = reinterpret_cast<const uint16_t*>(p);
  return {{widen(vld1_u16(q)), widen(vld1_u16(q + 4)), widen(vld1_u16(q + 8)), widen(vld1_u16(q + 12))}};
}
TM_INLINE float32x4_t from_half(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
TM_INLINE F load_half(const uint16_t* p) {
  return {{from_half(p), from_half(p + 4), from_half(p + 8), from_half(p + 12)}};
}
TM_INLINE void store(float* p, F x) {
  vst1q_f32(p, x.v[0]);
  vst1q_f32(p + 4, x.v[1]);
  vst1q_f32(p + 8, x.v[2]);
  vst1q_f32(p + 12, x.v[3]);
}
TM_INLINE uint16x4_t narrow(float32x4_t x) {  // rounds to bf16
  const uint32x4_t bits = vreinterpretq_u32_f32(x);
  const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  const uint32x4_t up = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
  const uint32x4_t nan = vorrq_u32(bits, vdupq_n_u32(0x400000));
  return vshrn_n_u32(vbslq_u32(vceqq_f32(x, x), up, nan), 16);
}
TM_INLINE void store(bf16* p, F x) {
  auto* q = reinterpret_cast<uint16_t*>(p);
  vst1q_u16(q, vcombine_u16(narrow(x.v[0]), narrow(x.v[1])));
  vst1q_u16(q + 8, vcombine_u16(narrow(x.v[2]), narrow(x.v[3])));
}
TM_INLINE F add(F x, F y) { return each<F>([&](int i) { return vaddq_f32(x.v[i], y.v[i]); }); }
TM_INLINE F sub(F x, F y) { return each<F>([&](int i) { return vsubq_f32(x.v[i], y.v[i]); }); }
TM_INLINE F mul(F x, F y) { return each<F>([&](int i) { return vmulq_f32(x.v[i], y.v[i]); }); }
TM_INLINE F div(F x, F y) { return each<F>([&](int i) { return vdivq_f32(x.v[i], y.v[i]); }); }
TM_INLINE F fma(F x, F y, F z) { return each<F>([&](int i) { return vfmaq_f32(z.v[i], x.v[i], y.v[i]); }); }
// The second operand when one is NaN: the machine's own instruction would give NaN.
TM_INLINE F max(F x, F y) {
  return each<F>([&](int i) { return vbslq_f32(vcgtq_f32(x.v[i], y.v[i]), x.v[i], y.v[i]); });
}
TM_INLINE F min(F x, F y) {
  return each<F>([&](int i) { return vbslq_f32(vcltq_f32(x.v[i], y.v[i]), x.v[i], y.v[i]); });
}
TM_INLINE F abs(F x) { return each<F>([&](int i) { return vabsq_f32(x.v[i]); }); }
TM_INLINE F copy_sign(F size, F from) {
  const uint32x4_t sign = vdupq_n_u32(0x80000000u);
  return each<F>([&](int i) { return vbslq_f32(sign, from.v[i], size.v[i]); });
}
TM_INLINE F round(F x) { return each<F>([&](int i) { return vrndnq_f32(x.v[i]); }); }
TM_INLINE F zero_below(F y, F x, float limit) {
  const float32x4_t edge = vdupq_n_f32(limit);
  return each<F>([&](int i) {
    return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(y.v[i]), vcltq_f32(x.v[i], edge)));
  });
}
TM_INLINE F power_of_two(F n) {
  return each<F>([&](int i) {
    return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(n.v[i]), vdupq_n_s32(127)), 23));
  });
}
TM_INLINE F blend_first(F x, F y, int n) {
  const int32_t first[4] = {0, 1, 2, 3};
  const int32x4_t lane = vld1q_s32(first);
  return each<F>([&](int i) { return vbslq_f32(vcltq_s32(lane, vdupq_n_s32(n - 4 * i)), x.v[i], y.v[i]); });
}

TM_INLINE I isplat(int32_t x) { const int32x4_t v = vdupq_n_s32(x); return {{v, v, v, v}}; }
TM_INLINE F to_f(I x) { return each<F>([&](int i) { return vcvtq_f32_s32(x.v[i]); }); }
TM_INLINE int16x8_t to_words(float32x4_t x, float32x4_t y) {
  return vcombine_s16(vqmovn_s32(vcvtnq_s32_f32(x)), vqmovn_s32(vcvtnq_s32_f32(y)));
}
TM_INLINE void store_int8(int8_t* p, F x) {
  vst1q_s8(p, vcombine_s8(vqmovn_s16(to_words(x.v[0], x.v[1])), vqmovn_s16(to_words(x.v[2], x.v[3]))));
}
TM_INLINE int32_t sum_int8(const int8_t* p) { return vaddlvq_s8(vld1q_s8(p)); }  // sixteen
TM_INLINE F load_int8(const int8_t* p) {
  const int8x16_t x = vld1q_s8(p);
  const int16x8_t low = vmovl_s8(vget_low_s8(x)), high = vmovl_high_s8(x);
  return to_f(I{{vmovl_s16(vget_low_s16(low)), vmovl_high_s16(low), vmovl_s16(vget_low_s16(high)), vmovl_high_s16(high)}});
}
TM_INLINE I widen_bytes(uint8x16_t x) {
  const uint16x8_t low = vmovl_u8(vget_low_u8(x)), high = vmovl_high_u8(x);
  return {{vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(low))), vreinterpretq_s32_u32(vmovl_high_u16(low)),
           vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(high))), vreinterpretq_s32_u32(vmovl_high_u16(high))}};
}
TM_INLINE F load_low_nibbles(const uint8_t* p) { return to_f(widen_bytes(vandq_u8(vld1q_u8(p), vdupq_n_u8(15)))); }
TM_INLINE F load_high_nibbles(const uint8_t* p) { return to_f(widen_bytes(vshrq_n_u8(vld1q_u8(p), 4))); }
TM_INLINE F load_e4m3(const uint8_t* p) {  // as half precision they are 2^-8 of the values
  const uint8x16_t x = vld1q_u8(p);
  const auto turned = [](uint8x8_t some) {
    const int16x8_t top = vreinterpretq_s16_u16(vshll_n_u8(some, 8));
    return vreinterpretq_f16_u16(vandq_u16(vreinterpretq_u16_s16(vshrq_n_s16(top, 1)), vdupq_n_u16(0xbf80)));
  };
  const float16x8_t low = turned(vget_low_u8(x)), high = turned(vget_high_u8(x));
  return mul(F{{vcvt_f32_f16(vget_low_f16(low)), vcvt_high_f32_f16(low), vcvt_f32_f16(vget_low_f16(high)),
                vcvt_high_f32_f16(high)}}, splat(256.0f));
}
// Byte kByte of each dword. As a float of their bits they are 2^-120 of the values.
template <int kByte>
TM_INLINE F e4m3_of(const Line& x) {
  return each<F>([&](int i) {
    const uint32x4_t word = vreinterpretq_u32_u8(x.v[i]);
    const int32x4_t top = vshrq_n_s32(vreinterpretq_s32_u32(vshlq_n_u32(word, 24 - 8 * kByte)), 4);
    const uint32x4_t kept = vandq_u32(vreinterpretq_u32_s32(top), vdupq_n_u32(0x87f00000u));
    return vmulq_f32(vreinterpretq_f32_u32(kept), vdupq_n_f32(1.329227995784916e36f));
  });
}
TM_INLINE F load_power(const uint8_t* p) {  // 2^(byte - 128); 0 and 1 are denormal
  const I e = widen_bytes(vld1q_u8(p));
  return each<F>([&](int i) {
    const int32x4_t plain = vshlq_n_s32(vsubq_s32(e.v[i], vdupq_n_s32(1)), 23);
    const int32x4_t denormal = vshlq_s32(vdupq_n_s32(0x00200000), e.v[i]);
    return vreinterpretq_f32_s32(vbslq_s32(vcltq_s32(e.v[i], vdupq_n_s32(2)), denormal, plain));
  });
}

TM_INLINE Line load_line(const void* p) {
  const auto* q = static_cast<const uint8_t*>(p);
  return {{vld1q_u8(q), vld1q_u8(q + 16), vld1q_u8(q + 32), vld1q_u8(q + 48)}};
}
TM_INLINE void store_line(void* p, const Line& x) {
  auto* q = static_cast<uint8_t*>(p);
  for (int i = 0; i < 4; ++i) vst1q_u8(q + 16 * i, x.v[i]);
}
TM_INLINE Line as_line(F x) { return each<Line>([&](int i) { return vreinterpretq_u8_f32(x.v[i]); }); }
TM_INLINE F as_f(Line x) { return each<F>([&](int i) { return vreinterpretq_f32_u8(x.v[i]); }); }
TM_INLINE Line low_nibbles(Line x) { return each<Line>([&](int i) { return vandq_u8(x.v[i], vdupq_n_u8(15)); }); }
TM_INLINE Line high_nibbles(Line x) { return each<Line>([&](int i) { return vshrq_n_u8(x.v[i], 4); }); }
// Bits of bytes moved down by kBy (up where that is negative).
template <int kBy>
TM_INLINE Line shifted(Line x) {
  if constexpr (kBy > 0) return each<Line>([&](int i) { return vshrq_n_u8(x.v[i], kBy); });
  else if constexpr (kBy < 0) return each<Line>([&](int i) { return vshlq_n_u8(x.v[i], -kBy); });
  else return x;
}
TM_INLINE Line masked(Line x, uint8_t mask) {
  return each<Line>([&](int i) { return vandq_u8(x.v[i], vdupq_n_u8(mask)); });
}
TM_INLINE Line either(Line x, Line y) { return each<Line>([&](int i) { return vorrq_u8(x.v[i], y.v[i]); }); }
TM_INLINE Line looked_up(Line codes, const uint8_t* table) {
  const uint8x16_t t = vld1q_u8(table);
  return each<Line>([&](int i) { return vqtbl1q_u8(t, codes.v[i]); });
}

using Quad = int8x16_t;
TM_INLINE Quad splat_quad(const int8_t* x) {
  int32_t quad;
  std::memcpy(&quad, x, 4);
  return vreinterpretq_s8_s32(vdupq_n_s32(quad));
}
TM_INLINE int32x4_t signed_dot(int32x4_t acc, int8x16_t w, int8x16_t x) {
#if defined(TM_DOT)
  return vdotq_s32(acc, w, x);
#else
  // Two products fit 16 bits: activations stay within +-127.
  const int16x8_t low = vmull_s8(vget_low_s8(w), vget_low_s8(x)), high = vmull_high_s8(w, x);
  return vpadalq_s16(acc, vpaddq_s16(low, high));
#endif
}
constexpr int32_t kStart8 = 0;  // both sides are signed
TM_INLINE I dot8bit(I acc, Line w, Quad x) {
  const uint8x16_t top = vdupq_n_u8(128);
  return each<I>([&](int i) { return signed_dot(acc.v[i], vreinterpretq_s8_u8(veorq_u8(w.v[i], top)), x); });
}
TM_INLINE I dot4bit(I acc, Line w, Quad x) {
  return each<I>([&](int i) { return signed_dot(acc.v[i], vreinterpretq_s8_u8(w.v[i]), x); });
}

#if defined(TM_BF16)
TM_INLINE F dot_pairs(F acc, Line w, Line x) {
  return each<F>([&](int i) {
    return vbfdotq_f32(acc.v[i], vreinterpretq_bf16_u8(w.v[i]), vreinterpretq_bf16_u8(x.v[i]));
  });
}
TM_INLINE uint16x8_t words(uint8x16_t x) { return vreinterpretq_u16_u8(x); }
// Rows a and b of 32 bf16 -> 32 dwords (a[i], b[i]) in the order that `unmix` undoes on sums.
TM_INLINE Line mix_low(Line a, Line b) {
  return each<Line>([&](int i) { return vreinterpretq_u8_u16(vzip1q_u16(words(a.v[i]), words(b.v[i]))); });
}
TM_INLINE Line mix_high(Line a, Line b) {
  return each<Line>([&](int i) { return vreinterpretq_u8_u16(vzip2q_u16(words(a.v[i]), words(b.v[i]))); });
}
TM_INLINE void unmix(F low, F high, F* first, F* second) {
  *first = {{low.v[0], high.v[0], low.v[1], high.v[1]}};
  *second = {{low.v[2], high.v[2], low.v[3], high.v[3]}};
}
#endif

TM_INLINE Line splat_pair(const void* x) {
  int32_t pair;
  std::memcpy(&pair, x, 4);
  const uint8x16_t v = vreinterpretq_u8_s32(vdupq_n_s32(pair));
  return {{v, v, v, v}};
}
TM_INLINE F even_half(Line x) {
  return each<F>([&](int i) { return vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_u8(x.v[i]), 16)); });
}
TM_INLINE F odd_half(Line x) {
  const uint32x4_t mask = vdupq_n_u32(0xffff0000u);
  return each<F>([&](int i) { return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_u8(x.v[i]), mask)); });
}
TM_INLINE void prefetch(const void* p) { __builtin_prefetch(p); }
TM_INLINE void prefetch_read(const void* p) { __builtin_prefetch(p); }
TM_INLINE void hold(I&) {}
// 16 rows of 16 dwords become 16 columns: out[c] lane r = rows[r][c]. Four by four at a time.
TM_INLINE void transpose(const Line* rows, Line* out) {
  for (int from = 0; from < 4; ++from) {
    for (int to = 0; to < 4; ++to) {
      uint32x4_t r[4];
      for (int i = 0; i < 4; ++i) r[i] = vreinterpretq_u32_u8(rows[4 * from + i].v[to]);
      const uint64x2_t a = vreinterpretq_u64_u32(vtrn1q_u32(r[0], r[1])), b = vreinterpretq_u64_u32(vtrn1q_u32(r[2], r[3]));
      const uint64x2_t c = vreinterpretq_u64_u32(vtrn2q_u32(r[0], r[1])), d = vreinterpretq_u64_u32(vtrn2q_u32(r[2], r[3]));
      out[4 * to].v[from] = vreinterpretq_u8_u64(vtrn1q_u64(a, b));
      out[4 * to + 1].v[from] = vreinterpretq_u8_u64(vtrn1q_u64(c, d));
      out[4 * to + 2].v[from] = vreinterpretq_u8_u64(vtrn2q_u64(a, b));
      out[4 * to + 3].v[from] = vreinterpretq_u8_u64(vtrn2q_u64(c, d));
    }
  }
}

}  // namespace TM_NS
}  // namespace tokenmill
