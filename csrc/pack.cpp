#include "pack.h"

#include <cmath>

#include "numbers.h"
#include "threads.h"

namespace tokenmill {
namespace {

constexpr int64_t kStep = 256;  // bytes of four lines

int64_t quant_lines(Format format) { return format == Format::int8 ? 8 : 4; }
int64_t group_bytes(Format format, int group) {
  return kTileColumns * 2 + group / kGroup * quant_lines(format) * kStep;
}
int64_t tile_bytes(Format format, int64_t k, int group) {
  if (format == Format::f32) return k * kStep;
  if (format == Format::bf16) return divide_up(k, 2) * kStep;
  return divide_up(k, group) * group_bytes(format, group);
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

void pack_group(const int8_t* q, int64_t n, int64_t k, Format format, int64_t tile, int64_t first, uint8_t* lines) {
  for (int64_t c = 0; c < kTileColumns; ++c) {
    const int64_t row = tile * kTileColumns + c;
    for (int64_t i = 0; i < kGroup; ++i) {
      const bool exists = row < n && first + i < k;
      const int value = exists ? q[row * k + first + i] : 0;
      if (format == Format::int8) {
        lines[i / 4 * kStep + c * 4 + i % 4] = static_cast<uint8_t>(value + 128);
      } else {
        uint8_t& byte = lines[i % 16 / 4 * kStep + c * 4 + i % 4];
        byte = static_cast<uint8_t>(i < 16 ? value + 8 : byte | (value + 8) << 4);
      }
    }
  }
}

int unpack_one(const uint8_t* lines, Format format, int64_t c, int64_t i) {
  if (format == Format::int8) return lines[i / 4 * kStep + c * 4 + i % 4] - 128;
  const uint8_t byte = lines[i % 16 / 4 * kStep + c * 4 + i % 4];
  return (i < 16 ? byte & 15 : byte >> 4) - 8;
}

float packed_value(const uint8_t* tile, Format format, int group, int64_t c, int64_t i) {
  if (format == Format::f32) return reinterpret_cast<const float*>(tile)[i * kTileColumns + c];
  if (format == Format::bf16) {
    return to_float(reinterpret_cast<const bf16*>(tile)[(i / 2 * kTileColumns + c) * 2 + i % 2]);
  }
  const uint8_t* at = tile + i / group * group_bytes(format, group);
  const float scale = half_to_float(reinterpret_cast<const uint16_t*>(at)[c]);
  const uint8_t* lines = at + kTileColumns * 2 + i % group / kGroup * quant_lines(format) * kStep;
  return scale * static_cast<float>(unpack_one(lines, format, c, i % kGroup));
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

void pack_quantised(const int8_t* q, const uint16_t* scales, int64_t n, int64_t k, int group, Format format,
                    void* out) {
  const int64_t groups = divide_up(k, group), bytes = group_bytes(format, group);
  auto task = [&](int64_t tile) {
    uint8_t* to = static_cast<uint8_t*>(out) + tile * groups * bytes;
    for (int64_t g = 0; g < groups; ++g, to += bytes) {
      auto* scale = reinterpret_cast<uint16_t*>(to);
      for (int64_t c = 0; c < kTileColumns; ++c) {
        const int64_t row = tile * kTileColumns + c;
        scale[c] = row < n ? scales[row * groups + g] : 0;
      }
      for (int64_t part = 0; part < group / kGroup; ++part) {
        uint8_t* lines = to + kTileColumns * 2 + part * quant_lines(format) * kStep;
        pack_group(q, n, k, format, tile, g * group + part * kGroup, lines);
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

void unpack_rows(const void* packed, Format format, int64_t n, int64_t k, int group, const int64_t* ids, int64_t count,
                 Type type, void* out) {
  const int64_t bytes = tile_bytes(format, k, group);
  auto task = [&](int64_t row) {
    const int64_t id = ids[row];
    const bool exists = id >= 0 && id < n;
    const uint8_t* tile = static_cast<const uint8_t*>(packed) + (exists ? id / kTileColumns : 0) * bytes;
    for (int64_t i = 0; i < k; ++i) {
      const float value = exists ? packed_value(tile, format, group, id % kTileColumns, i) : 0.0f;
      if (type == Type::f32) {
        static_cast<float*>(out)[row * k + i] = value;
      } else {
        static_cast<bf16*>(out)[row * k + i] = to_bf16(value);
      }
    }
  };
  parallel_for(count, task);
}

}  // namespace tokenmill
