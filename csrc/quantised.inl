// Integer weights against int8 activations. Activations are quantised in groups of 32 along k; within 32 (or 16, where
// the format's scales are finer) the dot product is exact in int32, and groups are added in float32, ascending: first
// a group's product, then its offset times the sum of its activations. How codes lie is in coding.h.
namespace tokenmill {
namespace TM_NS {

struct Activations {  // rows of int8; each group of 32 has a scale and the sums of its two halves
  const int8_t* q;
  const float* scale;
  const int32_t* sum;
  int64_t width;      // k rounded up to a multiple of kGroup
  const float* apart = nullptr;     // [rows, width]: what was not rounded, where bits of `where` [rows, groups] say so
  const uint32_t* where = nullptr;
};

template <class T>
TM_SHARED void quantise_row(const T* x, int64_t k, int8_t* q, float* scale, int32_t* sum) {
  F trouble = zero();  // NaN where a number is not finite: no code says so, and largest() may pass it over
  for (int64_t g = 0; g * kGroup < k; ++g) {
    const int64_t at = g * kGroup;
    const F a = load_part(x + at, k - at);
    const F b = k - at > 16 ? load_part(x + at + 16, k - at - 16) : zero();
    const float top = largest(max(abs(a), abs(b)));
    trouble = fma(a, zero(), fma(b, zero(), trouble));
    const F inverse = splat(top > 0.0f ? 127.0f / top : 0.0f);
    store_int8(q + at, round(mul(a, inverse)));
    store_int8(q + at + 16, round(mul(b, inverse)));
    scale[g] = top / 127.0f;
    sum[2 * g] = sum_int8(q + at);
    sum[2 * g + 1] = sum_int8(q + at + 16);
  }
  if (!(TM_NS::sum(trouble) == 0.0f)) scale[0] = __builtin_nanf("");
}

// Moves numbers of a magnitude from `least` on into `apart`, in whose place x has zeros; a bit of `where` for each.
TM_SHARED inline void set_apart(float* x, int64_t k, float least, float* apart, uint32_t* where) {
  for (int64_t g = 0; g * kGroup < k; ++g) {
    uint32_t bits = 0;
    for (int64_t i = g * kGroup; i < at_most(k, (g + 1) * kGroup); ++i) {
      if (!(x[i] >= least || x[i] <= -least)) continue;
      bits |= uint32_t{1} << (i % kGroup);
      apart[i] = x[i];
      x[i] = 0.0f;
    }
    where[g] = bits;
  }
}

// c += what was set apart of these rows times their columns of an int8 tile, ascending.
TM_SHARED inline void add_apart(const uint8_t* tile, int group, const Activations& x, int64_t row, int64_t rows, float* c) {
  constexpr Coding kind = coding(Format::int8);
  const int64_t groups = x.width / kGroup, parts = group / kGroup;
  alignas(64) float codes[kTileColumns];
  for (int64_t at = row; at < row + rows; ++at, c += kTileColumns) {
    for (int64_t g = 0; g < groups; ++g) {
      const uint8_t* head = tile + g / parts * unit_bytes(kind, group);
      const uint8_t* planes = head + unit_head(kind) + g % parts * part_bytes(kind);
      for (uint32_t bits = x.where[at * groups + g], i = 0; bits; bits >>= 1, ++i) {
        if (!(bits & 1)) continue;
        const uint8_t* from = planes + i / 4 * kColumnLine + i % 4;
        for (int64_t n = 0; n < kTileColumns; ++n) codes[n] = static_cast<float>(from[4 * n] - kind.less);
        const F value = splat(x.apart[at * x.width + g * kGroup + i]);
        for (int64_t n = 0; n < kTileColumns; n += 16) {
          const F scale = load_half(reinterpret_cast<const uint16_t*>(head) + n);
          store(c + n, fma(mul(load(codes + n), scale), value, load(c + n)));
        }
      }
    }
  }
}

// Codes of eight bits multiply another way than smaller ones, which leave room for sums of products in 16 bits.
constexpr bool wide_codes(const Coding& c) { return c.whole || c.lookup == 1 || c.lookup == kOwnTable; }
// A sum of products of codes that starts at this times the activations' sum ends at the product of the values.
constexpr int32_t start_factor(const Coding& c) { return wide_codes(c) ? kStart8 : -c.less; }

template <Format kFormat, int kQuad>
TM_INLINE Line quad_codes(const uint8_t* planes, const uint8_t* table) {
  (void)table;
  constexpr Coding kind = coding(kFormat);
  if constexpr (kind.whole) {
    return load_line(planes + kQuad * kColumnLine);
  } else {
    Line codes;
    if constexpr (kind.nibble) {
      const Line both = load_line(planes + nibble_step(kind, kQuad % 4) * kColumnLine);
      codes = kQuad < 4 ? low_nibbles(both) : high_nibbles(both);
      if constexpr (kind.lookup == kOwnTable) codes = looked_up(codes, table);
      else if constexpr (kind.lookup != 0) codes = looked_up(codes, kLookup[kind.lookup - 1]);
    }
    if constexpr (kind.pair) {
      constexpr int place = pair_bit(kind), field = kQuad % 2 * 2 + kQuad / 4;
      const Line bits = load_line(planes + pair_step(kind, kQuad % 4 / 2) * kColumnLine);
      const Line some = masked(shifted<2 * field - place>(bits), static_cast<uint8_t>(3 << place));
      codes = kind.nibble ? either(codes, some) : some;
    }
    if constexpr (kind.single) {
      constexpr int place = single_bit(kind);
      const Line bits = load_line(planes);
      codes = either(codes, masked(shifted<kQuad - place>(bits), static_cast<uint8_t>(1 << place)));
    }
    return codes;
  }
}

template <Format kFormat>
TM_INLINE I dot_codes(I acc, Line codes, Quad quad) {
  return wide_codes(coding(kFormat)) ? dot8bit(acc, codes, quad) : dot4bit(acc, codes, quad);
}

template <Format kFormat, int kQuad, int R, int V>
TM_INLINE void dot_quad(I (&sums)[R][V], const uint8_t* planes, const int8_t* x, int64_t stride, const uint8_t* table) {
  if constexpr (R <= 2) {  // memory decides: lines are read in the order in which they lie (coding.h says why)
    Quad quad[R];
    for (int r = 0; r < R; ++r) quad[r] = splat_quad(x + r * stride + 4 * kQuad);
    for (int v = 0; v < V; ++v) {
      const Line line = quad_codes<kFormat, kQuad>(planes + v * kLine, table);
      for (int r = 0; r < R; ++r) {
        sums[r][v] = dot_codes<kFormat>(sums[r][v], line, quad[r]);
        hold(sums[r][v]);
      }
    }
  } else {
    Line line[V];
    for (int v = 0; v < V; ++v) line[v] = quad_codes<kFormat, kQuad>(planes + v * kLine, table);
    for (int r = 0; r < R; ++r) {
      const Quad quad = splat_quad(x + r * stride + 4 * kQuad);
      for (int v = 0; v < V; ++v) sums[r][v] = dot_codes<kFormat>(sums[r][v], line[v], quad);
    }
  }
}

template <Format kFormat>
TM_INLINE F group_scale(const uint8_t* head, const uint8_t* part, int half, int column) {
  constexpr Coding kind = coding(kFormat);
  const auto* halves = reinterpret_cast<const uint16_t*>(head) + column;
  const uint8_t* bytes = part + half * kTileColumns + column;
  if constexpr (kind.scales == Scales::power) return load_power(head + column);
  else if constexpr (kind.scales == Scales::floats) return load_e4m3(bytes);
  else if constexpr (kind.scales == Scales::half) return load_half(halves);
  else if constexpr (kind.scales == Scales::nibbles) return mul(load_half(halves), load_low_nibbles(bytes));
  else return mul(load_half(halves), load_int8(reinterpret_cast<const int8_t*>(bytes)));
}

// What is taken off a group's product per sum of its activations (the zero point itself for formats that have one).
template <Format kFormat>
TM_INLINE F group_minimum(const uint8_t* head, const uint8_t* part, int half, int column) {
  constexpr Coding kind = coding(kFormat);
  const auto* halves = reinterpret_cast<const uint16_t*>(head) + kTileColumns + column;
  const uint8_t* bytes = part + half * kTileColumns + column;
  if constexpr (kind.scales == Scales::nibbles) return mul(load_half(halves), load_high_nibbles(bytes));
  else if constexpr (kind.scales == Scales::half) return kind.zero ? load_half(halves) : sub(zero(), load_half(halves));
  else return mul(load_half(halves), load_int8(reinterpret_cast<const int8_t*>(bytes) + kTileColumns * part_groups(kind)));
}

struct Group {  // where one group of columns of k lies: half 0 and 1 of 32, or both (-1)
  const uint8_t* head;
  const uint8_t* part;
  int first;     // vector of the tile
  int64_t row;   // of the activations
  int64_t index; // of the 32
  const uint8_t* table;
};

template <Format kFormat, int kHalf, int R, int V>
TM_INLINE void add_group(F (&acc)[R][V], const Group& at, const Activations& x) {
  constexpr Coding kind = coding(kFormat);
  constexpr int half = kHalf > 0 ? 1 : 0;
  const int64_t groups = x.width / kGroup;
  const int8_t* q = x.q + at.row * x.width + at.index * kGroup;
  const uint8_t* planes = at.part + part_scales(kind) + at.first * kLine;
  I sums[R][V];
  int32_t total[R];
  for (int r = 0; r < R; ++r) {
    const int32_t* sum = x.sum + 2 * ((at.row + r) * groups + at.index);
    total[r] = kHalf < 0 ? sum[0] + sum[1] : sum[half];
    const I start = isplat(start_factor(kind) * total[r]);
    for (int v = 0; v < V; ++v) sums[r][v] = start;
  }
  if constexpr (kHalf < 0) {
    constexpr bool by_byte = kind.whole;  // the order of lines in memory, either way
    dot_quad<kFormat, by_byte ? 0 : 0>(sums, planes, q, x.width, at.table);
    dot_quad<kFormat, by_byte ? 1 : 4>(sums, planes, q, x.width, at.table);
    dot_quad<kFormat, by_byte ? 2 : 1>(sums, planes, q, x.width, at.table);
    dot_quad<kFormat, by_byte ? 3 : 5>(sums, planes, q, x.width, at.table);
    dot_quad<kFormat, by_byte ? 4 : 2>(sums, planes, q, x.width, at.table);
    dot_quad<kFormat, by_byte ? 5 : 6>(sums, planes, q, x.width, at.table);
    dot_quad<kFormat, by_byte ? 6 : 3>(sums, planes, q, x.width, at.table);
    dot_quad<kFormat, by_byte ? 7 : 7>(sums, planes, q, x.width, at.table);
  } else {
    dot_quad<kFormat, 4 * half + 0>(sums, planes, q, x.width, at.table);
    dot_quad<kFormat, 4 * half + 1>(sums, planes, q, x.width, at.table);
    dot_quad<kFormat, 4 * half + 2>(sums, planes, q, x.width, at.table);
    dot_quad<kFormat, 4 * half + 3>(sums, planes, q, x.width, at.table);
  }
  for (int v = 0; v < V; ++v) {
    const int column = (at.first + v) * 16;
    const F scale = group_scale<kFormat>(at.head, at.part, half, column);
    F minimum = zero();
    if constexpr (kind.offset) minimum = group_minimum<kFormat>(at.head, at.part, half, column);
    for (int r = 0; r < R; ++r) {
      const float by = x.scale[(at.row + r) * groups + at.index], all = static_cast<float>(total[r]);
      F dot = to_f(sums[r][v]);
      if constexpr (kind.zero) dot = sub(dot, mul(minimum, splat(all)));  // whole zero points: exact, below 2^24
      acc[r][v] = fma(mul(dot, splat(by)), scale, acc[r][v]);
      if constexpr (kind.offset && !kind.zero) acc[r][v] = fma(minimum, splat(-(all * by)), acc[r][v]);
    }
  }
}

// c [R, 16 V] += over units [begin, end), columns from vector `first` of the tile. `next`: what this pass brings nearer.
template <Format kFormat, int R, int V>
inline void quant_block(const uint8_t* tile, int group, int64_t begin, int64_t end, int first, const Activations& x,
                        int64_t row, float* c, bool resume, Share next) {
  constexpr Coding kind = coding(kFormat);
  F acc[R][V];
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) acc[r][v] = resume ? load(c + r * kTileColumns + v * 16) : zero();
  }
  const int64_t parts = unit_columns(kind, group) / kGroup, bytes = unit_bytes(kind, group), groups = x.width / kGroup;
  for (int64_t unit = begin; unit < end; ++unit) {
    const uint8_t* head = tile + unit * bytes;
    const uint8_t* at = head + unit_head(kind);
    for (int64_t part = 0; part < parts && unit * parts + part < groups; ++part, at += part_bytes(kind)) {
      if (R > 2) next.template step<!kind.whole>();
      const Group here{head, at, first, row, unit * parts + part, tile - tile_head(kind)};
      if constexpr (kind.columns == 16) {
        add_group<kFormat, 0>(acc, here, x);
        add_group<kFormat, 1>(acc, here, x);
      } else {
        add_group<kFormat, -1>(acc, here, x);
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) store(c + r * kTileColumns + v * 16, acc[r][v]);
  }
}

// The most rows of a register tile, given how many there are. For many, three rows of all 64 columns need half the
// broadcasts of six rows of 32, which pays where codes are quickly unpacked; for few, fewer readings of the weights do.
constexpr int64_t quant_rows_most(Format format, int64_t rows) {
  const bool three = coding(format).nibble && kQuantRows > 3 && quant_vectors(3) == 4;
  const bool even = format == Format::int8 || format == Format::int4 || format == Format::q4_k || format == Format::q6_k;
  return !even ? (kQuantRows < 4 ? 2 : 4) : three && rows > 12 ? 3 : kQuantRows;
}

template <Format kFormat, int R>
TM_INLINE void quant_rows(const uint8_t* tile, int group, int64_t begin, int64_t end, const Activations& x, int64_t row,
                          float* c, bool resume, Shares& next) {
  constexpr int V = quant_vectors(R);
  for (int v = 0; v < 4; v += V) {
    quant_block<kFormat, R, V>(tile, group, begin, end, v, x, row, c + v * 16, resume, next.take(V));
  }
}

// Any number of rows, cut into register tiles: evenly for what is used most, by powers of two for the others (each
// size is a function of its own).
template <Format kFormat>
void quant_tile(const uint8_t* tile, int group, int64_t begin, int64_t end, const Activations& x, int64_t first,
                int64_t rows, float* c, bool resume) {
  constexpr bool even = kFormat == Format::int8 || kFormat == Format::int4 || kFormat == Format::q4_k ||
                        kFormat == Format::q6_k;
  constexpr int most = static_cast<int>(quant_rows_most(kFormat, 1));
  const int64_t wanted = quant_rows_most(kFormat, rows);
  constexpr Coding kind = coding(kFormat);
  const int64_t bytes = (end - begin) * unit_bytes(kind, group), parts = unit_columns(kind, group) / kGroup;
  Shares next(tile + end * unit_bytes(kind, group), bytes, divide_up(rows, wanted), (end - begin) * parts);
  for (int64_t row = 0; row < rows;) {
    const int64_t left = rows - row;
    const int64_t n = even ? divide_up(left, divide_up(left, wanted)) : left >= most ? most : left >= 2 ? 2 : 1;
    float* to = c + row * kTileColumns;
    const int64_t at = first + row;
    switch (n) {
      case 1: quant_rows<kFormat, 1>(tile, group, begin, end, x, at, to, resume, next); break;
      case 2: quant_rows<kFormat, 2>(tile, group, begin, end, x, at, to, resume, next); break;
      case 3: quant_rows<kFormat, most < 3 || !even ? 2 : 3>(tile, group, begin, end, x, at, to, resume, next); break;
      case 4: quant_rows<kFormat, most < 4 ? 2 : 4>(tile, group, begin, end, x, at, to, resume, next); break;
      case 5: quant_rows<kFormat, most < 5 ? 2 : 5>(tile, group, begin, end, x, at, to, resume, next); break;
      default: quant_rows<kFormat, most < 6 ? 2 : 6>(tile, group, begin, end, x, at, to, resume, next); break;
    }
    row += n;
  }
}

using TileSums = void (*)(const uint8_t* tile, int group, int64_t begin, int64_t end, const Activations& x,
                          int64_t first, int64_t rows, float* c, bool resume);

TM_INLINE TileSums tile_sums(Format format) {
  switch (format) {
    case Format::int8: return quant_tile<Format::int8>;
    case Format::int4: return quant_tile<Format::int4>;
    case Format::int4_zero: return quant_tile<Format::int4_zero>;
    case Format::q4_1: return quant_tile<Format::q4_1>;
    case Format::q5_0: return quant_tile<Format::q5_0>;
    case Format::q5_1: return quant_tile<Format::q5_1>;
    case Format::q2_k: return quant_tile<Format::q2_k>;
    case Format::q3_k: return quant_tile<Format::q3_k>;
    case Format::q4_k: return quant_tile<Format::q4_k>;
    case Format::q5_k: return quant_tile<Format::q5_k>;
    case Format::q6_k: return quant_tile<Format::q6_k>;
    case Format::iq4_nl: return quant_tile<Format::iq4_nl>;
    case Format::iq4_xs: return quant_tile<Format::iq4_xs>;
    case Format::mxfp4: return quant_tile<Format::mxfp4>;
    case Format::int2: return quant_tile<Format::int2>;
    case Format::int2_zero: return quant_tile<Format::int2_zero>;
    case Format::int3: return quant_tile<Format::int3>;
    case Format::int3_zero: return quant_tile<Format::int3_zero>;
    case Format::int5_zero: return quant_tile<Format::int5_zero>;
    case Format::int6_zero: return quant_tile<Format::int6_zero>;
    case Format::int8_zero: return quant_tile<Format::int8_zero>;
    case Format::table: return quant_tile<Format::table>;
    case Format::nvfp4: return quant_tile<Format::nvfp4>;
    default: return nullptr;
  }
}

}  // namespace TM_NS
}  // namespace tokenmill
