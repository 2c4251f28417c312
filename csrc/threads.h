// The one thread pool. Owns: who runs which task index. Must not know: what a task computes.
//
// A job is `count` independent tasks, claimed one by one: each thread's own range first, then what others have left at
// the end of theirs. So the split over threads never shows in a result.
// The caller works too and waits only for tasks that somebody has begun: a worker that the system does not schedule (a
// busy neighbour on its core) delays nothing. One that loses its core in the middle of a task gets the caller's.
#pragma once
#include <cstddef>
#include <cstdint>

namespace tokenmill {

using Task = void (*)(void* context, int64_t index);

int thread_limit();            // cores this process may use: affinity mask and cgroup quota
int threads();                 // current setting
void set_threads(int count);   // 0 means thread_limit()
void run_tasks(int64_t count, Task task, void* context);

template <class F>
inline void parallel_for(int64_t count, F& body) {
  run_tasks(count, [](void* context, int64_t index) { (*static_cast<F*>(context))(index); }, &body);
}

// Where the next product's weights lie: one or two ranges of `tasks` pieces each. Threads that wait bring the first bytes
// they will need nearer. Only ever prefetched, so it may be out of date.
struct Ahead {
  const uint8_t* at[2];
  int64_t tasks, task_bytes;
};
void announce(const Ahead& ahead);

// Scratch memory of the calling thread: grows, is reused, is 64-byte aligned. `slot` separates uses that overlap.
enum class Scratch { activations, partials, tile, scores, pointers, chunks, count };
void* scratch(Scratch slot, size_t bytes);

}  // namespace tokenmill
