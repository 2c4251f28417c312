// The register tile of bf16 products in AMX: sixteen rows times 64 columns, or 32 times 32, and 32 columns of k at once.
//
// Packed weights lie as tile registers want them: sixteen steps of k (pairs) of sixteen columns, 256 bytes apart. Of each
// 32 columns of k the even products are added up, the odd ones, and both to what came before, whatever the number of rows;
// k is cut at multiples of 32. So a row's result does not depend on its company. (It is not that of PairStep.)
namespace tokenmill {
namespace TM_NS {

constexpr int64_t kAmxRows = 16, kAmxSteps = 16;  // of a tile register: rows, and pairs of k
constexpr int64_t kAmxAhead = 8192;               // bytes ahead that a single pass asks for

struct alignas(64) AmxShape {  // as ldtilecfg reads it
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};

  TM_INLINE void set(int tile, int64_t count, int64_t width) {
    rows[tile] = static_cast<uint8_t>(count);
    bytes[tile] = static_cast<uint16_t>(width);
  }
  TM_INLINE void use() const { _tile_loadconfig(this); }
};

// Two blocks of rows times two vectors of columns: registers 0 to 3 hold sums, 4 and 5 rows, 6 and 7 weights.
TM_INLINE void amx_square(const uint8_t* w, int64_t blocks, const bf16* x, int64_t stride, float* c, int64_t c_stride,
                          bool resume) {
  const bf16* below = x + kAmxRows * stride;
  float* under = c + kAmxRows * c_stride;
  const int64_t x_bytes = stride * 2, c_bytes = c_stride * 4;
  if (resume) {
    _tile_loadd(0, c, c_bytes);
    _tile_loadd(1, c + 16, c_bytes);
    _tile_loadd(2, under, c_bytes);
    _tile_loadd(3, under + 16, c_bytes);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t b = 0; b < blocks; ++b, w += kAmxSteps * kStepBytes, x += 2 * kAmxSteps, below += 2 * kAmxSteps) {
    _tile_loadd(6, w, kStepBytes);
    _tile_loadd(4, x, x_bytes);
    _tile_loadd(7, w + kLine, kStepBytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, below, x_bytes);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, c, c_bytes);
  _tile_stored(1, c + 16, c_bytes);
  _tile_stored(2, under, c_bytes);
  _tile_stored(3, under + 16, c_bytes);
}

// One block of rows times all four vectors: the weights are read once.
TM_INLINE void amx_strip(const uint8_t* w, int64_t blocks, const bf16* x, int64_t stride, float* c, int64_t c_stride,
                         bool resume) {
  const int64_t x_bytes = stride * 2, c_bytes = c_stride * 4;
  if (resume) {
    _tile_loadd(0, c, c_bytes);
    _tile_loadd(1, c + 16, c_bytes);
    _tile_loadd(2, c + 32, c_bytes);
    _tile_loadd(3, c + 48, c_bytes);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t b = 0; b < blocks; ++b, w += kAmxSteps * kStepBytes, x += 2 * kAmxSteps) {
    for (int64_t i = 0; i < kAmxSteps * kStepBytes; i += kLine) prefetch(w + kAmxAhead + i);
    _tile_loadd(4, x, x_bytes);
    _tile_loadd(6, w, kStepBytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, w + kLine, kStepBytes);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(6, w + 2 * kLine, kStepBytes);
    _tile_dpbf16ps(2, 4, 6);
    _tile_loadd(7, w + 3 * kLine, kStepBytes);
    _tile_dpbf16ps(3, 4, 7);
  }
  _tile_stored(0, c, c_bytes);
  _tile_stored(1, c + 16, c_bytes);
  _tile_stored(2, c + 32, c_bytes);
  _tile_stored(3, c + 48, c_bytes);
}

// Rows up to `rows` times `steps` pairs of k, which are whole blocks, or (one short block) fewer.
TM_INLINE void amx_blocks(const uint8_t* w, int64_t steps, const bf16* x, int64_t stride, int64_t rows, float* c,
                          int64_t c_stride, bool resume) {
  const int64_t pairs = at_most(steps, kAmxSteps), blocks = steps / pairs;
  for (int64_t row = 0; row < rows; row += 2 * kAmxRows) {
    const int64_t first = at_most(rows - row, kAmxRows), second = at_most(rows - row - first, kAmxRows);
    AmxShape shape;
    for (int i = 0; i < 4; ++i) shape.set(i, second && i > 1 ? second : first, kLine);
    shape.set(4, first, 4 * pairs);
    shape.set(5, second ? second : first, 4 * pairs);
    shape.set(6, pairs, kLine);
    shape.set(7, pairs, kLine);
    shape.use();
    const bf16* from = x + row * stride;
    float* to = c + row * c_stride;
    if (!second) {
      amx_strip(w, blocks, from, stride, to, c_stride, resume);
      continue;
    }
    for (int v = 0; v < 4; v += 2) {
      amx_square(w + v * kLine, blocks, from, stride, to + v * 16, c_stride, resume);
    }
  }
}

// dense_tile with PairStep, in AMX. x is read up to a multiple of 2 columns.
TM_INLINE void amx_tile(const uint8_t* w, int64_t steps, const bf16* x, int64_t stride, int64_t rows, float* c,
                        int64_t c_stride, bool resume) {
  __asm__ volatile("" ::: "memory");
  const int64_t whole = steps / kAmxSteps * kAmxSteps;
  if (whole) amx_blocks(w, whole, x, stride, rows, c, c_stride, resume);
  if (steps > whole) {
    amx_blocks(w + whole * kStepBytes, steps - whole, x + 2 * whole, stride, rows, c, c_stride, resume || whole);
  }
  _tile_release();
}

}  // namespace TM_NS
}  // namespace tokenmill
