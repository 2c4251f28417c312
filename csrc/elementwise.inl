// Norms, activations, sums, embedding rows, the largest number: one pass over a row each.
namespace tokenmill {
namespace TM_NS {

// Shared by norm, the norm in front of a matmul, and the norms of query and key heads. W: type of the weights.
template <class T, class W, class O>
TM_SHARED void norm_row(const T* x, O* out, int64_t width, const Norm& spec) {
  const auto* weight = static_cast<const W*>(spec.weight);
  const auto* bias = static_cast<const W*>(spec.bias);
  const int64_t whole = width & ~int64_t{15};
  F mean = zero();
  if (spec.layer) {
    F total = zero();
    for (int64_t i = 0; i < whole; i += 16) total = add(total, load(x + i));
    if (whole < width) total = add(total, load_part(x + whole, width - whole));
    mean = splat(sum(total) / static_cast<float>(width));
  }
  F squares = zero();
  for (int64_t i = 0; i < whole; i += 16) {
    const F v = sub(load(x + i), mean);
    squares = fma(v, v, squares);
  }
  if (whole < width) {
    const F v = keep_first(sub(load_part(x + whole, width - whole), mean), static_cast<int>(width - whole), 0.0f);
    squares = fma(v, v, squares);
  }
  const F scale = splat(1.0f / __builtin_sqrtf(sum(squares) / static_cast<float>(width) + spec.eps));
  const F offset = splat(spec.offset);
  for (int64_t i = 0; i < width; i += 16) {
    const int64_t n = width - i;
    F y = mul(sub(load_part(x + i, n), mean), scale);
    y = mul(y, add(load_part(weight + i, n), offset));
    if (bias) y = add(y, load_part(bias + i, n));
    store_part(out + i, y, n);
  }
}

template <class T, class O>
TM_INLINE void norm_row(const T* x, O* out, int64_t width, const Norm& spec) {
  if (spec.type == Type::f32) {
    norm_row<T, float, O>(x, out, width, spec);
  } else {
    norm_row<T, bf16, O>(x, out, width, spec);
  }
}

template <class T>
void norm_typed(const NormOp& op) {
  parallel_rows(op.rows, op.width, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      norm_row(static_cast<const T*>(op.x) + row * op.stride, static_cast<T*>(op.out) + row * op.width, op.width,
               op.norm);
    }
  });
}
void norm(const NormOp& op) { op.type == Type::f32 ? norm_typed<float>(op) : norm_typed<bf16>(op); }

template <class T>
TM_INLINE void act_row(const T* x, T* out, int64_t width, Act kind) {
  for (int64_t i = 0; i < width; i += 16) {
    const F gate = load_part(x + i, width - i);
    const F up = gated(kind) ? load_part(x + width + i, width - i) : gate;
    store_part(out + i, activate(kind, gate, up), width - i);
  }
}
template <class T>
void act_typed(const ActOp& op) {
  const int64_t width = gated(op.act) ? op.width / 2 : op.width;
  parallel_rows(op.rows, op.width * 4, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      act_row(static_cast<const T*>(op.x) + row * op.width, static_cast<T*>(op.out) + row * width, width, op.act);
    }
  });
}
void act(const ActOp& op) { op.type == Type::f32 ? act_typed<float>(op) : act_typed<bf16>(op); }

template <class T>
void add_typed(const AddOp& op) {
  const auto* x = static_cast<const T*>(op.x);
  const auto* y = static_cast<const T*>(op.y);
  auto* out = static_cast<T*>(op.out);
  const F scale = splat(op.scale);
  constexpr int64_t kPiece = 16;
  parallel_rows(divide_up(op.count, kPiece), kPiece, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * kPiece; i < at_most(op.count, end * kPiece); i += kPiece) {
      const int64_t n = op.count - i;
      store_part(out + i, fma(scale, load_part(y + i, n), load_part(x + i, n)), n);
    }
  });
}
void add_scaled(const AddOp& op) { op.type == Type::f32 ? add_typed<float>(op) : add_typed<bf16>(op); }

// Products are rounded before they are added, as the sum over experts does it.
template <class T, class O>
void weigh_typed(const WeighOp& op) {
  parallel_rows(op.rows, op.count * op.width, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* x = static_cast<const T*>(op.x) + row * op.count * op.width;
      const float* factors = op.factors + row * op.stride;
      for (int64_t i = 0; i < op.width; i += 16) {
        const int64_t n = op.width - i;
        if (op.y) {
          const F y = load_part(static_cast<const T*>(op.y) + row * op.width + i, n);
          O* out = static_cast<O*>(op.out) + row * op.count * op.width + i;
          for (int64_t j = 0; j < op.count; ++j) {
            const F sum = add(load_part(x + j * op.width + i, n), mul(splat(factors[j]), y));
            store_part(out + j * op.width, sum, n);
          }
        } else {
          F total = zero();
          for (int64_t j = 0; j < op.count; ++j) {
            total = add(total, mul(splat(factors[j]), load_part(x + j * op.width + i, n)));
          }
          store_part(static_cast<O*>(op.out) + row * op.width + i, total, n);
        }
      }
    }
  });
}
void weigh(const WeighOp& op) {
  with_type(op.type, [&](auto* x) {
    with_type(op.out_type, [&](auto* out) {
      weigh_typed<std::remove_pointer_t<decltype(x)>, std::remove_pointer_t<decltype(out)>>(op);
    });
  });
}

