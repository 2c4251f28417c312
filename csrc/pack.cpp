#include "pack.h"

#include <cmath>

#include "planes.h"
#include "sparse.h"
#include "threads.h"

namespace tokenmill {
namespace {

constexpr int64_t kStep = kColumnLine;

int64_t tile_bytes(Format format, int64_t k, int group) {
  if (plain(format)) return plain_steps(format, k) * kStep;
  if (format == Format::fp8) return eight_tile(k, group);
  const Coding c = coding(format);
  return tile_size(c, k, group);
}

float read(const void* data, Type type, int64_t i) {
  return type == Type::f32 ? static_cast<const float*>(data)[i] : to_float(static_cast<const bf16*>(data)[i]);
}

void pack_dense_tile(const void* weight, Type type, int64_t n, int64_t k, int64_t stride, Format format, int64_t tile,
                     uint8_t* out) {
  constexpr int64_t kCut = 64;  // columns of k at a time: what is written stays in cache
  for (int64_t begin = 0; begin < k; begin += kCut) {
    for (int64_t c = 0; c < kTileColumns; ++c) {
      const int64_t row = tile * kTileColumns + c;
      if (row >= n) continue;
      const int64_t end = at_most(k, begin + kCut);
      if (format == Format::f32) {
        auto* to = reinterpret_cast<float*>(out) + c;
        for (int64_t i = begin; i < end; ++i) to[i * kTileColumns] = read(weight, type, row * stride + i);
      } else if (format == Format::f16) {
        const auto* from = static_cast<const uint16_t*>(weight) + row * stride;
        auto* to = reinterpret_cast<uint16_t*>(out);
        for (int64_t i = begin; i < end; ++i) to[half_place(c, i)] = from[i];
      } else if (type == Type::bf16) {
        const auto* from = static_cast<const bf16*>(weight) + row * stride;
        auto* to = reinterpret_cast<bf16*>(out) + 2 * c;
        for (int64_t i = begin; i < end; ++i) to[i / 2 * 2 * kTileColumns + i % 2] = from[i];
      } else {
        auto* to = reinterpret_cast<bf16*>(out) + 2 * c;
        for (int64_t i = begin; i < end; ++i) {
          to[i / 2 * 2 * kTileColumns + i % 2] = to_bf16(static_cast<const float*>(weight)[row * stride + i]);
        }
      }
    }
  }
}

// One column's 32 codes of one plane set.
void read_codes(const Coding& c, const uint8_t* planes, int64_t column, uint8_t* codes) {
  const uint8_t* at = planes + column * 4;
  for (int quad = 0; quad < 8; ++quad) {
    uint32_t found = 0;
    if (c.whole) found = read32(at + quad * kStep);
    if (c.nibble) found = read32(at + nibble_step(c, quad % 4) * kStep) >> (quad < 4 ? 0 : 4) & 0x0f0f0f0fu;
    if (c.pair) {
      const int field = quad % 2 * 2 + quad / 4;
      found |= (read32(at + pair_step(c, quad % 4 / 2) * kStep) >> 2 * field & 0x03030303u) << pair_bit(c);
    }
    if (c.single) found |= (read32(at) >> quad & 0x01010101u) << single_bit(c);
    std::memcpy(codes + 4 * quad, &found, 4);
  }
}

// Scale and offset of one group (the zero point of formats that have one) of one column.
struct Step {
  float scale, offset;
};
float half_at(const uint8_t* halves, int64_t i) {
  uint16_t bits;
  std::memcpy(&bits, halves + 2 * i, 2);
  return half_to_float(bits);
}
Step read_step(const Coding& c, const uint8_t* head, const uint8_t* part, int64_t half, int64_t column) {
  if (c.scales == Scales::floats) return {e4m3_to_float(part[half * kTileColumns + column]), 0.0f};
  if (c.scales == Scales::power) {
    const uint32_t power = head[column], bits = power < 2 ? 0x00200000u << power : (power - 1) << 23;
    float scale;
    std::memcpy(&scale, &bits, 4);
    return {scale, 0.0f};
  }
  const float first = half_at(head, column), second = c.offset ? half_at(head + 2 * kTileColumns, column) : 0.0f;
  if (c.scales == Scales::half) return {first, second};
  const uint8_t* bytes = part + half * kTileColumns + column;
  if (c.scales == Scales::nibbles) {
    return {first * static_cast<float>(*bytes & 15), -(second * static_cast<float>(*bytes >> 4))};
  }
  const float scale = first * static_cast<float>(static_cast<int8_t>(*bytes));
  const int minimum = c.offset ? bytes[kTileColumns * part_groups(c)] : 0;
  return {scale, -(second * static_cast<float>(minimum))};
}

void read_integers(const uint8_t* tile, const Coding& c, int group, int64_t column, int64_t k, float* out) {
  const int64_t columns = unit_columns(c, group), bytes = unit_bytes(c, group), width = kGroup / part_groups(c);
  uint8_t codes[kGroup];
  float factor = 1.0f;
  if (tile_head(c)) std::memcpy(&factor, tile + kTableBytes + 4 * column, 4);
  const uint8_t* table = c.lookup == kOwnTable ? tile : c.lookup ? kLookup[c.lookup - 1] : nullptr;
  for (int64_t unit = 0; unit * columns < k; ++unit) {
    const uint8_t* head = tile + tile_head(c) + unit * bytes;
    for (int64_t p = 0; p < columns / kGroup; ++p) {
      const uint8_t* part = head + unit_head(c) + p * part_bytes(c);
      const int64_t from = unit * columns + p * kGroup;
      if (from >= k) break;
      read_codes(c, part + part_scales(c), column, codes);
      for (int64_t i = 0; i < at_most(kGroup, k - from); ++i) {
        const Step step = read_step(c, head, part, i / width, column);
        int value = codes[i];
        if (table) value = table[value];
        if (c.zero) {
          out[from + i] = (static_cast<float>(value - c.less) - step.offset) * step.scale;
        } else {
          out[from + i] = static_cast<float>(value - c.less) * step.scale;
          if (c.offset) out[from + i] += step.offset;
        }
        out[from + i] *= factor;
      }
    }
  }
}

void read_eights(const uint8_t* tile, int group, int64_t column, int64_t k, float* out) {
  const int64_t columns = eight_columns(k, group);
  for (int64_t at = 0; at < k; at += columns, tile += eight_unit(columns)) {
    float scale;
    std::memcpy(&scale, tile + 4 * column, 4);
    for (int64_t i = 0; i < at_most(columns, k - at); ++i) {
      out[at + i] = e4m3_to_float(tile[eight_head + i / 4 * kStep + column * 4 + i % 4]) * scale;
    }
  }
}

void read_row(const Part& part, int64_t row, int64_t k, float* out) {
  const auto* base = static_cast<const uint8_t*>(part.weight);
  const int64_t c = row % kTileColumns, number = row / kTileColumns;
  if (sparse(part.format)) return read_sparse(base + sparse_begin(base, number), part.format, c, k, out);
  const uint8_t* tile = base + number * tile_bytes(part.format, k, part.group);
  if (part.format == Format::f32) {
    for (int64_t i = 0; i < k; ++i) out[i] = reinterpret_cast<const float*>(tile)[i * kTileColumns + c];
  } else if (part.format == Format::bf16) {
    const auto* pairs = reinterpret_cast<const bf16*>(tile);
    for (int64_t i = 0; i < k; ++i) out[i] = to_float(pairs[(i / 2 * kTileColumns + c) * 2 + i % 2]);
  } else if (part.format == Format::f16) {
    const auto* halves = reinterpret_cast<const uint16_t*>(tile);
    for (int64_t i = 0; i < k; ++i) out[i] = half_to_float(halves[half_place(c, i)]);
  } else if (part.format == Format::fp8) {
    read_eights(tile, part.group, c, k, out);
  } else {
    read_integers(tile, coding(part.format), part.group, c, k, out);
  }
}

}  // namespace

int64_t packed_bytes(Format format, int64_t n, int64_t k, int group) {
  return divide_up(n, kTileColumns) * tile_bytes(format, k, group);
}

void pack_dense(const void* weight, Type type, int64_t n, int64_t k, int64_t stride, Format format, void* out) {
  const int64_t bytes = tile_bytes(format, k, 0);
  auto task = [&](int64_t tile) {
    uint8_t* to = static_cast<uint8_t*>(out) + tile * bytes;
    if ((tile + 1) * kTileColumns > n || k % 2) std::memset(to, 0, static_cast<size_t>(bytes));
    pack_dense_tile(weight, type, n, k, stride, format, tile, to);
  };
  parallel_for(divide_up(n, kTileColumns), task);
}

void pack_quantised(const int8_t* q, const uint16_t* scales, const uint16_t* zeros, int64_t n, int64_t k, int group,
                    Format format, void* out) {
  const Coding c = coding(format);
  const int64_t groups = divide_up(k, group), bytes = unit_bytes(c, group);
  auto task = [&](int64_t tile) {
    uint8_t* to = static_cast<uint8_t*>(out) + tile * groups * bytes;
    for (int64_t g = 0; g < groups; ++g, to += bytes) {
      auto* scale = reinterpret_cast<uint16_t*>(to);
      for (int64_t column = 0; column < kTileColumns; ++column) {
        const int64_t row = tile * kTileColumns + column;
        scale[column] = row < n ? scales[row * groups + g] : 0;
        if (c.zero) scale[kTileColumns + column] = row < n ? zeros[row * groups + g] : 0;
      }
      for (int64_t part = 0; part < group / kGroup; ++part) {
        uint8_t* planes = to + unit_head(c) + part * part_bytes(c);
        const int64_t from = g * group + part * kGroup;
        for (int64_t column = 0; column < kTileColumns; ++column) {
          const int64_t row = tile * kTileColumns + column;
          uint8_t codes[kGroup];
          for (int64_t i = 0; i < kGroup; ++i) {
            const bool exists = row < n && from + i < k;
            codes[i] = static_cast<uint8_t>(exists ? q[row * k + from + i] + c.less : c.less);
          }
          write_codes(c, codes, column, planes);
        }
      }
    }
  };
  parallel_for(divide_up(n, kTileColumns), task);
}

void pack_eights(const uint8_t* data, const float* scales, int64_t n, int64_t k, int group, void* out) {
  const int64_t columns = eight_columns(k, group), units = divide_up(k, columns);
  auto task = [&](int64_t tile) {
    uint8_t* to = static_cast<uint8_t*>(out) + tile * eight_tile(k, group);
    std::memset(to, 0, static_cast<size_t>(eight_tile(k, group)));
    for (int64_t unit = 0; unit < units; ++unit, to += eight_unit(columns)) {
      for (int64_t column = 0; column < at_most(kTileColumns, n - tile * kTileColumns); ++column) {
        const int64_t row = tile * kTileColumns + column, at = unit * columns;
        std::memcpy(to + 4 * column, scales + row * units + unit, 4);
        for (int64_t i = 0; i < at_most(columns, k - at); ++i) {
          to[eight_head + i / 4 * kStep + column * 4 + i % 4] = data[row * k + at + i];
        }
      }
    }
  };
  parallel_for(divide_up(n, kTileColumns), task);
}

void pack_table(const Table16& from, int64_t n, int64_t k, int group, Format format, void* out) {
  const Coding c = coding(format);
  const int64_t columns = unit_columns(c, group), units = tile_units(c, k, group), bytes = unit_bytes(c, group);
  const int64_t scales_of_row = c.scales == Scales::floats ? k / c.columns : units;
  auto task = [&](int64_t tile) {
    uint8_t* to = static_cast<uint8_t*>(out) + tile * tile_size(c, k, group);
    std::memset(to, 0, static_cast<size_t>(tile_size(c, k, group)));
    for (int i = 0; i < kTableBytes; ++i) to[i] = from.table[i % 16];
    for (int64_t column = 0; column < at_most(kTileColumns, n - tile * kTileColumns); ++column) {
      const int64_t row = tile * kTileColumns + column;
      std::memcpy(to + kTableBytes + 4 * column, from.factors + row, 4);
      for (int64_t unit = 0; unit < units; ++unit) {
        uint8_t* head = to + tile_head(c) + unit * bytes;
        if (c.scales == Scales::half) {
          const uint16_t scale = static_cast<const uint16_t*>(from.scales)[row * scales_of_row + unit];
          std::memcpy(head + 2 * column, &scale, 2);
        }
        for (int64_t p = 0; p < columns / kGroup && unit * columns + p * kGroup < k; ++p) {
          uint8_t* part = head + unit_head(c) + p * part_bytes(c);
          const int64_t begin = unit * columns + p * kGroup;
          if (c.scales == Scales::floats) {
            const auto* scales = static_cast<const uint8_t*>(from.scales) + row * scales_of_row + begin / c.columns;
            part[column] = scales[0];
            part[kTileColumns + column] = scales[1];
          }
          write_codes(c, from.codes + row * k + begin, column, part + part_scales(c));
        }
      }
    }
  };
  parallel_for(divide_up(n, kTileColumns), task);
}

void quantise(const void* weight, Type type, int64_t n, int64_t k, int64_t stride, Format format, int group, int8_t* q,
              uint16_t* scales) {
  const int64_t groups = divide_up(k, group);
  auto task = [&](int64_t row) {
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t begin = g * group, end = at_most(k, begin + group);
      float top = 0.0f, owner = 0.0f;
      for (int64_t i = begin; i < end; ++i) {
        const float x = read(weight, type, row * stride + i);
        if (std::fabs(x) > top) {
          top = std::fabs(x);
          owner = x;
        }
      }
      const float wanted = format == Format::int8 ? top / 127.0f : owner / -8.0f;
      const uint16_t half = float_to_half(wanted);
      const float scale = half_to_float(half);
      scales[row * groups + g] = half;
      const int low = format == Format::int8 ? -127 : -8, high = format == Format::int8 ? 127 : 7;
      for (int64_t i = begin; i < end; ++i) {
        const float x = scale != 0.0f ? std::nearbyintf(read(weight, type, row * stride + i) / scale) : 0.0f;
        q[row * k + i] = static_cast<int8_t>(x < low ? low : x > high ? high : x);
      }
    }
  };
  parallel_for(n, task);
}

void unpack_rows(const Part* parts, int64_t count, int64_t k, const int64_t* ids, int64_t wanted, Type type, void* out) {
  auto task = [&](int64_t i) {
    auto* values = static_cast<float*>(scratch(Scratch::tile, static_cast<size_t>(k) * 4));
    int64_t row = ids[i], part = 0;
    while (part < count && row >= parts[part].n) row -= parts[part++].n;
    if (row < 0 || part == count) {
      std::memset(values, 0, static_cast<size_t>(k) * 4);
    } else {
      read_row(parts[part], row, k, values);
    }
    if (type == Type::f32) {
      std::memcpy(static_cast<float*>(out) + i * k, values, static_cast<size_t>(k) * 4);
    } else {
      for (int64_t j = 0; j < k; ++j) static_cast<bf16*>(out)[i * k + j] = to_bf16(values[j]);
    }
  };
  parallel_for(wanted, task);
}

}  // namespace tokenmill
