#include "sparse.h"

#include <vector>

#include "threads.h"

namespace tokenmill {
namespace {

constexpr int64_t kMasks = 16;  // bytes, of a step
constexpr bool is_zero(uint16_t number) { return (number & 0x7fff) == 0; }  // -0 adds nothing either

int64_t tile_size(const uint16_t* weight, int64_t n, int64_t k, int64_t stride, int64_t tile) {
  int64_t there = 0;
  for (int64_t row = tile * kTileColumns; row < at_most(n, (tile + 1) * kTileColumns); ++row) {
    for (int64_t i = 0; i < k; ++i) there += !is_zero(weight[row * stride + i]);
  }
  return (k + 1) / 2 * kMasks + there * 2;
}

// Where tiles begin, and where the last one ends.
std::vector<int64_t> begins(const uint16_t* weight, int64_t n, int64_t k, int64_t stride) {
  const int64_t tiles = divide_up(n, kTileColumns);
  std::vector<int64_t> at(static_cast<size_t>(tiles) + 1);
  auto task = [&](int64_t tile) { at[static_cast<size_t>(tile) + 1] = tile_size(weight, n, k, stride, tile); };
  parallel_for(tiles, task);
  at[0] = (tiles + 1) * 8;
  for (size_t tile = 1; tile < at.size(); ++tile) at[tile] += at[tile - 1];
  return at;
}

// The place of number i of a column within the four lines of its step.
int64_t place_of(Format format, int64_t column, int64_t i) {
  return format == Format::bf16_sparse ? 2 * column + i % 2 : half_place(column, i % 2);
}

}  // namespace

int64_t pack_sparse(const uint16_t* weight, int64_t n, int64_t k, int64_t stride, Format format, void* out) {
  const std::vector<int64_t> begin = begins(weight, n, k, stride);
  if (!out) return begin.back() + kLineBytes;
  auto* base = static_cast<uint8_t*>(out);
  std::memcpy(base, begin.data(), begin.size() * 8);
  std::memset(base + begin.back(), 0, kLineBytes);
  auto task = [&](int64_t tile) {
    uint8_t* to = base + begin[static_cast<size_t>(tile)];
    for (int64_t step = 0; step < (k + 1) / 2; ++step) {
      uint16_t lines[4 * 32] = {};
      for (int64_t column = 0; column < at_most(kTileColumns, n - tile * kTileColumns); ++column) {
        const uint16_t* row = weight + (tile * kTileColumns + column) * stride;
        for (int64_t i = 2 * step; i < at_most(k, 2 * step + 2); ++i) lines[place_of(format, column, i)] = row[i];
      }
      uint32_t masks[4] = {};
      uint8_t* numbers = to + kMasks;
      for (int i = 0; i < 4 * 32; ++i) {
        if (is_zero(lines[i])) continue;
        masks[i / 32] |= uint32_t{1} << i % 32;
        std::memcpy(numbers, lines + i, 2);
        numbers += 2;
      }
      std::memcpy(to, masks, kMasks);
      to = numbers;
    }
  };
  parallel_for(divide_up(n, kTileColumns), task);
  return begin.back() + kLineBytes;
}

void read_sparse(const uint8_t* tile, Format format, int64_t column, int64_t k, float* out) {
  for (int64_t step = 0; step < (k + 1) / 2; ++step) {
    uint32_t masks[4];
    std::memcpy(masks, tile, kMasks);
    const uint8_t* numbers = tile + kMasks;
    for (int64_t i = 2 * step; i < at_most(k, 2 * step + 2); ++i) {
      const int64_t place = place_of(format, column, i);
      const uint32_t mask = masks[place / 32], bit = uint32_t{1} << place % 32;
      int64_t before = __builtin_popcount(mask & (bit - 1));
      for (int64_t line = 0; line < place / 32; ++line) before += __builtin_popcount(masks[line]);
      uint16_t number;
      std::memcpy(&number, numbers + 2 * before, 2);
      out[i] = !(mask & bit) ? 0.0f : format == Format::bf16_sparse ? to_float(bf16{number}) : half_to_float(number);
    }
    for (const uint32_t mask : masks) numbers += 2 * __builtin_popcount(mask);
    tile = numbers;
  }
}

}  // namespace tokenmill
