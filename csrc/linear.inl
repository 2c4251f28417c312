// The matmul of a Weight: norm in front, packed weights of any format, then bias, activation and residual behind.
namespace tokenmill {
namespace TM_NS {

constexpr int64_t kBlockRows = 96;     // rows whose sums stay in cache while k is cut
constexpr int64_t kDenseSteps = 64;    // steps of k per cut when several register tiles share the weights: 16 KB
constexpr int64_t kQuantColumns = 256;  // the same, in columns of k

struct Prepared {  // activations in the form that the format multiplies
  const void* x;
  int64_t stride;
  Activations q;
};

// Where x goes when it cannot be used as it lies (a norm in front, another number format, a k that is no whole steps).
template <class T, class X, int kMultiple = 2>
TM_INLINE Prepared prepare_dense(const LinearOp& op) {
  constexpr bool same = std::is_same<T, X>::value;
  if (same && !op.norm.weight && op.k % kMultiple == 0) return {op.x, op.stride, {}};
  const int64_t stride = divide_up(op.k, 16) * 16;
  auto* to = static_cast<X*>(scratch(Scratch::activations, static_cast<size_t>(op.rows * stride) * sizeof(X)));
  parallel_rows(op.rows, op.k, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* from = static_cast<const T*>(op.x) + row * op.stride;
      X* out = to + row * stride;
      std::memset(static_cast<void*>(out + op.k), 0, static_cast<size_t>(stride - op.k) * sizeof(X));
      if (op.norm.weight) {
        norm_row(from, out, op.k, op.norm);
      } else {
        convert(from, out, op.k);
      }
    }
  });
  return {to, stride, {}};
}

template <class T>
TM_INLINE Prepared prepare_quantised(const LinearOp& op) {
  const int64_t width = divide_up(op.k, kGroup) * kGroup, groups = width / kGroup;
  const float least = op.parts->apart;
  const auto bytes = static_cast<size_t>(op.rows * (width + 12 * groups)) + 64;
  const auto more = static_cast<size_t>(least > 0.0f ? op.rows * (4 * width + 4 * groups) : 0);
  auto* q = static_cast<int8_t*>(scratch(Scratch::activations, bytes + more));
  auto* scale = reinterpret_cast<float*>(q + op.rows * width);
  auto* sum = reinterpret_cast<int32_t*>(scale + op.rows * groups);
  auto* where = reinterpret_cast<uint32_t*>(sum + op.rows * 2 * groups);
  auto* apart = reinterpret_cast<float*>(where + op.rows * groups);
  parallel_rows(op.rows, op.k, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* from = static_cast<const T*>(op.x) + row * op.stride;
      int8_t* out = q + row * width;
      if (op.norm.weight || least > 0.0f) {
        auto* own = static_cast<float*>(scratch(Scratch::tile, static_cast<size_t>(op.k) * 4 + 64));
        op.norm.weight ? norm_row(from, own, op.k, op.norm) : convert(from, own, op.k);
        if (least > 0.0f) set_apart(own, op.k, least, apart + row * width, where + row * groups);
        quantise_row(own, op.k, out, scale + row * groups, sum + row * 2 * groups);
      } else {
        quantise_row(from, op.k, out, scale + row * groups, sum + row * 2 * groups);
      }
    }
  });
  if (least > 0.0f) return {nullptr, 0, {q, scale, sum, width, apart, where}};
  return {nullptr, 0, {q, scale, sum, width}};
}

// Which products go through tile registers, and how many rows share one pass over the weights.
#if defined(TM_AMX)
template <class Step>
constexpr bool kInTiles = std::is_same<Step, PairStep>::value;
template <class Step>
constexpr int64_t kRowsAtOnce = kInTiles<Step> ? kAmxRows : kRows;
#else
template <class Step>
constexpr bool kInTiles = false;
template <class Step>
constexpr int64_t kRowsAtOnce = kRows;
#endif

