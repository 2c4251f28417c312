// The register tile of every product with float accumulation: R rows times 64 columns, sums in ascending k.
//
// Packed weights (and attention's packed keys) lie as tiles of 64 columns: for each step of k, four lines of 64 bytes,
// one dword a column. A dword is one float32, two bf16 or four e4m3 of adjacent k (f16: see coding.h). Each output has a
// single accumulator, so the tile's shape (rows at a time, columns at a time, where k is cut to stay in cache) never
// shows in the result.
namespace tokenmill {
namespace TM_NS {

constexpr int kLine = 64;
constexpr int kStepBytes = 4 * kLine;
// How many bytes ahead a single pass over float32 and e4m3 asks for: enough to hide memory's latency, and soon used. What
// is used up faster arrives sooner if nobody asks: a processor sees reads in ascending order and fetches ahead by itself.
constexpr int64_t kAhead = 3072;

// The part of the next weights that one pass over these brings nearer, a little at each step.
struct Share {
  const uint8_t* at;
  const uint8_t* stop;
  int64_t lines;  // at each step

  template <bool kRead = false>
  TM_INLINE void step() {
    for (int64_t i = 0; i < lines && at < stop; ++i, at += kLine) kRead ? prefetch_read(at) : prefetch(at);
  }
};

// Hands out `bytes` from `at` in equal shares: `tiles` register tiles pass over the weights, each of `steps` steps.
struct Shares {
  const uint8_t* at;
  const uint8_t* stop;
  int64_t share, steps;  // share: for a pass over all four vectors

  TM_INLINE Shares(const uint8_t* from, int64_t bytes, int64_t tiles, int64_t steps)
      : at(from), stop(from + bytes), share(divide_up(bytes, 4 * kLine * tiles) * 4 * kLine), steps(steps) {}
  TM_INLINE Share take(int vectors) {
    const uint8_t* from = at;
    at += share / 4 * vectors;
    return {from, at < stop ? at : stop, divide_up(share / 4 * vectors, kLine * steps)};
  }
};

struct FloatStep {  // float32 weights, float32 activations
  using X = float;
  static constexpr int kPerStep = 1;
  template <int R, int V>
  static TM_INLINE void run(F (&acc)[R][V], const uint8_t* w, const float* x, int64_t stride) {
    for (int v = 0; v < V; ++v) {
      const F line = load(reinterpret_cast<const float*>(w + v * kLine));
      for (int r = 0; r < R; ++r) acc[r][v] = fma(line, splat(x[r * stride]), acc[r][v]);
    }
  }
};

struct WideStep {  // bf16 weights, float32 activations
  using X = float;
  static constexpr int kPerStep = 2;
  template <int R, int V>
  static TM_INLINE void run(F (&acc)[R][V], const uint8_t* w, const float* x, int64_t stride) {
    Line line[V];
    for (int v = 0; v < V; ++v) line[v] = load_line(w + v * kLine);
    multiply(acc, line, x, stride);
  }
  template <int R, int V>
  static TM_INLINE void multiply(F (&acc)[R][V], const Line (&line)[V], const float* x, int64_t stride) {
    for (int v = 0; v < V; ++v) {
      const F even = even_half(line[v]), odd = odd_half(line[v]);
      for (int r = 0; r < R; ++r) {
        acc[r][v] = fma(even, splat(x[r * stride]), acc[r][v]);
        acc[r][v] = fma(odd, splat(x[r * stride + 1]), acc[r][v]);
      }
    }
  }
};

struct HalfStep {  // f16 weights, float32 activations
  using X = float;
  static constexpr int kPerStep = 2;
  template <int R, int V>
  static TM_INLINE void run(F (&acc)[R][V], const uint8_t* w, const float* x, int64_t stride) {
    for (int v = 0; v < V; ++v) {
      const auto* halves = reinterpret_cast<const uint16_t*>(w + v * kLine);
      const F even = load_half(halves), odd = load_half(halves + 16);
      for (int r = 0; r < R; ++r) {
        acc[r][v] = fma(even, splat(x[r * stride]), acc[r][v]);
        acc[r][v] = fma(odd, splat(x[r * stride + 1]), acc[r][v]);
      }
    }
  }
#if defined(TM_EXPANDS)
  template <int R, int V>
  static TM_INLINE void multiply(F (&acc)[R][V], const Line (&line)[V], const float* x, int64_t stride) {
    for (int v = 0; v < V; ++v) {
      const F even = first_halves(line[v]), odd = second_halves(line[v]);
      for (int r = 0; r < R; ++r) {
        acc[r][v] = fma(even, splat(x[r * stride]), acc[r][v]);
        acc[r][v] = fma(odd, splat(x[r * stride + 1]), acc[r][v]);
      }
    }
  }
#endif
};

struct EightStep {  // e4m3 weights, float32 activations
  using X = float;
  static constexpr int kPerStep = 4;
  template <int R, int V>
  static TM_INLINE void run(F (&acc)[R][V], const uint8_t* w, const float* x, int64_t stride) {
    for (int v = 0; v < V; ++v) {
      const Line line = load_line(w + v * kLine);
      const F first = e4m3_of<0>(line), second = e4m3_of<1>(line), third = e4m3_of<2>(line), fourth = e4m3_of<3>(line);
      for (int r = 0; r < R; ++r) {
        acc[r][v] = fma(first, splat(x[r * stride]), acc[r][v]);
        acc[r][v] = fma(second, splat(x[r * stride + 1]), acc[r][v]);
        acc[r][v] = fma(third, splat(x[r * stride + 2]), acc[r][v]);
        acc[r][v] = fma(fourth, splat(x[r * stride + 3]), acc[r][v]);
      }
    }
  }
};

#if defined(TM_BF16)
struct PairStep {  // bf16 weights, bf16 activations, one instruction for two products
  using X = bf16;
  static constexpr int kPerStep = 2;
  template <int R, int V>
  static TM_INLINE void run(F (&acc)[R][V], const uint8_t* w, const bf16* x, int64_t stride) {
    Line line[V];
    for (int v = 0; v < V; ++v) line[v] = load_line(w + v * kLine);
    multiply(acc, line, x, stride);
  }
  template <int R, int V>
  static TM_INLINE void multiply(F (&acc)[R][V], const Line (&line)[V], const bf16* x, int64_t stride) {
    for (int r = 0; r < R; ++r) {
      const Line pair = splat_pair(x + r * stride);
      for (int v = 0; v < V; ++v) acc[r][v] = dot_pairs(acc[r][v], line[v], pair);
    }
  }
};
#else
using PairStep = WideStep;
#endif

// c [R, 64 of c_stride] = (resume ? c : 0) + x @ w over `steps` steps, for V of the tile's vectors from `w`.
template <class Step, int R, int V>
inline void dense_block(const uint8_t* w, int64_t steps, const typename Step::X* x, int64_t stride, float* c,
                        int64_t c_stride, bool resume, Share next) {
  F acc[R][V];
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) acc[r][v] = resume ? load(c + r * c_stride + v * 16) : zero();
  }
  for (int64_t s = 0; s < steps; ++s) {
    if (R > 2) {
      next.step();
    } else if (Step::kPerStep != 2) {  // one pass over the weights: memory decides
      for (int v = 0; v < V; ++v) prefetch(w + s * kStepBytes + v * kLine + kAhead);
    }
    Step::template run<R, V>(acc, w + s * kStepBytes, x + s * Step::kPerStep, stride);
  }
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) store(c + r * c_stride + v * 16, acc[r][v]);
  }
}

