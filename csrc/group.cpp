#include "group.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>

#include "numbers.h"

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#endif

namespace tokenmill {
namespace {

constexpr int64_t kLine = 64;
constexpr int kSpins = 400, kYields = 16;  // a few microseconds, then the core is somebody else's
constexpr int64_t kLookNs = 20'000'000;    // how often a sleeper looks whether the others have given up
constexpr int kEpochShift = 40;            // calls of an epoch, below its number

// What a rank sends in a call, in one word: `rows` of `bytes` each to be gathered, or numbers of `bytes` each to be added.
constexpr int kRowsShift = 24, kSumShift = 63;
uint64_t sent_word(bool sum, int64_t rows, int64_t bytes) {
  return static_cast<uint64_t>(sum) << kSumShift | static_cast<uint64_t>(rows) << kRowsShift | static_cast<uint64_t>(bytes);
}

std::string sent_text(uint64_t word) {
  const uint64_t rows = (word & ~(uint64_t{1} << kSumShift)) >> kRowsShift, bytes = word & ((uint64_t{1} << kRowsShift) - 1);
  return std::to_string(rows) + (word >> kSumShift ? " numbers of " : " rows of ") + std::to_string(bytes) + " bytes" +
         (word >> kSumShift ? " to add" : "");
}

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Until `word` is not `seen` any more, or a while has passed.
void sleep_on(std::atomic<uint32_t>& word, uint32_t seen) {
#if defined(__linux__)
  const timespec most{0, kLookNs};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, seen, &most, nullptr, 0);
#else
  if (word.load() == seen) std::this_thread::sleep_for(std::chrono::microseconds(20));
#endif
}

void wake(std::atomic<uint32_t>& word) {
#if defined(__linux__)
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, 1 << 30, nullptr, nullptr, 0);
#endif
}

float number(const uint8_t* data, Type type, int64_t i) {
  if (type == Type::f32) return reinterpret_cast<const float*>(data)[i];
  return to_float(reinterpret_cast<const bf16*>(data)[i]);
}

}  // namespace

struct SharedGroup::Head {
  std::atomic<uint64_t> failed;  // 1 + the last epoch that a rank gave up
  std::atomic<uint32_t> closed;  // set by whoever looks after the ranks
};

struct alignas(kLine) SharedGroup::Line {
  std::atomic<uint64_t> arrived;    // epoch and call
  std::atomic<uint32_t> turns;      // changes with `arrived`: what sleepers sleep on
  std::atomic<uint32_t> sleepers;
  std::atomic<uint64_t> sent[2];    // what lies in the slots, by set
};

SharedGroup::SharedGroup(uint64_t memory, int64_t bytes, int rank, int size)
    : memory_(reinterpret_cast<uint8_t*>(static_cast<uintptr_t>(memory))), rank_(rank), size_(size) {
  if (memory == 0 || size < 1 || rank < 0 || rank >= size) throw std::invalid_argument("no such rank");
  slot_bytes_ = (bytes - kLine * (size + 1)) / (2 * size) / kLine * kLine;
  if (slot_bytes_ < kLine) throw std::invalid_argument("too little shared memory for these ranks");
}

SharedGroup::Line* SharedGroup::line(int rank) const { return reinterpret_cast<Line*>(memory_ + kLine * (1 + rank)); }

uint8_t* SharedGroup::slot(int rank) const {
  const auto set = static_cast<int64_t>(count_ & 1);
  return memory_ + kLine * (size_ + 1) + (set * size_ + rank) * slot_bytes_;
}

void SharedGroup::begin(int64_t epoch) {
  const uint64_t first = static_cast<uint64_t>(epoch + 1) << kEpochShift;
  if (first > count_) {
    count_ = first;
    line(rank_)->arrived.store(first, std::memory_order_release);
  }
}

void SharedGroup::fail() {
  auto& failed = reinterpret_cast<Head*>(memory_)->failed;
  const uint64_t mine = count_ >> kEpochShift;
  uint64_t before = failed.load();
  while (before < mine && !failed.compare_exchange_weak(before, mine)) {
  }
  Line* line = this->line(rank_);
  line->turns.fetch_add(1);
  wake(line->turns);
}