// c [rows, 64] = (resume ? c : 0) + x @ w over `steps` steps, of which all but the last ones are kDenseSteps.
template <class Step>
TM_INLINE void product_tile(const uint8_t* w, int64_t steps, const typename Step::X* x, int64_t stride, int64_t rows,
                            float* c, bool resume) {
#if defined(TM_AMX)
  if constexpr (kInTiles<Step>) return amx_tile(w, steps, x, stride, rows, c, kTileColumns, resume);
#endif
  dense_tile<Step>(w, steps, x, stride, rows, c, kTileColumns, resume);
}

template <class Step>
TM_INLINE void dense_sums(const LinearOp& op, const Prepared& in, int64_t tile, int64_t row, int64_t rows, float* c) {
  const int64_t steps = divide_up(op.k, Step::kPerStep);
  const uint8_t* w = static_cast<const uint8_t*>(op.parts->weight) + tile * steps * kStepBytes;
  const auto* x = static_cast<const typename Step::X*>(in.x) + row * in.stride;
  const int64_t cut = rows <= kRowsAtOnce<Step> ? steps : kDenseSteps;
  for (int64_t s = 0; s < steps; s += cut) {
    product_tile<Step>(w + s * kStepBytes, at_most(cut, steps - s), x + s * Step::kPerStep, in.stride, rows, c, s > 0);
  }
}

// Units of columns that share a scale: each one's sums, times their scales, are added in ascending order.
TM_INLINE void eight_sums(const LinearOp& op, const Prepared& in, int64_t tile, int64_t row, int64_t rows, float* c) {
  const Part* part = op.parts;
  const int64_t columns = eight_columns(op.k, part->group), bytes = eight_unit(columns);
  const uint8_t* w = static_cast<const uint8_t*>(part->weight) + tile * eight_tile(op.k, part->group);
  const auto* x = static_cast<const float*>(in.x) + row * in.stride;
  alignas(64) float some[kBlockRows * kTileColumns];
  for (int64_t at = 0; at < op.k; at += columns, w += bytes) {
    const auto* scales = reinterpret_cast<const float*>(w);
    const int64_t steps = divide_up(at_most(columns, op.k - at), 4), cut = rows <= kRows ? steps : kDenseSteps;
    for (int64_t s = 0; s < steps; s += cut) {
      dense_tile<EightStep>(w + eight_head + s * kStepBytes, at_most(cut, steps - s), x + at + s * 4, in.stride, rows,
                            some, kTileColumns, s > 0);
    }
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t i = 0; i < kTileColumns; i += 16) {
        const int64_t place = r * kTileColumns + i;
        const F before = at ? load(c + place) : zero();
        store(c + place, fma(load(some + place), load(scales + i), before));
      }
    }
  }
}

TM_INLINE void quant_sums(const LinearOp& op, const Prepared& in, int64_t tile, int64_t row, int64_t rows, float* c) {
  const Part* part = op.parts;
  for (int64_t tiles = part->n / kTileColumns; part + 1 < op.parts + op.count && tile >= tiles;) {
    tile -= tiles;
    tiles = (++part)->n / kTileColumns;
  }
  const Coding kind = coding(part->format);
  const int64_t columns = unit_columns(kind, part->group), units = divide_up(op.k, columns), head = tile_head(kind);
  const uint8_t* w = static_cast<const uint8_t*>(part->weight) + tile * tile_size(kind, op.k, part->group) + head;
  const TileSums sums = tile_sums(part->format);
  const int64_t cut = rows <= quant_rows_most(part->format, rows) ? units : at_least(1, kQuantColumns / columns);
  for (int64_t unit = 0; unit < units; unit += cut) {
    sums(w, part->group, unit, at_most(units, unit + cut), in.q, row, rows, c, unit > 0);
  }
  if (in.q.apart) add_apart(w, part->group, in.q, row, rows, c);
  if (head) {
    const auto* factors = reinterpret_cast<const float*>(w - head + kTableBytes);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t i = 0; i < kTileColumns; i += 16) {
        float* to = c + r * kTileColumns + i;
        store(to, mul(load(to), load(factors + i)));
      }
    }
  }
}