template <class Step, int R>
TM_INLINE void dense_rows(const uint8_t* w, int64_t steps, const typename Step::X* x, int64_t stride, float* c,
                          int64_t c_stride, bool resume, Shares& next) {
  constexpr int V = R == 1 ? 4 : kVectors;
  for (int v = 0; v < 4; v += V) {
    dense_block<Step, R, V>(w + v * kLine, steps, x, stride, c + v * 16, c_stride, resume, next.take(V));
  }
}

// Any number of rows, cut evenly into register tiles.
template <class Step>
void dense_tile(const uint8_t* w, int64_t steps, const typename Step::X* x, int64_t stride, int64_t rows, float* c,
                int64_t c_stride, bool resume) {
  int64_t tiles = divide_up(rows, kRows);
  Shares next(w + steps * kStepBytes, steps * kStepBytes, tiles, steps);
  for (int64_t row = 0; row < rows; --tiles) {
    const int64_t n = divide_up(rows - row, tiles);
    const auto* from = x + row * stride;
    float* to = c + row * c_stride;
    switch (n) {
      case 1: dense_rows<Step, 1>(w, steps, from, stride, to, c_stride, resume, next); break;
      case 2: dense_rows<Step, 2>(w, steps, from, stride, to, c_stride, resume, next); break;
      case 3: dense_rows<Step, kRows < 3 ? 2 : 3>(w, steps, from, stride, to, c_stride, resume, next); break;
      case 4: dense_rows<Step, kRows < 4 ? 2 : 4>(w, steps, from, stride, to, c_stride, resume, next); break;
      case 5: dense_rows<Step, kRows < 5 ? 2 : 5>(w, steps, from, stride, to, c_stride, resume, next); break;
      default: dense_rows<Step, kRows < 6 ? 2 : 6>(w, steps, from, stride, to, c_stride, resume, next); break;
    }
    row += n;
  }
}

}  // namespace TM_NS
}  // namespace tokenmill
