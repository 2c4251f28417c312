// Recurrent layers: short convolutions, the gated delta rule, state spaces, and the norms behind them. A row's state is
// read and written by one task only, one token after the other, so a result has the same bytes however a sequence is cut
// into steps. Where drafts are tried, the states behind several tokens are left, each in a place of its own.
namespace tokenmill {
namespace TM_NS {

template <class T>
void short_conv_typed(const ConvOp& op) {
  constexpr int64_t kPiece = 256;
  const int64_t pieces = divide_up(op.channels, kPiece);
  const int past = op.taps - 1;
  auto task = [&](int64_t index) {
    const int64_t sequence = index / pieces, first = index % pieces * kPiece;
    const int64_t begin = op.step.query_start[sequence], end = op.step.query_start[sequence + 1];
    T* states = static_cast<T*>(op.state);
    const T* state = states + op.step.rows[sequence] * past * op.channels;
    T* last = states + op.step.last(sequence) * past * op.channels;
    const bool fresh = op.step.positions[begin] == 0;
    for (int64_t c = first; c < at_most(op.channels, first + kPiece); c += 16) {
      const int64_t n = op.channels - c;
      F window[kMostTaps];
      for (int k = 0; k < past; ++k) window[k] = fresh ? zero() : load_part(state + k * op.channels + c, n);
      for (int64_t t = begin; t < end; ++t) {
        window[past] = load_part(static_cast<const T*>(op.x) + t * op.stride + c, n);
        F y = op.bias ? load_part(op.bias + c, n) : zero();
        for (int k = 0; k < op.taps; ++k) y = fma(window[k], load_part(op.weight + k * op.channels + c, n), y);
        store_part(static_cast<T*>(op.out) + t * op.channels + c, op.silu ? silu(y) : y, n);
        for (int k = 0; k < past; ++k) window[k] = window[k + 1];
        if (!op.step.left || t + 1 == end || op.step.left[t] < 0) continue;
        T* left = states + op.step.left[t] * past * op.channels + c;
        for (int k = 0; k < past; ++k) store_part(left + k * op.channels, window[k], n);
      }
      for (int k = 0; k < past; ++k) store_part(last + k * op.channels + c, window[k], n);
    }
  };
  parallel_for(op.step.sequences * pieces, task);
}
void short_conv(const ConvOp& op) { op.type == Type::f32 ? short_conv_typed<float>(op) : short_conv_typed<bf16>(op); }

TM_INLINE float softplus(float x) {
  return (x > 0.0f ? x : 0.0f) + __builtin_log1pf(__builtin_expf(x > 0.0f ? -x : x));
}

// The same of each of sixteen: log(1 + e) is 2 artanh(e / (2 + e)), by its series. Relative error below 4e-7.
TM_INLINE F softplus(F x) {
  const F small = exp(sub(zero(), abs(x))), part = div(small, add(small, splat(2.0f))), square = mul(part, part);
  F series = splat(1.0f / 15);
  for (int odd = 13; odd > 0; odd -= 2) series = fma(series, square, splat(1.0f / static_cast<float>(odd)));
  return fma(add(part, part), series, max(x, zero()));
}

// x [n] as float32, at the length of `size`.
template <class T>
TM_INLINE void scaled_unit(const T* x, float* out, int64_t n, float size) {
  F squares = zero();
  for (int64_t i = 0; i < n; i += 16) {
    const F v = load_part(x + i, n - i);
    squares = fma(v, v, squares);
  }
  const F scale = splat(size / __builtin_sqrtf(sum(squares) + 1e-6f));
  for (int64_t i = 0; i < n; i += 16) store_part(out + i, mul(load_part(x + i, n - i), scale), n - i);
}

// Of the matrices of one head, which lie `stride` apart from row to row: those that a sequence begins with. In a fresh
// one the last place is cleared and begun with.
TM_INLINE const float* begin_state(const RowStep& step, int64_t sequence, float* first, int64_t stride, int64_t size) {
  if (step.positions[step.query_start[sequence]] != 0) return first + step.rows[sequence] * stride;
  float* state = first + step.last(sequence) * stride;
  std::memset(state, 0, static_cast<size_t>(size) * sizeof(float));
  return state;
}

// Where the state behind token t is written to: its own place, or the last one, which others are written over.
TM_INLINE float* state_behind(const RowStep& step, int64_t sequence, int64_t t, float* first, int64_t stride) {
  return first + (step.left && step.left[t] >= 0 ? step.left[t] : step.last(sequence)) * stride;
}

// kByKey: each of a matrix's key_dim lines has a decay of its own; otherwise all have one.
template <class T, bool kByKey>
void delta_typed(const DeltaOp& op) {
  const int64_t keys = op.key_heads * op.key_dim, share = op.value_heads / op.key_heads;
  const float root = 1.0f / __builtin_sqrtf(static_cast<float>(op.key_dim));
  auto task = [&](int64_t index) {
    const int64_t sequence = index / op.value_heads, head = index % op.value_heads, dim = op.value_dim;
    const int64_t key_head = op.tiled ? head % op.key_heads : head / share;
    const int64_t begin = op.step.query_start[sequence], end = op.step.query_start[sequence + 1];
    float* first = op.state + head * op.key_dim * dim;
    const int64_t stride = op.value_heads * op.key_dim * dim;
    const float* before = begin_state(op.step, sequence, first, stride, op.key_dim * dim);
    alignas(64) float q[kMostKeys], k[kMostKeys], decays[kByKey ? kMostKeys : 1];
    for (int64_t t = begin; t < end; ++t) {
      const T* mixed = static_cast<const T*>(op.mixed) + t * op.stride;
      const T* gates = static_cast<const T*>(op.gates) + t * op.gates_stride;
      scaled_unit(mixed + key_head * op.key_dim, q, op.key_dim, root);
      scaled_unit(mixed + keys + key_head * op.key_dim, k, op.key_dim, 1.0f);
      F same = zero();
      if (kByKey) {
        for (int64_t i = 0; i < op.key_dim; i += 16) {
          const int64_t at = head * op.key_dim + i, n = op.key_dim - i;
          const F pace = add(load_part(gates + op.value_heads + at, n), load_part(op.shift + at, n));
          store_part(decays + i, exp(mul(splat(-op.rate[head]), softplus(pace))), n);
        }
      } else {
        const float soft = softplus(to_float(gates[op.value_heads + head]) + op.shift[head]);
        same = splat(__builtin_expf(-op.rate[head] * soft));
      }
      auto decay = [&](int64_t i) { return kByKey ? splat(decays[i]) : same; };
      const F beta = splat(op.most_beta / (1.0f + __builtin_expf(-to_float(gates[head]))));
      const T* values = mixed + 2 * keys + head * dim;
      T* out = static_cast<T*>(op.out) + (t * op.value_heads + head) * dim;
      float* state = state_behind(op.step, sequence, t, first, stride);
      for (int64_t j = 0; j < dim; j += 16) {
        const int64_t n = dim - j;
        F known = zero();
        for (int64_t i = 0; i < op.key_dim; ++i) {
          known = fma(splat(k[i]), mul(load_part(before + i * dim + j, n), decay(i)), known);
        }
        const F delta = mul(sub(load_part(values + j, n), known), beta);
        F y = zero();
        for (int64_t i = 0; i < op.key_dim; ++i) {
          const F s = fma(splat(k[i]), delta, mul(load_part(before + i * dim + j, n), decay(i)));
          store_part(state + i * dim + j, s, n);
          y = fma(splat(q[i]), s, y);
        }
        store_part(out + j, y, n);
      }
      before = state;
    }
  };
  parallel_for(op.step.sequences * op.value_heads, task);
}
void delta_rule(const DeltaOp& op) {
  if (op.by_key) return op.type == Type::f32 ? delta_typed<float, true>(op) : delta_typed<bf16, true>(op);
  op.type == Type::f32 ? delta_typed<float, false>(op) : delta_typed<bf16, false>(op);
}

template <class T>
void space_typed(const SpaceOp& op) {
  const int64_t width = op.heads * op.head_dim, share = op.heads / op.groups;
  auto task = [&](int64_t index) {
    const int64_t sequence = index / op.heads, head = index % op.heads, dim = op.head_dim;
    const int64_t begin = op.step.query_start[sequence], end = op.step.query_start[sequence + 1];
    float* first = op.state + head * op.keys * dim;
    const int64_t stride = op.heads * op.keys * dim;
    const float* before = begin_state(op.step, sequence, first, stride, op.keys * dim);
    for (int64_t t = begin; t < end; ++t) {
      const T* x = static_cast<const T*>(op.mixed) + t * op.stride;
      const T* b = x + width + head / share * op.keys;
      const T* c = b + op.groups * op.keys;
      float rate = softplus(to_float(static_cast<const T*>(op.rates)[t * op.rates_stride + head]) + op.shift[head]);
      rate = rate < op.low ? op.low : rate > op.high ? op.high : rate;
      const F decay = splat(__builtin_expf(-op.rate[head] * rate)), pace = splat(rate);
      T* out = static_cast<T*>(op.out) + t * width + head * dim;
      float* state = state_behind(op.step, sequence, t, first, stride);
      for (int64_t j = 0; j < dim; j += 16) {
        const int64_t n = dim - j;
        const F value = load_part(x + head * dim + j, n), written = mul(value, pace);
        F y = mul(splat(op.skip[head]), value);
        for (int64_t i = 0; i < op.keys; ++i) {
          const F s = fma(splat(to_float(b[i])), written, mul(load_part(before + i * dim + j, n), decay));
          store_part(state + i * dim + j, s, n);
          y = fma(splat(to_float(c[i])), s, y);
        }
        store_part(out + j, y, n);
      }
      before = state;
    }
  };
  parallel_for(op.step.sequences * op.heads, task);
}
void state_space(const SpaceOp& op) { op.type == Type::f32 ? space_typed<float>(op) : space_typed<bf16>(op); }

template <class T>
void scan_typed(const ScanOp& op) {
  const int64_t pieces = divide_up(op.channels, 16);
  auto task = [&](int64_t index) {
    const int64_t sequence = index / pieces, first = index % pieces * 16, n = op.channels - first;
    const int64_t begin = op.step.query_start[sequence], end = op.step.query_start[sequence + 1];
    const int64_t stride = op.keys * op.channels;
    const float* state = op.state + op.step.rows[sequence] * stride + first;
    float* last = op.state + op.step.last(sequence) * stride + first;
    const bool fresh = op.step.positions[begin] == 0;
    F kept[kMostScanned];
    for (int64_t i = 0; i < op.keys; ++i) kept[i] = fresh ? zero() : load_part(state + i * op.channels, n);
    for (int64_t t = begin; t < end; ++t) {
      const T* b = static_cast<const T*>(op.mixed) + t * op.mixed_stride;
      alignas(64) float paces[16];
      store(paces, load_part(static_cast<const T*>(op.rates) + t * op.rates_stride + first, n));
      for (float& pace : paces) pace = softplus(pace);
      const F pace = load(paces), x = load_part(static_cast<const T*>(op.x) + t * op.stride + first, n);
      const F written = mul(pace, x);
      F y = mul(load_part(op.skip + first, n), x);
      for (int64_t i = 0; i < op.keys; ++i) {
        const F decay = exp(sub(zero(), mul(pace, load_part(op.rate + i * op.channels + first, n))));
        kept[i] = fma(splat(to_float(b[i])), written, mul(kept[i], decay));
        y = fma(splat(to_float(b[op.keys + i])), kept[i], y);
      }
      store_part(static_cast<T*>(op.out) + t * op.channels + first, y, n);
      if (!op.step.left || t + 1 == end || op.step.left[t] < 0) continue;
      float* left = op.state + op.step.left[t] * stride + first;
      for (int64_t i = 0; i < op.keys; ++i) store_part(left + i * op.channels, kept[i], n);
    }
    for (int64_t i = 0; i < op.keys; ++i) store_part(last + i * op.channels, kept[i], n);
  };
  parallel_for(op.step.sequences * pieces, task);
}
void selective_scan(const ScanOp& op) { op.type == Type::f32 ? scan_typed<float>(op) : scan_typed<bf16>(op); }

template <class T>
void gate_typed(const GateOp& op) {
  const bool wide = op.weights != op.size;
  auto gated = [&](const T* gate, int64_t i, int64_t n) {
    const F g = load_part(gate + i, n);
    return op.silu ? silu(g) : sigmoid(g);
  };
  parallel_rows(op.rows, op.width, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t at = 0; at < op.width; at += op.size) {
        const T* x = static_cast<const T*>(op.x) + row * op.stride + at;
        const T* gate = static_cast<const T*>(op.gate) + row * op.gate_stride + at;
        const T* weight = op.weight ? static_cast<const T*>(op.weight) + (wide ? at : 0) : nullptr;
        T* out = static_cast<T*>(op.out) + row * op.width + at;
        F squares = zero();
        for (int64_t i = 0; weight && i < op.size; i += 16) {
          F v = load_part(x + i, op.size - i);
          if (op.first) v = mul(v, gated(gate, i, op.size - i));
          squares = fma(v, v, squares);
        }
        const F root = splat(weight ? __builtin_sqrtf(sum(squares) / static_cast<float>(op.size) + op.eps) : 1.0f);
        for (int64_t i = 0; i < op.size; i += 16) {
          const int64_t n = op.size - i;
          const F g = gated(gate, i, n);
          F v = load_part(x + i, n);
          if (op.first || !weight) v = mul(v, g);
          if (weight) v = mul(div(v, root), add(load_part(weight + i, n), splat(op.offset)));
          if (!op.first && weight) v = mul(v, g);
          store_part(out + i, v, n);
        }
      }
    }
  });
}
void gated_norm(const GateOp& op) { op.type == Type::f32 ? gate_typed<float>(op) : gate_typed<bf16>(op); }

}  // namespace TM_NS
}  // namespace tokenmill
