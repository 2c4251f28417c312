// int8 and int4 weights against int8 activations. Both sides are quantised in groups of 32 along k (a weight scale may
// serve several groups); a group's dot product is exact in int32, and groups are added in float32, ascending.
namespace tokenmill {
namespace TM_NS {

struct Activations {  // rows of int8; each group has a scale and the value that its integer sums start from
  const int8_t* q;
  const float* scale;
  const int32_t* start;
  int64_t width;      // k rounded up to a multiple of kGroup
};

template <class T>
TM_SHARED void quantise_row(const T* x, int64_t k, int8_t* q, float* scale, int32_t* start, int32_t by) {
  for (int64_t g = 0; g * kGroup < k; ++g) {
    const int64_t at = g * kGroup;
    const F a = load_part(x + at, k - at);
    const F b = k - at > 16 ? load_part(x + at + 16, k - at - 16) : zero();
    const float top = largest(max(abs(a), abs(b)));
    const F inverse = splat(top > 0.0f ? 127.0f / top : 0.0f);
    store_int8(q + at, round(mul(a, inverse)));
    store_int8(q + at + 16, round(mul(b, inverse)));
    scale[g] = top / 127.0f;
    start[g] = by * sum_int8(q + at);
  }
}

constexpr int64_t quant_lines(Format format) { return format == Format::int8 ? 8 : 4; }
constexpr int64_t kScaleBytes = kTileColumns * 2;

// Bytes of one weight group of a tile: 64 half scales, then its lines.
TM_INLINE int64_t quant_group_bytes(Format format, int group) {
  return kScaleBytes + group / kGroup * quant_lines(format) * kStepBytes;
}

template <Format kFormat, int R, int V>
TM_INLINE void quant_dots(I (&acc)[R][V], const uint8_t* w, const int8_t* x, int64_t stride) {
  if (kFormat == Format::int8) {
    for (int j = 0; j < 8; ++j, w += kStepBytes) {
      Line line[V];
      for (int v = 0; v < V; ++v) line[v] = load_line(w + v * kLine);
      for (int r = 0; r < R; ++r) {
        const Quad quad = splat_quad(x + r * stride + 4 * j);
        for (int v = 0; v < V; ++v) acc[r][v] = dot8bit(acc[r][v], line[v], quad);
      }
    }
    return;
  }
  for (int j = 0; j < 4; ++j, w += kStepBytes) {
    Line line[V];
    for (int v = 0; v < V; ++v) line[v] = low_nibbles(load_line(w + v * kLine));
    for (int r = 0; r < R; ++r) {
      const Quad quad = splat_quad(x + r * stride + 4 * j);
      for (int v = 0; v < V; ++v) acc[r][v] = dot4bit(acc[r][v], line[v], quad);
    }
    for (int v = 0; v < V; ++v) line[v] = high_nibbles(load_line(w + v * kLine));
    for (int r = 0; r < R; ++r) {
      const Quad quad = splat_quad(x + r * stride + 16 + 4 * j);
      for (int v = 0; v < V; ++v) acc[r][v] = dot4bit(acc[r][v], line[v], quad);
    }
  }
}

// c [R, 16 V] += over weight groups [begin, end), columns from vector `first` of the tile.
template <Format kFormat, int R, int V>
inline void quant_block(const uint8_t* tile, int group, int64_t begin, int64_t end, int first, const Activations& x,
                        int64_t row, float* c, bool resume) {
  F acc[R][V];
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) acc[r][v] = resume ? load(c + r * kTileColumns + v * 16) : zero();
  }
  const int64_t parts = group / kGroup, bytes = quant_group_bytes(kFormat, group), groups = x.width / kGroup;
  for (int64_t g = begin; g < end; ++g) {
    const uint8_t* at = tile + g * bytes;
    if (R <= 2) {
      for (int64_t ahead = 0; ahead < bytes; ahead += kLine) prefetch(at + 4096 + ahead);
    }
    const auto* scales = reinterpret_cast<const uint16_t*>(at) + first * 16;
    const uint8_t* lines = at + kScaleBytes + first * kLine;
    for (int64_t part = 0; part < parts; ++part, lines += quant_lines(kFormat) * kStepBytes) {
      const int64_t p = g * parts + part;
      if (p >= groups) break;
      const int8_t* q = x.q + row * x.width + p * kGroup;
      I dots[R][V];
      for (int r = 0; r < R; ++r) {
        const I start = isplat(x.start[(row + r) * groups + p]);
        for (int v = 0; v < V; ++v) dots[r][v] = start;
      }
      quant_dots<kFormat, R, V>(dots, lines, q, x.width);
      for (int v = 0; v < V; ++v) {
        const F scale = load_half(scales + v * 16);
        for (int r = 0; r < R; ++r) {
          const F by = splat(x.scale[(row + r) * groups + p]);
          acc[r][v] = fma(mul(to_f(dots[r][v]), by), scale, acc[r][v]);
        }
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) store(c + r * kTileColumns + v * 16, acc[r][v]);
  }
}

template <Format kFormat, int R>
TM_INLINE void quant_rows(const uint8_t* tile, int group, int64_t begin, int64_t end, const Activations& x, int64_t row,
                          float* c, bool resume) {
  constexpr int V = quant_vectors(R);
  for (int v = 0; v < 4; v += V) {
    quant_block<kFormat, R, V>(tile, group, begin, end, v, x, row, c + v * 16, resume);
  }
}

template <Format kFormat>
void quant_tile(const uint8_t* tile, int group, int64_t begin, int64_t end, const Activations& x, int64_t first,
                int64_t rows, float* c, bool resume) {
  int64_t tiles = divide_up(rows, kQuantRows);
  for (int64_t row = 0; row < rows; --tiles) {
    const int64_t n = divide_up(rows - row, tiles);
    float* to = c + row * kTileColumns;
    const int64_t at = first + row;
    switch (n) {
      case 1: quant_rows<kFormat, 1>(tile, group, begin, end, x, at, to, resume); break;
      case 2: quant_rows<kFormat, 2>(tile, group, begin, end, x, at, to, resume); break;
      case 3: quant_rows<kFormat, kQuantRows < 3 ? 2 : 3>(tile, group, begin, end, x, at, to, resume); break;
      case 4: quant_rows<kFormat, kQuantRows < 4 ? 2 : 4>(tile, group, begin, end, x, at, to, resume); break;
      case 5: quant_rows<kFormat, kQuantRows < 5 ? 2 : 5>(tile, group, begin, end, x, at, to, resume); break;
      default: quant_rows<kFormat, kQuantRows < 6 ? 2 : 6>(tile, group, begin, end, x, at, to, resume); break;
    }
    row += n;
  }
}

}  // namespace TM_NS
}  // namespace tokenmill
