// A decode step's integers. Owns: gathering rows into a step's inputs, and moving rows on by a token. Must not know:
// models. What recordings begin and end with, so that a step needs nothing from Python but the numbers of its rows.
#include <algorithm>
#include <stdexcept>

#include "ops.h"

namespace tokenmill {
namespace {

void require(bool condition, const char* message) {
  if (!condition) throw std::invalid_argument(message);
}

int64_t offset_of(const GatherOp& op, int64_t i) { return op.offsets == nullptr ? 0 : op.offsets[i]; }

}  // namespace

void gather(const GatherOp& op) {
  for (int64_t i = 0; i < op.count; ++i) {
    const int64_t row = op.row_ids[i];
    require(row >= 0 && row < op.rows, "gather: no such row");
    require(op.computed[row] >= 0 && offset_of(op, i) >= 0, "gather: a position before the row's tokens");
    require(op.computed[row] < op.length - offset_of(op, i), "gather: a position beyond the row's tokens");
  }
  for (int64_t i = 0; i < op.count; ++i) {
    const int64_t row = op.row_ids[i], position = op.computed[row] + offset_of(op, i);
    op.ids[i] = op.tokens[row * op.length + position];
    op.positions[i] = position;
    op.kv_len[i] = static_cast<int32_t>(position + 1);
  }
}

void gather_table(const GatherTableOp& op) {
  for (int64_t i = 0; i < op.count; ++i) {
    require(op.row_ids[i] >= 0 && op.row_ids[i] < op.rows, "gather: no such row");
    require(op.positions[i] >= 0 && op.positions[i] / op.block_size < op.width, "gather: a position beyond the table");
  }
  for (int64_t i = 0; i < op.count; ++i) {
    const int32_t* source = op.table + op.row_ids[i] * op.width;
    const int64_t entry = op.positions[i] / op.block_size;
    std::copy(source, source + entry + 1, op.out + i * op.width);
    op.entries[i] = static_cast<int32_t>(entry + 1);
    op.slots[i] = source[entry] * op.block_size + op.positions[i] % op.block_size;
  }
}

void advance(const AdvanceOp& op) {
  for (int64_t i = 0; i < op.count; ++i) {
    const int64_t row = op.row_ids[i];
    require(row >= 0 && row < op.rows, "advance: no such row");
    require(op.length[row] >= 0 && op.length[row] < op.room, "advance: the row is full");
  }
  for (int64_t i = 0; i < op.count; ++i) {
    const int64_t row = op.row_ids[i];
    op.tokens[row * op.room + op.length[row]] = static_cast<int32_t>(op.ids[i]);
    ++op.length[row];
    ++op.computed[row];
  }
}

}  // namespace tokenmill
