// What adapters do to a product: x goes down to a few lanes, and up again behind the sum (core/adapters.py has the
// formula). A row's sums run over k, or over lanes, in one order, whatever adapters the rows beside it have.
namespace tokenmill {
namespace TM_NS {

constexpr int64_t kLaneTile = 64;    // lanes of one task
constexpr int64_t kUpColumns = 1024;  // columns of one task

// Lanes [lane, lane + 16 V) of one token: even and odd k in sums of their own.
template <class T, class W, int V>
TM_INLINE void shrink_tile(const T* x, const W* down, int64_t k, int64_t stride, float* low) {
  F even[V], odd[V];
  for (int v = 0; v < V; ++v) even[v] = odd[v] = zero();
  int64_t i = 0;
  for (; i + 1 < k; i += 2, down += 2 * stride) {
    const F a = splat(to_float(x[i])), b = splat(to_float(x[i + 1]));
    for (int v = 0; v < V; ++v) {
      even[v] = fma(a, load(down + v * 16), even[v]);
      odd[v] = fma(b, load(down + stride + v * 16), odd[v]);
    }
  }
  if (i < k) {
    const F a = splat(to_float(x[i]));
    for (int v = 0; v < V; ++v) even[v] = fma(a, load(down + v * 16), even[v]);
  }
  for (int v = 0; v < V; ++v) store(low + v * 16, add(even[v], odd[v]));
}

template <class T, class W>
void shrink_typed(const ShrinkOp& op) {
  const int64_t tiles = divide_up(op.lanes, kLaneTile);
  auto task = [&](int64_t index) {
    const int64_t token = index / tiles, first = index % tiles * kLaneTile, slot = op.of.slots[token];
    const int64_t lanes = divide_up(op.ranks[slot] * op.parts, 16) * 16;
    if (slot == 0 || first >= lanes) return;
    const auto* x = static_cast<const T*>(op.x) + token * op.stride;
    const auto* down = static_cast<const W*>(op.down) + slot * op.k * op.lanes + first;
    float* low = op.low + token * op.lanes + first;
    switch (at_most(kLaneTile, lanes - first) / 16) {
      case 1: return shrink_tile<T, W, 1>(x, down, op.k, op.lanes, low);
      case 2: return shrink_tile<T, W, 2>(x, down, op.k, op.lanes, low);
      case 3: return shrink_tile<T, W, 3>(x, down, op.k, op.lanes, low);
      default: return shrink_tile<T, W, 4>(x, down, op.k, op.lanes, low);
    }
  };
  parallel_for(op.of.tokens * tiles, task);
}
template <class T>
void shrink_from(const ShrinkOp& op) {
  op.weights == Type::f32 ? shrink_typed<T, float>(op) : shrink_typed<T, bf16>(op);
}
void shrink(const ShrinkOp& op) { op.type == Type::f32 ? shrink_from<float>(op) : shrink_from<bf16>(op); }

// Columns [begin, end) of one token, all of one part. Rows without an adapter get -0, which changes no number.
template <class W>
TM_INLINE void expand_columns(const ExpandOp& op, int64_t token, int64_t slot, int64_t part, int64_t begin, int64_t end) {
  const int64_t rank = slot ? op.ranks[slot] : 0;
  const float* low = op.low + token * op.lanes + part * rank;
  const auto* up = static_cast<const W*>(op.up) + slot * op.most_rank * op.n;
  const float* shifts = op.shifts && slot ? op.shifts + slot * op.n : nullptr;
  for (int64_t i = begin; i < end; i += 16) {
    const int64_t count = at_most(16, end - i);
    F y = shifts ? load_part(shifts + i, count) : splat(-0.0f);
    for (int64_t j = 0; j < rank; ++j) y = fma(splat(low[j]), load_part(up + j * op.n + i, count), y);
    store_part(op.add + token * op.n + i, y, count);
    if (op.gain) store_part(op.gain + token * op.n + i, slot ? load_part(op.gains + slot * op.n + i, count) : splat(1.0f), count);
  }
}

template <class W>
void expand_typed(const ExpandOp& op) {
  const int64_t pieces = divide_up(op.n, kUpColumns);
  auto task = [&](int64_t index) {
    const int64_t token = index / pieces, begin = index % pieces * kUpColumns, end = at_most(op.n, begin + kUpColumns);
    const int64_t slot = op.of.slots[token];
    for (int64_t part = 0; part < op.parts; ++part) {
      const int64_t from = at_least(begin, op.borders[part]), to = at_most(end, op.borders[part + 1]);
      if (from < to) expand_columns<W>(op, token, slot, part, from, to);
    }
  };
  parallel_for(op.of.tokens * pieces, task);
}
void expand(const ExpandOp& op) { op.weights == Type::f32 ? expand_typed<float>(op) : expand_typed<bf16>(op); }

}  // namespace TM_NS
}  // namespace tokenmill
