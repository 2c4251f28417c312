// Norms, activations, sums, embedding rows, argmax: one pass over a row each.
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

TM_INLINE int64_t argmax_row(const float* x, int64_t width) {
  F top = splat(-__builtin_inff());
  for (int64_t i = 0; i < width; i += 16) top = max(load_part(x + i, width - i, -__builtin_inff()), top);
  const float best = largest(top);
  for (int64_t i = 0; i < width; ++i) {
    if (x[i] == best) return i;
  }
  return 0;
}
void argmax(const ArgmaxOp& op) {
  parallel_rows(op.rows, op.width, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) op.out[row] = argmax_row(op.x + row * op.stride, op.width);
  });
}

}  // namespace TM_NS
}  // namespace tokenmill
