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

// x [width] -> int8 with a scale per group of `columns`: the largest magnitude over 127, kept in bf16; numbers are rounded
// against the kept scale. A group with anything that is not finite gets a scale of NaN.
TM_SHARED void store_scaled(const float* x, int64_t width, int64_t columns, int8_t* q, bf16* scale) {
  for (int64_t at = 0; at < width; at += columns, ++scale) {
    const int64_t n = at_most(columns, width - at);
    F top = zero(), trouble = zero();
    for (int64_t i = 0; i < n; i += 16) {
      const F part = load_part(x + at + i, n - i);
      top = max(abs(part), top);
      trouble = add(trouble, sub(part, part));
    }
    *scale = to_bf16(sum(trouble) == 0.0f ? largest(top) / 127.0f : __builtin_nanf(""));
    const float step = to_float(*scale);
    for (int64_t i = 0; i < n; i += 16) {
      alignas(64) int8_t numbers[16] = {};
      if (step > 0.0f) {
        const F y = div(load_part(x + at + i, n - i), splat(step));
        store_int8(numbers, round(max(min(y, splat(127.0f)), splat(-127.0f))));
      }
      std::memcpy(q + at + i, numbers, static_cast<size_t>(at_most(16, n - i)));
    }
  }
}

// x [width] -> int4: of a group of numbers the least one and a fifteenth of their range, kept in bf16, and whole numbers from
// 0 to 15 against these. A group with anything that is not finite gets a scale of NaN.
TM_SHARED void store_nibbles(const float* x, int64_t width, const ScaleOp& op, uint8_t* q, bf16* scale) {
  for (int64_t at = 0; at < width; at += op.columns, ++scale) {
    const int64_t n = at_most(op.columns, width - at);
    float low = x[at], high = x[at], trouble = 0.0f;
    for (int64_t i = at; i < at + n; ++i) {
      low = x[i] < low ? x[i] : low;
      high = x[i] > high ? x[i] : high;
      trouble += x[i] - x[i];
    }
    const bf16 least = to_bf16(trouble == 0.0f ? low : __builtin_nanf(""));
    const float from = to_float(least), range = high - from;
    const bf16 step = to_bf16(trouble == 0.0f ? (range > 0.0f ? range : 0.0f) / 15.0f : __builtin_nanf(""));
    scale[0] = step;
    scale[op.least] = least;
    const float by = to_float(step);
    for (int64_t i = at; i < at + n; ++i) {
      const float y = by > 0.0f ? __builtin_rintf((x[i] - from) / by) : 0.0f;
      const auto number = static_cast<uint8_t>(y < 0.0f ? 0.0f : y > 15.0f ? 15.0f : y);
      uint8_t& byte = q[i < op.half ? i : i - op.half];
      byte = static_cast<uint8_t>(i < op.half ? (byte & 0xF0) | number : (byte & 0x0F) | number << 4);
    }
  }
}

TM_INLINE bf16* scale_at(const ScaleOp& op, int64_t block, int64_t head, int64_t offset) {
  return static_cast<bf16*>(op.data) + block * op.block + head * op.head + offset * op.token;
}

// Keys and values that are stored as they are.
template <class T, class K>
TM_INLINE void store_plain(const PrepareOp& op, const float* keys, const T* values, int64_t block, int64_t offset) {
  K* key = static_cast<K*>(op.key) + block * op.key_block + offset * op.key_token;
  K* value = static_cast<K*>(op.value) + block * op.value_block + offset * op.value_token;
  for (int h = 0; h < op.kv_heads; ++h) {
    convert(keys + int64_t{h} * op.key_dim, key + h * op.key_head, op.key_dim);
    if (op.value_dim) convert(values + int64_t{h} * op.value_dim, value + h * op.value_head, op.value_dim);
  }
}

