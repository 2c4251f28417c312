#include "threads.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include "cores.h"

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tokenmill {
namespace {

constexpr int kMaxThreads = 256;
constexpr int kSpinMicroseconds = 60;  // longer than what Python does between two steps, far below a slice
constexpr int kPatienceMicroseconds = 10;  // the last tasks of a job seldom end further apart than that
constexpr int kLookMicroseconds = 10;      // a thread that runs has run for some of it
constexpr int64_t kMaxTasks = (1 << 20) - 1;
constexpr int64_t kAheadBytes = 96 << 10;  // of each range: the second-level cache holds them besides what is in use

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("isb");  // `yield` is nothing on most cores
#endif
}

int cgroup_limit() {
  long long quota = 0, period = 0;
  if (FILE* file = std::fopen("/sys/fs/cgroup/cpu.max", "r")) {
    const int fields = std::fscanf(file, "%lld %lld", &quota, &period);
    std::fclose(file);
    if (fields == 2 && quota > 0 && period > 0) return static_cast<int>(std::max(1LL, quota / period));
    return kMaxThreads;
  }
  FILE* file = std::fopen("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "r");
  if (!file) return kMaxThreads;
  if (std::fscanf(file, "%lld", &quota) != 1) quota = 0;
  std::fclose(file);
  file = std::fopen("/sys/fs/cgroup/cpu/cpu.cfs_period_us", "r");
  if (!file) return kMaxThreads;
  if (std::fscanf(file, "%lld", &period) != 1) period = 0;
  std::fclose(file);
  return quota > 0 && period > 0 ? static_cast<int>(std::max(1LL, quota / period)) : kMaxThreads;
}

// generation (24 bits) | end (20) | next task (20): one word, so that a claim proves that the job is current.
uint64_t pack(uint64_t generation, int64_t next, int64_t end) {
  return (generation & 0xffffff) << 40 | static_cast<uint64_t>(end) << 20 | static_cast<uint64_t>(next);
}
uint64_t generation_of(uint64_t word) { return word >> 40; }
int64_t end_of(uint64_t word) { return static_cast<int64_t>(word >> 20 & 0xfffff); }
int64_t next_of(uint64_t word) { return static_cast<int64_t>(word & 0xfffff); }
constexpr uint64_t kOneFromEnd = uint64_t{1} << 20;

using Clock = std::chrono::steady_clock;

// How far a thread is in what `announce` said.
struct Fetched {
  uint64_t said = 0;
  const uint8_t* at[2] = {};
  int64_t lines[2] = {};
};

class Pool {
 public:
  explicit Pool(int count)
      : count_(count), crowded_(count > thread_limit()), queues_(static_cast<size_t>(count)) {
    for (int i = 1; i < count; ++i) workers_.emplace_back([this, i] { work(i); });
  }

  // Afterwards run() still works, on the caller alone: somebody may just have fetched a pool that is replaced.
  void stop() {
    {
      std::lock_guard<std::mutex> hold(sleep_);
      stop_.store(true);
    }
    wake_.notify_all();
    for (auto& worker : workers_) worker.join();
    workers_.clear();
  }

  int count() const { return count_; }
  std::mutex& busy() { return busy_; }

  // A thread's tasks follow each other in memory, as the hardware expects; only at the end others take some of them.
  void run(int64_t count, Task task, void* context) {
    task_ = task;
    context_ = context;
    caller_core_.store(core(), std::memory_order_relaxed);
    finished_.store(0, std::memory_order_relaxed);
    const uint64_t generation = generation_of(word(0).load(std::memory_order_relaxed)) + 1;
    for (int i = count_ - 1; i >= 0; --i) {
      word(i).store(pack(generation, count * i / count_, count * (i + 1) / count_), std::memory_order_seq_cst);
    }
    if (sleeping_.load(std::memory_order_seq_cst) > 0) {
      { std::lock_guard<std::mutex> hold(sleep_); }
      wake_.notify_all();
    }
    while (claim_any(0)) {
    }
    wait_for(count);
  }

  void announce(const Ahead& ahead) {
    for (int i = 0; i < 2; ++i) ahead_at_[i].store(ahead.at[i], std::memory_order_relaxed);
    ahead_tasks_.store(ahead.tasks, std::memory_order_relaxed);
    ahead_bytes_.store(ahead.task_bytes, std::memory_order_relaxed);
    said_.fetch_add(1, std::memory_order_release);
  }

 private:
  struct alignas(64) Queue {
    std::atomic<uint64_t> word{0};
    alignas(64) Member member;
  };

  std::atomic<uint64_t>& word(int i) { return queues_[static_cast<size_t>(i)].word; }
  Member& member(int i) { return queues_[static_cast<size_t>(i)].member; }

  // By the caller, when nothing is left to claim. What a thread has begun and does not go on with is a thread that lost
  // its core in the middle of a task, for as long as a stranger's turn lasts; this core has nothing to do meanwhile.
  void wait_for(int64_t count) {
    const auto done = [&] { return finished_.load(std::memory_order_seq_cst) >= count; };
    if (done()) return;
    auto look = Clock::now() + std::chrono::microseconds(kPatienceMicroseconds);
    for (int spins = 1; !done(); ++spins) {
      // To yield is to stand behind every stranger, though what one waits for runs elsewhere: only with too few cores.
      if (crowded_ && spins > 2000) {
        std::this_thread::yield();
        continue;
      }
      fetch_ahead(fetched_, 0);
      relax();
      if (spins % 32 != 0 || crowded_ || Clock::now() < look) continue;
      if (make_room()) {
        std::unique_lock<std::mutex> hold(done_);
        all_done_.wait(hold, done);
      }
      waiting_.store(false, std::memory_order_relaxed);
      look = Clock::now() + std::chrono::microseconds(kLookMicroseconds);
    }
  }

  // Brings those that stand still with a task to this core; true: there are some, and this thread has to sleep.
  bool make_room() {
    bool any = false;
    for (int i = 1; i < count_; ++i) {
      if (!member(i).stands_still()) continue;
      waiting_.store(true, std::memory_order_seq_cst);
      any |= member(i).bring_here();
    }
    return any;
  }

  bool claim_any(int me) {
    if (claim(me, me, false)) return true;
    for (int i = 1; i < count_; ++i) {
      if (claim(me, (me + i) % count_, true)) return true;
    }
    return false;
  }

  bool claim(int me, int owner, bool last) {
    std::atomic<uint64_t>& queue = word(owner);
    uint64_t found = queue.load(std::memory_order_acquire), left;
    do {
      if (next_of(found) >= end_of(found)) return false;
      left = last ? found - kOneFromEnd : found + 1;
    } while (!queue.compare_exchange_weak(found, left, std::memory_order_acq_rel, std::memory_order_acquire));
    // The claimed task is unfinished, so run() is still waiting: task_ and context_ belong to this job.
    member(me).begins();
    task_(context_, last ? end_of(left) : next_of(found));
    member(me).ends();
    finished_.fetch_add(1, std::memory_order_seq_cst);
    if (waiting_.load(std::memory_order_seq_cst)) {
      { std::lock_guard<std::mutex> hold(done_); }
      all_done_.notify_one();
    }
    return true;
  }

  // A few lines of what this thread will read first in the next product: memory need not rest while it waits.
  void fetch_ahead(Fetched& mine, int me) {
    const uint64_t said = said_.load(std::memory_order_acquire);
    if (said != mine.said) {
      mine.said = said;
      const int64_t bytes = ahead_bytes_.load(std::memory_order_relaxed);
      const int64_t first = ahead_tasks_.load(std::memory_order_relaxed) * me / count_;
      for (int i = 0; i < 2; ++i) {
        const uint8_t* at = ahead_at_[i].load(std::memory_order_relaxed);
        mine.at[i] = at ? at + first * bytes : at;
        mine.lines[i] = at ? std::min<int64_t>(bytes, kAheadBytes) / 64 : 0;
      }
    }
    const int i = mine.lines[0] > 0 ? 0 : 1;
    for (int line = 0; line < 4 && mine.lines[i] > 0; ++line, --mine.lines[i], mine.at[i] += 64) {
      __builtin_prefetch(mine.at[i], 0, 2);
    }
  }

  void work(int me) {
    Fetched fetched;
    member(me).is_me();
    while (!stop_.load(std::memory_order_relaxed)) {
      const uint64_t seen = generation_of(word(me).load(std::memory_order_acquire));
      do {
        member(me).leave(caller_core_.load(std::memory_order_relaxed), count_);
      } while (claim_any(me));
      const auto until = Clock::now() + std::chrono::microseconds(kSpinMicroseconds);
      bool news = false;
      for (int spins = 1; !news; ++spins) {
        fetch_ahead(fetched, me);
        relax();
        news = generation_of(word(me).load(std::memory_order_acquire)) != seen;
        if (spins % 64 == 0 && Clock::now() > until) break;
      }
      if (!news) sleep(me, seen);
    }
  }

  void sleep(int me, uint64_t seen) {
    std::unique_lock<std::mutex> hold(sleep_);
    sleeping_.fetch_add(1, std::memory_order_seq_cst);
    wake_.wait(hold, [&] { return stop_.load() || generation_of(word(me).load(std::memory_order_seq_cst)) != seen; });
    sleeping_.fetch_sub(1, std::memory_order_seq_cst);
  }

  const int count_;
  const bool crowded_;
  std::vector<Queue> queues_;
  std::vector<std::thread> workers_;
  std::mutex busy_;
  Task task_ = nullptr;
  void* context_ = nullptr;
  Fetched fetched_;
  std::atomic<const uint8_t*> ahead_at_[2] = {};
  std::atomic<int64_t> ahead_tasks_{0}, ahead_bytes_{0};
  std::atomic<uint64_t> said_{0};
  alignas(64) std::atomic<int64_t> finished_{0};
  alignas(64) std::atomic<int> sleeping_{0};
  std::atomic<bool> waiting_{false};
  std::atomic<bool> stop_{false};
  std::atomic<int> caller_core_{-1};
  std::mutex sleep_;
  std::condition_variable wake_;
  std::mutex done_;
  std::condition_variable all_done_;
};

std::mutex pool_change;
std::atomic<Pool*> pool{nullptr};
std::atomic<int> setting{0};

void forget_after_fork() {
  // The child has no workers and may hold a locked mutex: leave the old pool alone, start anew when needed.
  pool.store(nullptr);
  new (&pool_change) std::mutex;
}

Pool* current_pool() {
  Pool* found = pool.load(std::memory_order_acquire);
  if (found) return found;
  std::lock_guard<std::mutex> hold(pool_change);
  found = pool.load(std::memory_order_acquire);
  if (found) return found;
#if defined(__linux__)
  static const int registered = pthread_atfork(nullptr, nullptr, forget_after_fork);
  (void)registered;
#endif
  found = new Pool(threads());
  pool.store(found, std::memory_order_release);
  return found;
}

struct Buffers {
  void* data[static_cast<int>(Scratch::count)] = {};
  size_t bytes[static_cast<int>(Scratch::count)] = {};
  ~Buffers() {
    for (void* buffer : data) std::free(buffer);
  }
};

}  // namespace

int thread_limit() {
  int limit = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
#if defined(__linux__)
  cpu_set_t mask;
  if (sched_getaffinity(0, sizeof(mask), &mask) == 0) limit = std::max(1, CPU_COUNT(&mask));
#endif
  return std::min({limit, cgroup_limit(), kMaxThreads});
}

int threads() {
  int count = setting.load(std::memory_order_relaxed);
  if (count == 0) {
    count = thread_limit();
    setting.store(count, std::memory_order_relaxed);
  }
  return count;
}

void set_threads(int count) {
  count = count <= 0 ? thread_limit() : std::min(count, kMaxThreads);
  std::lock_guard<std::mutex> hold(pool_change);
  setting.store(count);
  Pool* old = pool.load();
  if (!old || old->count() == count) return;
  std::lock_guard<std::mutex> idle(old->busy());
  pool.store(nullptr);
  old->stop();
}

void run_tasks(int64_t count, Task task, void* context) {
  if (count > 1 && count <= kMaxTasks && threads() > 1) {
    Pool* found = current_pool();
    std::unique_lock<std::mutex> mine(found->busy(), std::try_to_lock);
    if (mine.owns_lock()) {
      found->run(count, task, context);
      return;
    }
  }
  // One task, one thread, or the pool is busy with another caller: the result is the same.
  for (int64_t index = 0; index < count; ++index) task(context, index);
}

void announce(const Ahead& ahead) {
  if (Pool* found = pool.load(std::memory_order_acquire)) found->announce(ahead);
}

void* scratch(Scratch slot, size_t bytes) {
  thread_local Buffers buffers;
  const int index = static_cast<int>(slot);
  if (buffers.bytes[index] < bytes) {
    std::free(buffers.data[index]);
    const size_t rounded = (bytes + bytes / 4 + 4095) / 4096 * 4096;
    buffers.data[index] = std::aligned_alloc(64, rounded);
    if (!buffers.data[index]) {
      buffers.bytes[index] = 0;
      throw std::bad_alloc();
    }
    buffers.bytes[index] = rounded;
  }
  return buffers.data[index];
}

}  // namespace tokenmill