// One tile's sums (and the up half's, for gated activations) -> the output. `n`: columns that exist.
template <class T, class O>
TM_INLINE void finish(const LinearOp& op, const float* c, const float* up, int64_t column, int64_t row, int64_t rows) {
  const bool pair = gated(op.act);
  const int64_t width = pair ? op.n / 2 : op.n;
  const int64_t n = at_most(kTileColumns, width - column);
  const int64_t out_stride = op.out_stride ? op.out_stride : width;
  const int64_t residual_stride = op.residual_stride ? op.residual_stride : width;
  const float* bias = op.bias;
  // y * gain + add of adapters: columns of one half or the other.
  auto adapted = [&](F y, int64_t r, int64_t at, int64_t left) {
    const int64_t place = (row + r) * op.n + at;
    if (op.gain) y = mul(y, load_part(op.gain + place, left));
    return op.add ? add(y, load_part(op.add + place, left)) : y;
  };
  for (int64_t r = 0; r < rows; ++r) {
    O* out = static_cast<O*>(op.out) + (row + r) * out_stride + column;
    const T* residual =
        op.residual ? static_cast<const T*>(op.residual) + (row + r) * residual_stride + column : nullptr;
    for (int64_t i = 0; i < n; i += 16) {
      F y = load(c + r * kTileColumns + i);
      F other = pair ? load(up + r * kTileColumns + i) : y;
      if (bias) y = add(y, load_part(bias + column + i, n - i));
      if (bias && pair) other = add(other, load_part(bias + width + column + i, n - i));
      if (op.add) {
        y = adapted(y, r, column + i, n - i);
        if (pair) other = adapted(other, r, width + column + i, n - i);
      }
      if (op.act != Act::none) y = activate(op.act, y, other);
      if (residual) y = add(y, load_part(residual + i, n - i));
      store_part(out + i, y, n - i);
    }
  }
}

// How a product is cut into tasks.
struct Cut {
  int64_t tile_bytes, tiles, per_task, tasks;
};

TM_INLINE Cut cut(const LinearOp& op) {
  const Part& part = *op.parts;
  const Coding kind = coding(part.format);
  const int64_t bytes = plain(part.format) ? plain_steps(part.format, op.k) * kStepBytes
                        : sparse(part.format) ? sparse_begin(part.weight, 1) - sparse_begin(part.weight, 0)
                        : part.format == Format::fp8 ? eight_tile(op.k, part.group)
                            : tile_size(kind, op.k, part.group);
  const int64_t tiles = divide_up(gated(op.act) ? op.n / 2 : op.n, kTileColumns);
  // A task is worth waking a thread for: about 32 KB of weights, or the same work on fewer weights for more rows.
  const int64_t work = bytes * (gated(op.act) ? 2 : 1) * at_least(1, at_most(op.rows, kBlockRows) / 4);
  const int64_t per_task = at_least(1, at_most(tiles, 32768 / at_least(1, work)));
  return {bytes, tiles, per_task, divide_up(tiles, per_task)};
}

TM_INLINE void announce_next(const LinearOp& op) {
  if (!op.next) return;
  const Cut next = cut(*op.next);
  const auto* first = static_cast<const uint8_t*>(op.next->parts->weight);
  announce({{first, gated(op.next->act) ? first + next.tiles * next.tile_bytes : nullptr}, next.tasks,
            next.per_task * next.tile_bytes});
}