template <class T>
void embed_typed(const EmbedOp& op) {
  parallel_rows(op.count, op.width, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      auto* out = static_cast<T*>(op.out) + row * op.width;
      const int64_t id = op.ids[row];
      if (id < 0 || id >= op.vocab) {  // checked by the caller; here only so that memory stays safe
        std::memset(out, 0, static_cast<size_t>(op.width) * sizeof(T));
        continue;
      }
      const T* source = static_cast<const T*>(op.table) + id * op.stride;
      if (op.scale == 1.0f) {
        std::memcpy(out, source, static_cast<size_t>(op.width) * sizeof(T));
        continue;
      }
      for (int64_t i = 0; i < op.width; i += 16) {
        store_part(out + i, mul(load_part(source + i, op.width - i), splat(op.scale)), op.width - i);
      }
    }
  });
}
void embed(const EmbedOp& op) { op.type == Type::f32 ? embed_typed<float>(op) : embed_typed<bf16>(op); }

// The largest of x [0, n), or NaN if there is one.
template <class T>
TM_INLINE float largest_of(const T* x, int64_t n) {
  const int64_t whole = n & ~int64_t{31};
  F top = splat(-__builtin_inff()), other = top, odd = zero(), odder = zero();
  for (int64_t i = 0; i < whole; i += 32) {
    const F a = load(x + i), b = load(x + i + 16);
    top = max(a, top);
    other = max(b, other);
    odd = fma(a, zero(), odd);  // NaN from here on if a is not finite: rare, so what it is can be looked up slowly
    odder = fma(b, zero(), odder);
  }
  for (int64_t i = whole; i < n; i += 16) {
    const F a = load_part(x + i, n - i, -__builtin_inff());
    top = max(a, top);
    odd = fma(load_part(x + i, n - i), zero(), odd);
  }
  const float mark = sum(add(odd, odder));
  if (mark != mark) {
    for (int64_t i = 0; i < n; ++i) {
      const float value = to_float(x[i]);
      if (value != value) return value;
    }
  }
  return largest(max(top, other));
}

// Where `value` comes first in x [0, n); it is there.
template <class T>
TM_INLINE int64_t first_of(const T* x, int64_t n, float value) {
  constexpr int64_t kStride = 256;
  int64_t begin = 0;
  if (value == value) {
    while (begin + kStride < n && largest_of(x + begin, kStride) != value) begin += kStride;
  }
  for (int64_t i = begin; i < n; ++i) {
    const float found = to_float(x[i]);
    if (found == value || (found != found && value != value)) return i;
  }
  return 0;
}

template <class T>
void greedy_typed(const GreedyOp& op) {
  constexpr int64_t kPiece = 8192;
  const int64_t pieces = divide_up(op.width, kPiece);
  auto* tops = static_cast<float*>(scratch(Scratch::partials, static_cast<size_t>(op.rows * pieces) * sizeof(float)));
  const auto* x = static_cast<const T*>(op.x);
  auto task = [&](int64_t index) {
    const int64_t row = index / pieces, begin = index % pieces * kPiece;
    tops[index] = largest_of(x + row * op.stride + begin, at_most(kPiece, op.width - begin));
  };
  parallel_for(op.rows * pieces, task);
  for (int64_t row = 0; row < op.rows; ++row) {
    const float* mine = tops + row * pieces;
    int64_t best = 0;
    for (int64_t i = 1; i < pieces && mine[best] == mine[best]; ++i) {
      if (mine[i] > mine[best] || mine[i] != mine[i]) best = i;
    }
    const int64_t begin = best * kPiece;
    const int64_t id = begin + first_of(x + row * op.stride + begin, at_most(kPiece, op.width - begin), mine[best]);
    op.ids[row] = id;
    op.marked[row] = mine[best] - mine[best] == 0.0f ? id : ~id;
    op.largest[row] = mine[best];
  }
}
void greedy(const GreedyOp& op) { op.type == Type::f32 ? greedy_typed<float>(op) : greedy_typed<bf16>(op); }

void widen(const WidenOp& op) {
  const auto* x = static_cast<const bf16*>(op.x);
  constexpr int64_t kPiece = 16384;
  parallel_rows(divide_up(op.count, kPiece), kPiece, [&](int64_t begin, int64_t end) {
    const int64_t stop = at_most(end * kPiece, op.count);
    for (int64_t i = begin * kPiece; i < stop; i += 16) store_part(op.out + i, load_part(x + i, stop - i), stop - i);
  });
}

}  // namespace TM_NS
}  // namespace tokenmill
