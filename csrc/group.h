// Ranks of one machine that exchange through memory which all of them map. Owns: slots, arrivals, and waiting for a rank
// that is late. Must not know: what is exchanged, processes.
//
// Every rank makes the same calls in the same order. In each it writes its part into its slot, says so, and reads the
// others' slots. Two sets of slots take turns: a rank that writes into a set again has seen all others arrive at the call
// between, so they have read the set before. A rank also says what it has written, so that one that makes another call
// is noticed instead of its bytes being taken for something else.
#pragma once
#include <cstddef>
#include <cstdint>

#include "ops.h"

namespace tokenmill {

class SharedGroup {
 public:
  // memory: `bytes` of zeros at first, at the same offset of the same file for every rank.
  SharedGroup(uint64_t memory, int64_t bytes, int rank, int size);
  // A new epoch: calls count from its beginning, whatever a rank did of the last one. Epochs grow.
  void begin(int64_t epoch);
  // This rank gives the epoch up: whoever waits for it in this epoch, or will, throws.
  void fail();
  // x [rows, bytes] of every rank -> out [rows, size * bytes], in rank order.
  void gather(const void* x, void* out, int64_t rows, int64_t bytes);
  // residual (or 0) + the sum over ranks, in rank order, in float32, rounded once. type: f32 or bf16.
  void reduce(const void* x, const void* residual, void* out, int64_t count, Type type);

 private:
  struct Head;
  struct Line;
  Line* line(int rank) const;
  uint8_t* slot(int rank) const;
  void arrive(uint64_t sent);
  void await(int rank) const;

  uint8_t* memory_;
  int64_t slot_bytes_;
  int rank_, size_;
  uint64_t count_ = 0;
};

}  // namespace tokenmill