// The same in int8; `keys` is scratch for values afterwards.
template <class T>
TM_INLINE void store_numbers(const PrepareOp& op, float* keys, const T* values, int64_t block, int64_t offset) {
  auto* key = static_cast<int8_t*>(op.key) + block * op.key_block + offset * op.key_token;
  auto* value = static_cast<int8_t*>(op.value) + block * op.value_block + offset * op.value_token;
  for (int h = 0; h < op.kv_heads; ++h) {
    store_scaled(keys + int64_t{h} * op.key_dim, op.key_dim, op.key_scale.columns, key + h * op.key_head,
                 scale_at(op.key_scale, block, h, offset));
  }
  if (op.value_dim == 0) return;
  for (int h = 0; h < op.kv_heads; ++h) {
    convert(values + int64_t{h} * op.value_dim, keys, op.value_dim);
    store_scaled(keys, op.value_dim, op.value_scale.columns, value + h * op.value_head,
                 scale_at(op.value_scale, block, h, offset));
  }
}

// The same in int4.
template <class T>
TM_INLINE void store_fours(const PrepareOp& op, float* keys, const T* values, int64_t block, int64_t offset) {
  auto* key = static_cast<uint8_t*>(op.key) + block * op.key_block + offset * op.key_token;
  auto* value = static_cast<uint8_t*>(op.value) + block * op.value_block + offset * op.value_token;
  for (int h = 0; h < op.kv_heads; ++h) {
    store_nibbles(keys + int64_t{h} * op.key_dim, op.key_dim, op.key_scale, key + h * op.key_head,
                  scale_at(op.key_scale, block, h, offset));
  }
  if (op.value_dim == 0) return;
  for (int h = 0; h < op.kv_heads; ++h) {
    convert(values + int64_t{h} * op.value_dim, keys, op.value_dim);
    store_nibbles(keys, op.value_dim, op.value_scale, value + h * op.value_head,
                  scale_at(op.value_scale, block, h, offset));
  }
}

template <class T, class K>
void prepare_typed(const PrepareOp& op) {
  const int64_t q_width = int64_t{op.heads} * op.key_dim, k_width = int64_t{op.kv_heads} * op.key_dim;
  parallel_rows(op.tokens, (q_width + k_width) * 4, [&](int64_t begin, int64_t end) {
    auto* work = static_cast<float*>(scratch(Scratch::tile, static_cast<size_t>(at_least(at_least(q_width, k_width), op.value_dim)) * 4 + 64));
    for (int64_t token = begin; token < end; ++token) {
      const T* row = static_cast<const T*>(op.qkv) + token * op.stride;
      prepare_heads(row, work, op.heads, op, op.q_norm, op.q_norm_whole, op.positions[token]);
      convert(work, static_cast<T*>(op.out) + token * q_width, q_width);
      const int64_t slot = op.slots[token];
      if (slot < 0) continue;
      const int64_t block = slot / op.block_size, offset = slot % op.block_size;
      prepare_heads(row + q_width, work, op.kv_heads, op, op.k_norm, op.k_norm_whole, op.positions[token]);
      const T* values = row + q_width + k_width;
      if constexpr (std::is_same<K, int8_t>::value) {
        store_numbers(op, work, values, block, offset);
      } else if constexpr (std::is_same<K, uint8_t>::value) {
        store_fours(op, work, values, block, offset);
      } else {
        store_plain<T, K>(op, work, values, block, offset);
      }
    }
  });
}

void prepare(const PrepareOp& op) {
  with_type(op.type, [&](auto* t) {
    if (op.kv_type == Type::int8) return prepare_typed<std::remove_pointer_t<decltype(t)>, int8_t>(op);
    if (op.kv_type == Type::int4) return prepare_typed<std::remove_pointer_t<decltype(t)>, uint8_t>(op);
    with_type(op.kv_type, [&](auto* k) {
      prepare_typed<std::remove_pointer_t<decltype(t)>, std::remove_pointer_t<decltype(k)>>(op);
    });
  });
}

}  // namespace TM_NS
}  // namespace tokenmill
