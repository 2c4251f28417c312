// Functions on sixteen lanes: partial loads, fixed-order sums, exp and its relatives.
namespace tokenmill {
namespace TM_NS {

TM_INLINE F keep_first(F x, int n, float other) { return blend_first(x, splat(other), n); }

TM_INLINE F load(const int8_t* p) { return load_int8(p); }

template <class T>
TM_INLINE F load_part(const T* p, int64_t n, float other = 0.0f) {
  if (n >= 16) return load(p);
  alignas(64) T buffer[16] = {};
  std::memcpy(buffer, p, static_cast<size_t>(n) * sizeof(T));
  return keep_first(load(buffer), static_cast<int>(n), other);
}
template <class T>
TM_INLINE void store_part(T* p, F x, int64_t n) {
  if (n >= 16) {
    store(p, x);
    return;
  }
  alignas(64) T buffer[16];
  store(buffer, x);
  std::memcpy(p, buffer, static_cast<size_t>(n) * sizeof(T));
}

// One tree for every instruction set: halves onto halves.
#if !defined(TM_FOLDS)
TM_INLINE float sum(F x) {
  alignas(64) float v[16];
  store(v, x);
  for (int step = 8; step > 0; step /= 2) {
    for (int i = 0; i < step; ++i) v[i] += v[i + step];
  }
  return v[0];
}
TM_INLINE float largest(F x) {
  alignas(64) float v[16];
  store(v, x);
  for (int step = 8; step > 0; step /= 2) {
    for (int i = 0; i < step; ++i) v[i] = v[i] > v[i + step] ? v[i] : v[i + step];
  }
  return v[0];
}
#endif

// Relative error below 2e-7; exp(0) is 1, exp(x < -87) is 0, and NaN stays NaN (max and min give their second operand
// when one is NaN).
TM_INLINE F exp(F x) {
  const F y = min(splat(88.3f), max(splat(-87.0f), x));
  const F n = round(mul(y, splat(1.44269504088896341f)));
  F r = fma(n, splat(-0.693359375f), y);
  r = fma(n, splat(2.12194440e-4f), r);
  F p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(mul(r, r), p, add(r, splat(1.0f)));
  return zero_below(mul(p, power_of_two(n)), x, -87.0f);
}
TM_INLINE F sigmoid(F x) { return div(splat(1.0f), add(splat(1.0f), exp(sub(zero(), x)))); }
TM_INLINE F tanh(F x) {
  const F e = exp(mul(abs(x), splat(-2.0f)));
  return copy_sign(div(sub(splat(1.0f), e), add(splat(1.0f), e)), x);
}
// Absolute error below 2e-7 (rational form in 1 / (1 + p |x|)).
TM_INLINE F erf(F x) {
  const F size = abs(x);
  const F t = div(splat(1.0f), fma(size, splat(0.3275911f), splat(1.0f)));
  F p = splat(1.061405429f);
  p = fma(p, t, splat(-1.453152027f));
  p = fma(p, t, splat(1.421413741f));
  p = fma(p, t, splat(-0.284496736f));
  p = fma(p, t, splat(0.254829592f));
  return copy_sign(sub(splat(1.0f), mul(mul(p, t), exp(sub(zero(), mul(size, size))))), x);
}

TM_INLINE F silu(F x) { return mul(x, sigmoid(x)); }
TM_INLINE F gelu(F x) { return mul(mul(splat(0.5f), x), add(splat(1.0f), erf(mul(x, splat(0.70710678118654752f))))); }
TM_INLINE F gelu_tanh(F x) {
  const F inner = fma(mul(splat(0.044715f), mul(x, x)), x, x);
  return mul(mul(splat(0.5f), x), add(splat(1.0f), tanh(mul(splat(0.79788456080286536f), inner))));
}

// Clipped numbers; NaN stays, as it does in torch.
TM_INLINE F clip_above(F x, float limit) { return min(splat(limit), x); }
TM_INLINE F clip(F x, float limit) { return max(splat(-limit), clip_above(x, limit)); }

// The value of a plain activation of x, or of a gated one with gate x.
TM_SHARED static F activate(Act act, F x, F up) {
  switch (act) {
    case Act::silu: return silu(x);
    case Act::gelu: return gelu(x);
    case Act::gelu_tanh: return gelu_tanh(x);
    case Act::relu: return max(x, zero());
    case Act::relu2: { const F r = max(x, zero()); return mul(r, r); }
    case Act::silu_mul: return mul(silu(x), up);
    case Act::gelu_mul: return mul(gelu(x), up);
    case Act::gelu_tanh_mul: return mul(gelu_tanh(x), up);
    case Act::oai_swiglu: {
      const F gate = clip_above(x, 7.0f);
      return mul(add(clip(up, 7.0f), splat(1.0f)), mul(gate, sigmoid(mul(splat(1.702f), gate))));
    }
    case Act::clipped_silu_mul: return mul(silu(clip_above(x, 10.0f)), clip(up, 10.0f));
    case Act::none: case Act::count: break;
  }
  return x;
}

// Calls body with a null pointer of the type that `type` names.
template <class Body>
TM_INLINE void with_type(Type type, Body body) {
  if (type == Type::f32) {
    body(static_cast<float*>(nullptr));
  } else {
    body(static_cast<bf16*>(nullptr));
  }
}

// Runs rows [0, count) in equal pieces of about `grain` elements of work each.
template <class Body>
TM_INLINE void parallel_rows(int64_t count, int64_t work_per_row, Body body) {
  const int64_t rows = at_least(1, 16384 / at_least(1, work_per_row));
  const int64_t pieces = divide_up(count, rows);
  if (pieces <= 1) {
    if (count > 0) body(0, count);
    return;
  }
  auto task = [&](int64_t piece) { body(piece * rows, at_most(count, (piece + 1) * rows)); };
  parallel_for(pieces, task);
}

}  // namespace TM_NS
}  // namespace tokenmill