void SharedGroup::arrive(uint64_t sent) {
  Line* mine = line(rank_);
  mine->sent[count_ & 1].store(sent, std::memory_order_relaxed);
  mine->arrived.store(count_, std::memory_order_release);
  mine->turns.fetch_add(1);
  if (mine->sleepers.load() > 0) wake(mine->turns);
}

void SharedGroup::await(int rank) const {
  const auto* head = reinterpret_cast<const Head*>(memory_);
  Line* other = line(rank);
  for (int64_t tries = 0;; ++tries) {
    const uint32_t turn = other->turns.load();
    const uint64_t arrived = other->arrived.load(std::memory_order_acquire);
    if (arrived >= count_ && arrived >> kEpochShift == count_ >> kEpochShift) {
      const uint64_t sent = other->sent[count_ & 1].load(std::memory_order_relaxed);
      const uint64_t mine = line(rank_)->sent[count_ & 1].load(std::memory_order_relaxed);
      if (sent == mine) return;
      throw std::runtime_error("ranks exchange different things: rank " + std::to_string(rank_) + " " + sent_text(mine) +
                               ", rank " + std::to_string(rank) + " " + sent_text(sent));
    }
    if (arrived > count_ || head->failed.load() >= count_ >> kEpochShift) {
      throw std::runtime_error("another rank has given this step up");
    }
    if (head->closed.load() != 0) throw std::runtime_error("the other ranks are gone");
    if (tries < kSpins) {
      pause();
    } else if (tries < kSpins + kYields) {
      std::this_thread::yield();
    } else {
      other->sleepers.fetch_add(1);
      sleep_on(other->turns, turn);
      other->sleepers.fetch_sub(1);
    }
  }
}

void SharedGroup::gather(const void* x, void* out, int64_t rows, int64_t bytes) {
  if (bytes > slot_bytes_) throw std::invalid_argument("a row is longer than what ranks exchange at a time");
  const int64_t most = std::max<int64_t>(1, slot_bytes_ / std::max<int64_t>(1, bytes)), stride = bytes * size_;
  for (int64_t from = 0; from < rows; from += most) {
    const int64_t count = std::min(most, rows - from);
    const auto* mine = static_cast<const uint8_t*>(x) + from * bytes;
    ++count_;
    std::memcpy(slot(rank_), mine, static_cast<size_t>(count * bytes));
    arrive(sent_word(false, count, bytes));
    for (int i = 0; i < size_; ++i) {
      const int rank = (rank_ + i) % size_;
      if (rank != rank_) await(rank);
      const uint8_t* part = rank == rank_ ? mine : slot(rank);
      uint8_t* to = static_cast<uint8_t*>(out) + from * stride + rank * bytes;
      for (int64_t row = 0; row < count; ++row) {
        std::memcpy(to + row * stride, part + row * bytes, static_cast<size_t>(bytes));
      }
    }
  }
}

void SharedGroup::reduce(const void* x, const void* residual, void* out, int64_t count, Type type) {
  const int64_t element = type == Type::f32 ? 4 : 2, most = slot_bytes_ / element;
  for (int64_t from = 0; from < count; from += most) {
    const int64_t n = std::min(most, count - from), at = from * element;
    ++count_;
    std::memcpy(slot(rank_), static_cast<const uint8_t*>(x) + at, static_cast<size_t>(n * element));
    arrive(sent_word(true, n, element));
    for (int rank = 0; rank < size_; ++rank) {
      if (rank != rank_) await(rank);
    }
    const auto* beside = residual ? static_cast<const uint8_t*>(residual) + at : nullptr;
    for (int64_t i = 0; i < n; ++i) {
      float total = 0.0f;
      for (int rank = 0; rank < size_; ++rank) total += number(slot(rank), type, i);
      if (beside) total += number(beside, type, i);
      if (type == Type::f32) {
        reinterpret_cast<float*>(static_cast<uint8_t*>(out) + at)[i] = total;
      } else {
        reinterpret_cast<bf16*>(static_cast<uint8_t*>(out) + at)[i] = to_bf16(total);
      }
    }
  }
}

}  // namespace tokenmill
