// Matrices that hold no zeros (sparse.h): some steps of a tile get their zeros back, in the nearest cache, where they are
// multiplied as any others (dense.inl), with the same result to the last bit.
namespace tokenmill {
namespace TM_NS {

// Up to so many rows, steps are multiplied in registers.
constexpr int64_t kFewSparse = 12;
// Steps are of any length, which processors do not guess: what comes so many bytes later is asked for.
constexpr int64_t kSparseAhead = 4096;

#if defined(TM_EXPANDS)
inline bool expands() {
  static const bool found = __builtin_cpu_supports("avx512vbmi2");
  return found;
}
#define TM_EXPANDING __attribute__((target("avx512vbmi2,popcnt")))
// The four lines of a step with their zeros; returns where the next step begins.
TM_EXPANDING TM_INLINE const uint8_t* expand_step(const uint8_t* at, Line (&lines)[4]) {
  uint64_t masks[2];
  std::memcpy(masks, at, sizeof(masks));
  const uint8_t* first = at + sizeof(masks);
  const uint8_t* third = first + 2 * _mm_popcnt_u64(masks[0]);
  const uint8_t* from[4] = {first, first + 2 * _mm_popcnt_u32(static_cast<uint32_t>(masks[0])), third,
                            third + 2 * _mm_popcnt_u32(static_cast<uint32_t>(masks[1]))};
  for (int line = 0; line < 4; ++line) {
    Line numbers = load_line(from[line]);
    __asm__("" : "+v"(numbers));  // expanding from memory itself takes some processors a hundred cycles
    lines[line] = _mm512_maskz_expand_epi16(static_cast<__mmask32>(masks[line / 2] >> line % 2 * 32), numbers);
  }
  at = third + 2 * _mm_popcnt_u64(masks[1]);
  prefetch(at + kSparseAhead);
  prefetch(at + kSparseAhead + kLine);
  return at;
}

TM_EXPANDING inline const uint8_t* spread_at_once(const uint8_t* at, int64_t steps, uint8_t* to) {
  for (int64_t step = 0; step < steps; ++step, to += kStepBytes) {
    Line lines[4];
    at = expand_step(at, lines);
    for (int line = 0; line < 4; ++line) store_line(to + line * kLine, lines[line]);
  }
  return at;
}

// c [R, 64] = x @ w, as dense_block makes it.
template <class Step, int R>
TM_EXPANDING inline void expand_block(const uint8_t* at, int64_t steps, const typename Step::X* x, int64_t stride,
                                      float* c) {
  F acc[R][4];
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < 4; ++v) acc[r][v] = zero();
  }
  for (int64_t step = 0; step < steps; ++step) {
    Line lines[4];
    at = expand_step(at, lines);
    Step::multiply(acc, lines, x + step * Step::kPerStep, stride);
  }
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < 4; ++v) store(c + r * kTileColumns + v * 16, acc[r][v]);
  }
}

// The same for some rows, cut evenly into register tiles, each of which reads the tile anew.
template <class Step>
TM_INLINE void expand_rows(const uint8_t* at, int64_t steps, const typename Step::X* x, int64_t stride, int64_t rows,
                           float* c) {
  for (int64_t tiles = divide_up(rows, kRows); rows > 0; --tiles) {
    const int64_t n = divide_up(rows, tiles);
    switch (n) {
      case 1: expand_block<Step, 1>(at, steps, x, stride, c); break;
      case 2: expand_block<Step, 2>(at, steps, x, stride, c); break;
      case 3: expand_block<Step, 3>(at, steps, x, stride, c); break;
      case 4: expand_block<Step, 4>(at, steps, x, stride, c); break;
      case 5: expand_block<Step, 5>(at, steps, x, stride, c); break;
      default: expand_block<Step, 6>(at, steps, x, stride, c); break;
    }
    x += n * stride, c += n * kTileColumns, rows -= n;
  }
}
#endif

// `steps` steps with their zeros -> lines; returns where the next step begins. (What cannot expand is never given such a
// matrix to be fast: packed.py.)
TM_INLINE const uint8_t* spread_out(const uint8_t* at, int64_t steps, uint8_t* lines) {
#if defined(TM_EXPANDS)
  if (expands()) return spread_at_once(at, steps, lines);
#endif
  std::memset(lines, 0, static_cast<size_t>(steps * kStepBytes));
  for (int64_t step = 0; step < steps; ++step) {
    uint32_t masks[4];
    std::memcpy(masks, at, sizeof(masks));
    at += sizeof(masks);
    for (uint32_t mask : masks) {
      for (int64_t place = 0; mask; mask >>= 1, ++place) {
        if (!(mask & 1)) continue;
        std::memcpy(lines + 2 * place, at, 2);
        at += 2;
      }
      lines += kLine;
    }
  }
  return at;
}

}  // namespace TM_NS
}  // namespace tokenmill
