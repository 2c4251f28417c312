// Where the pool's threads run. Owns: asking the system for a thread's core and moving threads between cores; where there
// is no such system, all of it does nothing. Must not know: tasks.
#pragma once
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#endif

namespace tokenmill {

inline int core() {
#if defined(__linux__)
  return sched_getcpu();
#else
  return -1;
#endif
}

// A thread of the pool, with what the others know of it.
class Member {
 public:
  // By the thread itself, first of all.
  void is_me() {
#if defined(__linux__)
    id_ = static_cast<pid_t>(syscall(SYS_gettid));
    pthread_getcpuclockid(pthread_self(), &clock_);
#endif
  }
  void begins() { holds_.store(true, std::memory_order_release); }
  void ends() { holds_.store(false, std::memory_order_release); }

  // By the thread that waits for it, again and again: did it hold a task and not run since the last look?
  bool stands_still() {
#if defined(__linux__)
    if (!holds_.load(std::memory_order_acquire)) return false;
    timespec ran{};
    if (clock_gettime(clock_, &ran) != 0) return false;
    const int64_t before = ran_;
    ran_ = ran.tv_sec * int64_t{1000000000} + ran.tv_nsec;
    return ran_ == before;
#else
    return false;
#endif
  }

  // Onto the core of the calling thread, which should then sleep. Only where both may use the same cores: another mask
  // is somebody's wish, or that of `leave`.
  bool bring_here() {
#if defined(__linux__)
    cpu_set_t allowed, mine, here;
    const int at = core();
    if (at < 0 || at >= CPU_SETSIZE || sched_getaffinity(0, sizeof(mine), &mine) != 0) return false;
    if (sched_getaffinity(id_, sizeof(allowed), &allowed) != 0 || !CPU_EQUAL(&allowed, &mine)) return false;
    CPU_ZERO(&here);
    CPU_SET(at, &here);
    if (sched_setaffinity(id_, sizeof(here), &here) != 0) return false;
    sched_setaffinity(id_, sizeof(allowed), &allowed);
    brought_.store(true, std::memory_order_relaxed);
    return true;
#else
    return false;
#endif
  }

  // By the thread itself, while it holds no task: off the core of the thread it works for. With a stranger on another
  // core the system may put both of ours on one, where they take turns; it has no reason to part them again, since two
  // against one is as even as one against two. `threads`: nothing is done where they outnumber the cores.
  void leave(int other, int threads) {
#if defined(__linux__)
    const bool brought = brought_.load(std::memory_order_relaxed);
    if (brought) brought_.store(false, std::memory_order_relaxed);
    if (core() != other || other < 0 || other >= CPU_SETSIZE) return;
    const auto now = std::chrono::steady_clock::now();
    if (!brought && now < next_) return;
    next_ = now + std::chrono::milliseconds(2);
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return;
    if (CPU_COUNT(&allowed) < std::max(threads, 2)) return;
    cpu_set_t elsewhere = allowed;
    CPU_CLR(other, &elsewhere);
    sched_setaffinity(0, sizeof(elsewhere), &elsewhere);  // the system moves it at once,
    sched_setaffinity(0, sizeof(allowed), &allowed);      // and is free to move it again
#else
    (void)other, (void)threads;
#endif
  }

 private:
  std::atomic<bool> holds_{false}, brought_{false};
  int64_t ran_ = -1;
  std::chrono::steady_clock::time_point next_{};
#if defined(__linux__)
  pid_t id_ = 0;
  clockid_t clock_{};
#endif
};

}  // namespace tokenmill
