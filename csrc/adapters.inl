// What adapters do to a product: x goes down to a few lanes, and up again behind the sum (core/adapters.py has the
// formula). A row's sums run over k, or over lanes, in one order, whatever adapters the rows beside it have.
namespace tokenmill {
namespace TM_NS {

constexpr int64_t kLaneTile = 64;    // lanes of one task
constexpr int kTogether = 2;         // tokens that share what is read, if they have one adapter
#ifdef __AVX512F__                    // 32 registers of 16 numbers
constexpr int kUpTogether = 4;       // the same on the way up
#else
constexpr int kUpTogether = 2;
#endif
constexpr int64_t kUpColumns = 1024;  // columns of one task

TM_INLINE void splat_two(const float* x, F& first, F& second) { first = splat(x[0]), second = splat(x[1]); }
TM_INLINE void splat_two(const bf16* x, F& first, F& second) {  // from memory: the way through a register is long
  const Line pair = splat_pair(x);
  first = even_half(pair), second = odd_half(pair);
}

// Lanes [lane, lane + 16 V) of N tokens that have one adapter: even and odd k in sums of their own.
template <class T, class W, int V, int N>
TM_INLINE void shrink_tile(const T* x, int64_t x_stride, const W* down, int64_t k, int64_t stride, float* low) {
  F even[N][V], odd[N][V];
  for (int n = 0; n < N; ++n)
    for (int v = 0; v < V; ++v) even[n][v] = odd[n][v] = zero();
  int64_t i = 0;
  for (; i + 1 < k; i += 2, down += 2 * stride) {
    F a[N], b[N];
    for (int n = 0; n < N; ++n) splat_two(x + n * x_stride + i, a[n], b[n]);
    for (int v = 0; v < V; ++v) {
      const F first = load(down + v * 16), second = load(down + stride + v * 16);
      for (int n = 0; n < N; ++n) {
        even[n][v] = fma(a[n], first, even[n][v]);
        odd[n][v] = fma(b[n], second, odd[n][v]);
      }
    }
  }
  for (int n = 0; n < N; ++n) {
    if (i < k) {
      const F a = splat(to_float(x[n * x_stride + i]));
      for (int v = 0; v < V; ++v) even[n][v] = fma(a, load(down + v * 16), even[n][v]);
    }
    for (int v = 0; v < V; ++v) store(low + n * stride + v * 16, add(even[n][v], odd[n][v]));
  }
}

template <class T, class W, int N>
void shrink_tokens(const ShrinkOp& op, int64_t token, int64_t first) {
  const int64_t slot = op.of.slots[token], lanes = divide_up(op.ranks[slot] * op.parts, 16) * 16;
  if (slot == 0 || first >= lanes) return;
  const auto* x = static_cast<const T*>(op.x) + token * op.stride;
  const auto* down = static_cast<const W*>(op.down) + slot * op.k * op.lanes + first;
  float* low = op.low + token * op.lanes + first;
  switch (at_most(kLaneTile, lanes - first) / 16) {
    case 1: return shrink_tile<T, W, 1, N>(x, op.stride, down, op.k, op.lanes, low);
    case 2: return shrink_tile<T, W, 2, N>(x, op.stride, down, op.k, op.lanes, low);
    case 3: return shrink_tile<T, W, 3, N>(x, op.stride, down, op.k, op.lanes, low);
    default: return shrink_tile<T, W, 4, N>(x, op.stride, down, op.k, op.lanes, low);
  }
}

template <class T, class W>
void shrink_typed(const ShrinkOp& op) {
  const int64_t tiles = divide_up(op.lanes, kLaneTile), groups = divide_up(op.of.tokens, kTogether);
  auto task = [&](int64_t index) {
    const int64_t token = index / tiles * kTogether, first = index % tiles * kLaneTile;
    const int64_t count = at_most(kTogether, op.of.tokens - token);
    bool alike = count == kTogether;
    for (int64_t i = 1; i < count; ++i) alike = alike && op.of.slots[token + i] == op.of.slots[token];
    if (alike) return shrink_tokens<T, W, kTogether>(op, token, first);
    for (int64_t i = 0; i < count; ++i) shrink_tokens<T, W, 1>(op, token + i, first);
  };
  parallel_for(groups * tiles, task);
}
template <class T>
void shrink_from(const ShrinkOp& op) {
  op.weights == Type::f32 ? shrink_typed<T, float>(op) : shrink_typed<T, bf16>(op);
}
void shrink(const ShrinkOp& op) { op.type == Type::f32 ? shrink_from<float>(op) : shrink_from<bf16>(op); }

// Columns [i, i + 16 V) of N tokens of one adapter, `count` of the last 16 of them.
template <class W, int V, int N>
TM_INLINE void expand_tile(const ExpandOp& op, int64_t token, int64_t slot, const float* low, int64_t i, int64_t count) {
  const int64_t rank = slot ? op.ranks[slot] : 0;
  const auto* up = static_cast<const W*>(op.up) + slot * op.most_rank * op.n + i;
  const float* shifts = op.shifts && slot ? op.shifts + slot * op.n + i : nullptr;
  const auto some = [&](const auto* from, int v) {
    return v + 1 < V || count == 16 ? load(from + v * 16) : load_part(from + v * 16, count);
  };
  F y[N][V];
  for (int v = 0; v < V; ++v) {
    const F shift = shifts ? some(shifts, v) : splat(-0.0f);
    for (int n = 0; n < N; ++n) y[n][v] = shift;
  }
  for (int64_t j = 0; j < rank; ++j) {
    F factor[N];
    for (int n = 0; n < N; ++n) factor[n] = splat(low[n * op.lanes + j]);
    for (int v = 0; v < V; ++v) {
      const F line = some(up + j * op.n, v);
      for (int n = 0; n < N; ++n) y[n][v] = fma(factor[n], line, y[n][v]);
    }
  }
  for (int n = 0; n < N; ++n)
    for (int v = 0; v < V; ++v) {
      const int64_t at = (token + n) * op.n + i + v * 16, own = v + 1 < V ? 16 : count;
      store_part(op.add + at, y[n][v], own);
      if (!op.gain) continue;
      store_part(op.gain + at, slot ? load_part(op.gains + slot * op.n + i + v * 16, own) : splat(1.0f), own);
    }
}

// Columns [begin, end) of N tokens of one adapter, all of one part. Rows without an adapter get -0, which changes no
// number.
template <class W, int N>
TM_INLINE void expand_columns(const ExpandOp& op, int64_t token, int64_t slot, int64_t part, int64_t begin, int64_t end) {
  const float* low = op.low + token * op.lanes + part * (slot ? op.ranks[slot] : 0);
  int64_t i = begin;
  for (; i + 64 <= end; i += 64) expand_tile<W, 4, N>(op, token, slot, low, i, 16);
  for (; i < end; i += 16) expand_tile<W, 1, N>(op, token, slot, low, i, at_most(16, end - i));
}

template <class W, int N>
void expand_tokens(const ExpandOp& op, int64_t token, int64_t begin, int64_t end) {
  for (int64_t part = 0; part < op.parts; ++part) {
    const int64_t from = at_least(begin, op.borders[part]), to = at_most(end, op.borders[part + 1]);
    if (from < to) expand_columns<W, N>(op, token, op.of.slots[token], part, from, to);
  }
}

template <class W>
void expand_typed(const ExpandOp& op) {
  const int64_t pieces = divide_up(op.n, kUpColumns), groups = divide_up(op.of.tokens, kUpTogether);
  auto task = [&](int64_t index) {
    const int64_t begin = index % pieces * kUpColumns, end = at_most(op.n, begin + kUpColumns);
    const int64_t first = index / pieces * kUpTogether, last = at_most(op.of.tokens, first + kUpTogether);
    const int32_t* slots = op.of.slots;
    for (int64_t token = first; token < last;) {
      int64_t alike = 1;
      while (token + alike < last && slots[token + alike] == slots[token]) ++alike;
      if (alike == 4) expand_tokens<W, 4>(op, token, begin, end), token += 4;
      else if (alike >= 2) expand_tokens<W, 2>(op, token, begin, end), token += 2;
      else expand_tokens<W, 1>(op, token, begin, end), token += 1;
    }
  };
  parallel_for(groups * pieces, task);
}
void expand(const ExpandOp& op) { op.weights == Type::f32 ? expand_typed<float>(op) : expand_typed<bf16>(op); }

}  // namespace TM_NS
}  // namespace tokenmill
