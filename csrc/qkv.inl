// Between the q/k/v matmul and attention: head norms, rotary embedding, and the store into the paged cache.
namespace tokenmill {
namespace TM_NS {

// x [width] of one head, rotated in place; cos and sin belong to its position.
TM_INLINE void rotate(float* x, const float* cos, const float* sin, int dim, bool interleaved) {
  const int half = dim / 2;
  if (interleaved) {
    for (int i = 0; i < half; ++i) {
      const float a = x[2 * i], b = x[2 * i + 1];
      x[2 * i] = a * cos[i] - b * sin[i];
      x[2 * i + 1] = b * cos[i] + a * sin[i];
    }
    return;
  }
  for (int i = 0; i < half; i += 16) {
    const int n = half - i;
    const F a = load_part(x + i, n), b = load_part(x + half + i, n);
    const F c = load_part(cos + i, n), s = load_part(sin + i, n);
    store_part(x + i, sub(mul(a, c), mul(b, s)), n);
    store_part(x + half + i, add(mul(b, c), mul(a, s)), n);
  }
}

template <class From, class To>
TM_SHARED void convert(const From* x, To* out, int64_t width) {
  for (int64_t i = 0; i < width; i += 16) store_part(out + i, load_part(x + i, width - i), width - i);
}

// One token's heads of one kind -> float32 in `work`, normed and rotated.
template <class T>
TM_SHARED void prepare_heads(const T* x, float* work, int heads, const PrepareOp& op, const Norm& norm, bool whole,
                             int64_t position) {
  const int width = op.key_dim;
  if (norm.weight && whole) {
    norm_row(x, work, int64_t{heads} * width, norm);
  } else if (norm.weight) {
    for (int h = 0; h < heads; ++h) norm_row(x + int64_t{h} * width, work + int64_t{h} * width, width, norm);
  } else {
    convert(x, work, int64_t{heads} * width);
  }
  if (op.rope_dim == 0) return;
  const int64_t row = position * (op.rope_dim / 2);
  for (int h = 0; h < heads; ++h) {
    rotate(work + int64_t{h} * width + op.rope_start, op.cos + row, op.sin + row, op.rope_dim, op.interleaved);
  }
}

template <class T, class K>
void prepare_typed(const PrepareOp& op) {
  const int64_t q_width = int64_t{op.heads} * op.key_dim, k_width = int64_t{op.kv_heads} * op.key_dim;
  parallel_rows(op.tokens, (q_width + k_width) * 4, [&](int64_t begin, int64_t end) {
    auto* work = static_cast<float*>(scratch(Scratch::tile, static_cast<size_t>(at_least(q_width, k_width)) * 4 + 64));
    for (int64_t token = begin; token < end; ++token) {
      const T* row = static_cast<const T*>(op.qkv) + token * op.stride;
      prepare_heads(row, work, op.heads, op, op.q_norm, op.q_norm_whole, op.positions[token]);
      convert(work, static_cast<T*>(op.out) + token * q_width, q_width);
      const int64_t slot = op.slots[token];
      if (slot < 0) continue;
      const int64_t block = slot / op.block_size, offset = slot % op.block_size;
      prepare_heads(row + q_width, work, op.kv_heads, op, op.k_norm, op.k_norm_whole, op.positions[token]);
      K* key = static_cast<K*>(op.key) + block * op.key_block + offset * op.key_token;
      K* value = static_cast<K*>(op.value) + block * op.value_block + offset * op.value_token;
      for (int h = 0; h < op.kv_heads; ++h) {
        convert(work + int64_t{h} * op.key_dim, key + h * op.key_head, op.key_dim);
        if (op.value_dim == 0) continue;
        convert(row + q_width + k_width + int64_t{h} * op.value_dim, value + h * op.value_head, op.value_dim);
      }
    }
  });
}

void prepare(const PrepareOp& op) {
  with_type(op.type, [&](auto* t) {
    with_type(op.kv_type, [&](auto* k) {
      prepare_typed<std::remove_pointer_t<decltype(t)>, std::remove_pointer_t<decltype(k)>>(op);
    });
  });
}

}  // namespace TM_NS
}  // namespace tokenmill