template <class T, class Sums>
TM_INLINE void run_tiles(const LinearOp& op, Sums sums) {
  const bool pair = gated(op.act);
  const Cut by = cut(op);
  auto task = [&](int64_t index) {
    const int64_t block = index / by.tasks, row = block * kBlockRows, rows = at_most(kBlockRows, op.rows - row);
    const auto half = static_cast<size_t>(rows * kTileColumns);
    auto* c = static_cast<float*>(scratch(Scratch::tile, half * 8));
    const int64_t begin = index % by.tasks * by.per_task;
    for (int64_t tile = begin; tile < at_most(by.tiles, begin + by.per_task); ++tile) {
      sums(tile, row, rows, c);
      if (pair) sums(tile + by.tiles, row, rows, c + half);
      if (op.out_f32) {
        finish<T, float>(op, c, c + half, tile * kTileColumns, row, rows);
      } else {
        finish<T, T>(op, c, c + half, tile * kTileColumns, row, rows);
      }
    }
  };
  announce_next(op);
  parallel_for(by.tasks * divide_up(op.rows, kBlockRows), task);
}

template <class T, class Step>
TM_INLINE void linear_dense(const LinearOp& op) {
  const Prepared in = prepare_dense<T, typename Step::X>(op);
  run_tiles<T>(op, [&](int64_t tile, int64_t row, int64_t rows, float* c) {
    dense_sums<Step>(op, in, tile, row, rows, c);
  });
}

template <class Step>
TM_INLINE void sparse_sums(const LinearOp& op, const Prepared& in, int64_t tile, int64_t row, int64_t rows, float* c) {
  const auto* base = static_cast<const uint8_t*>(op.parts->weight);
  const uint8_t* at = base + sparse_begin(base, tile);
  const auto* x = static_cast<const typename Step::X*>(in.x) + row * in.stride;
  const int64_t steps = divide_up(op.k, Step::kPerStep);
#if defined(TM_EXPANDS)
  // (Tile registers load from memory.)
  if (!kInTiles<Step> && rows <= kFewSparse && expands()) return expand_rows<Step>(at, steps, x, in.stride, rows, c);
#endif
  alignas(64) uint8_t lines[kDenseSteps * kStepBytes];
  for (int64_t s = 0; s < steps; s += kDenseSteps) {
    const int64_t some = at_most(kDenseSteps, steps - s);
    at = spread_out(at, some, lines);
    product_tile<Step>(lines, some, x + s * Step::kPerStep, in.stride, rows, c, s > 0);
  }
}

template <class T, class Step>
TM_INLINE void linear_sparse(const LinearOp& op) {
  const Prepared in = prepare_dense<T, typename Step::X>(op);
  run_tiles<T>(op, [&](int64_t tile, int64_t row, int64_t rows, float* c) {
    sparse_sums<Step>(op, in, tile, row, rows, c);
  });
}

template <class T>
TM_INLINE void linear_quantised(const LinearOp& op) {
  const Prepared in = prepare_quantised<T>(op);
  run_tiles<T>(op, [&](int64_t tile, int64_t row, int64_t rows, float* c) { quant_sums(op, in, tile, row, rows, c); });
}

template <class T>
TM_INLINE void linear_eight(const LinearOp& op) {
  const Prepared in = prepare_dense<T, float, 4>(op);
  run_tiles<T>(op, [&](int64_t tile, int64_t row, int64_t rows, float* c) { eight_sums(op, in, tile, row, rows, c); });
}

template <class T>
void linear_typed(const LinearOp& op) {
  switch (op.parts->format) {
    case Format::f32: return linear_dense<T, FloatStep>(op);
    case Format::bf16:
      return kPairs && std::is_same<T, bf16>::value ? linear_dense<T, PairStep>(op) : linear_dense<T, WideStep>(op);
    case Format::f16: return linear_dense<T, HalfStep>(op);
    case Format::bf16_sparse:
      return kPairs && std::is_same<T, bf16>::value ? linear_sparse<T, PairStep>(op) : linear_sparse<T, WideStep>(op);
    case Format::f16_sparse: return linear_sparse<T, HalfStep>(op);
    case Format::fp8: return linear_eight<T>(op);
    default: return linear_quantised<T>(op);
  }
}

void linear(const LinearOp& op) { op.type == Type::f32 ? linear_typed<float>(op) : linear_typed<bf16>(op); }

}  // namespace TM_NS
}  // namespace tokenmill
