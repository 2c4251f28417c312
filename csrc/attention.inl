// Paged attention: decode, prefill and mixed batches in one call.
//
// Rows are (query, head of the group) pairs that share one key/value head. Keys are taken in tiles of 64 absolute
// positions; eight tiles make a chunk. Within a chunk: all scores, their maximum, exponentials, weighted values; a
// row's chunks are then merged in ascending order. Masked keys count exactly zero, so a row's result depends on its
// own query and keys only. Long contexts with few rows run one chunk a task and merge afterwards: the same sums.
// Queries, keys and values in bf16 multiply in pairs where the machine can (then the exponentials are rounded to bf16,
// their sum is not); everything else is float32. Keys and values in int8 and int4 are widened a tile at a time, before anything
// looks at them: to bf16 where those multiply in pairs, else to float32.
namespace tokenmill {
namespace TM_NS {

constexpr int kTileKeys = 64;
constexpr int kTiles = kChunkKeys / kTileKeys;
constexpr int64_t kQueryRows = 48;  // a multiple of every register tile

struct Item {  // one block of rows of one sequence and key/value head
  int64_t sequence, head, query, queries, row, rows;  // query: the sequence's first token; row counts (query, head)
  int64_t oldest, newest;                             // positions of the block's queries
  int64_t chunk_begin, chunk_end;
  int64_t partial;                                    // index of its first chunk's result when chunks are tasks
};

struct ChunkTask {
  int64_t item, chunk;
};

struct Row {  // a softmax state
  float top, total;
};

// Everything one task needs while it works on an item, in the thread's scratch.
struct Work {
  uint8_t* q;       // rows in compute type, padded with zeros
  uint8_t* keys;    // one packed tile
  float* scores;    // [rows, kChunkKeys]
  float* values;    // [rows, value_pad] of one chunk
  Row* state;       // of one chunk
  int64_t* position;      // of each row's query
  const void** key;       // [kChunkKeys], values alike: where the chunk lies
  const void** value;
  const void** seen;      // the values that one row sees
  const void** key_scale;    // of int8, and where their numbers are widened to: a tile of keys, a chunk of values
  const void** value_scale;
  uint8_t* wide_keys;
  uint8_t* wide_values;
};

// A group's scale for the 16 numbers from i on.
TM_INLINE F of_groups(const bf16* scale, int64_t i, int64_t width, int64_t columns) {
  if (columns >= width || columns % 16 == 0) return splat(to_float(scale[i / columns]));
  alignas(64) float each[16];
  for (int64_t j = 0; j < 16; ++j) each[j] = to_float(scale[at_most(i + j, width - 1) / columns]);
  return load(each);
}

// Numbers of one head, times their scales.
template <class K>
TM_INLINE void widen_row(const int8_t* q, const bf16* scale, int64_t width, int64_t columns, K* out) {
  for (int64_t i = 0; i < width; i += 16) {
    store(out + i, mul(load_part(q + i, width - i), of_groups(scale, i, width, columns)));  // rows are padded to whole lines
  }
}

// The 16 numbers from i on of a head in int4.
TM_INLINE F nibbles(const uint8_t* q, int64_t i, int64_t width, int64_t half) {
  alignas(64) int8_t each[16];
  if (i + 16 <= half) {
    for (int64_t j = 0; j < 16; ++j) each[j] = static_cast<int8_t>(q[i + j] & 15);
  } else if (i >= half && i + 16 <= 2 * half) {
    for (int64_t j = 0; j < 16; ++j) each[j] = static_cast<int8_t>(q[i + j - half] >> 4);
  } else {
    for (int64_t j = 0; j < 16; ++j) {
      const int64_t n = at_most(i + j, width - 1);
      each[j] = static_cast<int8_t>(n < half ? q[n] & 15 : q[n - half] >> 4);
    }
  }
  return load_part(each, 16);
}

template <class K>
TM_INLINE void widen_nibbles(const uint8_t* q, const bf16* scale, int64_t width, const ScaleOp& op, K* out) {
  for (int64_t i = 0; i < width; i += 16) {
    const F step = of_groups(scale, i, width, op.columns), least = of_groups(scale + op.least, i, width, op.columns);
    store(out + i, add(mul(nibbles(q, i, width, op.half), step), least));
  }
}

// T: of queries and results; K: of keys and values, kScaled: after they were widened from int8.
template <class T, class K, bool kScaled = false>
struct Attention {
  static constexpr bool kPaired = kPairs && std::is_same<T, bf16>::value && std::is_same<K, bf16>::value;
  using Step = typename std::conditional<kPaired, PairStep, FloatStep>::type;
  using C = typename Step::X;

  const AttentionOp& op;
  const int64_t group, depth, steps, value_pad, value_line;

  explicit Attention(const AttentionOp& from)
      : op(from),
        group(from.heads / from.kv_heads),
        depth(divide_up(from.key_dim, 32) * 32),
        steps(depth / Step::kPerStep),
        value_pad(divide_up(from.value_dim, 16) * 16),
        value_line(divide_up(from.value_dim, 32) * 32) {}

  int64_t position(const Item& item, int64_t row) const { return op.positions[item.query + row / group]; }

  // The first position that a query at this one sees.
  int64_t lowest(int64_t at) const {
    if (op.window < 0) return at - at % -op.window;
    return op.window ? at_least(0, at - op.window + 1) : 0;
  }

  Work make_work(int64_t rows) const {
    const auto q_bytes = static_cast<size_t>(rows * depth) * sizeof(C) + 64;
    Work work;
    work.q = static_cast<uint8_t*>(scratch(Scratch::activations, q_bytes));
    work.keys = static_cast<uint8_t*>(scratch(Scratch::tile, static_cast<size_t>(steps * kStepBytes)));
    const auto floats = static_cast<size_t>(rows * (kChunkKeys + value_pad + 4));
    work.scores = static_cast<float*>(scratch(Scratch::scores, floats * 4 + 64));
    work.values = work.scores + rows * kChunkKeys;
    work.state = reinterpret_cast<Row*>(work.values + rows * value_pad);
    work.position = reinterpret_cast<int64_t*>(work.state + rows);
    const size_t lines = kScaled ? (kTileKeys * depth + kChunkKeys * value_line) * sizeof(K) : 0;
    auto* pointers = static_cast<uint8_t*>(scratch(Scratch::pointers, sizeof(void*) * 5 * kChunkKeys + lines));
    work.key = reinterpret_cast<const void**>(pointers);
    work.value = work.key + kChunkKeys;
    work.seen = work.value + kChunkKeys;
    work.key_scale = work.seen + kChunkKeys;
    work.value_scale = work.key_scale + kChunkKeys;
    work.wide_keys = reinterpret_cast<uint8_t*>(work.value_scale + kChunkKeys);
    work.wide_values = work.wide_keys + kTileKeys * depth * static_cast<int64_t>(sizeof(K));
    return work;
  }

  void load_queries(const Item& item, const Work& work) const {
    for (int64_t r = 0; r < item.rows; ++r) {
      const int64_t row = item.row + r, token = item.query + row / group;
      const int64_t head = item.head * group + row % group;
      C* out = reinterpret_cast<C*>(work.q) + r * depth;
      work.position[r] = position(item, row);
      convert(static_cast<const T*>(op.q) + (token * op.heads + head) * op.key_dim, out, op.key_dim);
      std::memset(static_cast<void*>(out + op.key_dim), 0, static_cast<size_t>(depth - op.key_dim) * sizeof(C));
    }
  }

  // Where the keys and values of 64 positions lie; a position that the table lacks gets the row of zeros and a hole.
  bool locate(const Item& item, const Work& work, int64_t start, int at) const {
    using S = typename std::conditional<kScaled, int8_t, K>::type;
    const void** keys = work.key + at;
    const void** values = work.value + at;
    const int64_t length = op.kv_len[item.sequence];
    const int32_t* table = op.tables + item.sequence * op.max_entries;
    const int32_t* first = op.first ? op.first + item.sequence * op.max_entries : nullptr;
    const int64_t entries = op.entries[item.sequence], last = at_most(start + kTileKeys, length);
    const int64_t stop = op.roots ? at_most(last, op.roots[item.sequence]) : last;
    for (int i = 0; i < kTileKeys; ++i) keys[i] = values[i] = kZeroRow;
    const auto put = [&](int64_t p, int64_t block, int64_t offset) {
      keys[p - start] = static_cast<const S*>(op.key) + block * op.key_block + item.head * op.key_head +
                        offset * op.key_token;
      values[p - start] = static_cast<const S*>(op.value) + block * op.value_block + item.head * op.value_head +
                          offset * op.value_token;
      if (kScaled) {
        work.key_scale[at + p - start] = scale_at(op.key_scale, block, item.head, offset);
        work.value_scale[at + p - start] = scale_at(op.value_scale, block, item.head, offset);
      }
    };
    const auto holder = [&](int64_t p) {  // the last entry that begins at or before p
      if (!first) return p / op.block_size;
      int64_t low = 0, high = entries;
      while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (first[middle] <= p) low = middle + 1; else high = middle;
      }
      return at_least(0, low - 1);
    };
    int64_t found = 0;
    for (int64_t entry = holder(start); entry < entries; ++entry) {
      const int64_t begin = first ? first[entry] : entry * op.block_size;
      if (begin >= stop) break;
      int64_t end = at_most(begin + op.block_size, stop);
      if (first && entry + 1 < entries) end = at_most(end, first[entry + 1]);
      const int64_t block = table[entry];
      for (int64_t p = at_least(begin, start); p < end; ++p, ++found) {
        put(p, block, p - begin);
      }
    }
    for (int64_t p = at_least(start, stop); p < last; ++p, ++found) {  // of a tree: each at its node's place
      const int64_t root = op.roots[item.sequence];
      const int64_t where = root + op.places[item.sequence * op.path_width + p - root], entry = holder(where);
      put(p, table[entry], where - (first ? first[entry] : entry * op.block_size));
    }
    return found == kTileKeys;
  }

  // The 64 positions from `at` of the chunk in K instead of int8 or int4: the pointers move to the widened rows.
  void widen(const Work& work, int at) const {
    for (int i = at; i < at + kTileKeys; ++i) {
      if (work.key[i] == kZeroRow) continue;
      K* key = reinterpret_cast<K*>(work.wide_keys) + (i - at) * depth;
      K* value = reinterpret_cast<K*>(work.wide_values) + i * value_line;
      if (op.kv_type == Type::int4) {
        widen_nibbles(static_cast<const uint8_t*>(work.key[i]), static_cast<const bf16*>(work.key_scale[i]), op.key_dim,
                      op.key_scale, key);
        widen_nibbles(static_cast<const uint8_t*>(work.value[i]), static_cast<const bf16*>(work.value_scale[i]),
                      op.value_dim, op.value_scale, value);
        work.key[i] = key;
        work.value[i] = value;
        continue;
      }
      widen_row(static_cast<const int8_t*>(work.key[i]), static_cast<const bf16*>(work.key_scale[i]), op.key_dim,
                op.key_scale.columns, key);
      widen_row(static_cast<const int8_t*>(work.value[i]), static_cast<const bf16*>(work.value_scale[i]), op.value_dim,
                op.value_scale.columns, value);
      work.key[i] = key;
      work.value[i] = value;
    }
  }

  // 64 keys -> the layout of a weight tile. `dwords`: of one key, padded.
  void pack_keys(const void* const* keys, uint8_t* out) const {
    Line rows[16], columns[16];
    for (int v = 0; v < 4; ++v) {
      for (int64_t s = 0; s < steps; s += 16) {
        const int64_t at = s * Step::kPerStep;  // element
        for (int i = 0; i < 16; ++i) {
          const K* key = static_cast<const K*>(keys[16 * v + i]) + at;
          rows[i] = kPaired ? pair_line(key, op.key_dim - at) : as_line(float_line(key, op.key_dim - at));
        }
        transpose(rows, columns);
        for (int64_t i = 0; i < at_most(16, steps - s); ++i) {
          store_line(out + (s + i) * kStepBytes + v * kLine, columns[i]);
        }
      }
    }
  }
  static TM_INLINE F float_line(const K* key, int64_t n) { return n <= 0 ? zero() : load_part(key, n); }
  static TM_INLINE Line pair_line(const K* key, int64_t n) {
    if (n >= 32) return load_line(key);
    alignas(64) K buffer[64 / sizeof(K)] = {};
    if (n > 0) std::memcpy(buffer, key, static_cast<size_t>(n) * sizeof(K));
    return load_line(buffer);
  }

  static TM_INLINE void prefetch_rows(const void* const* rows, int64_t width) {
    const int64_t bytes = width * static_cast<int64_t>(kScaled ? 1 : sizeof(K));
    for (int i = 0; i < kTileKeys; ++i) {
      const char* row = static_cast<const char*>(rows[i]);
      for (int64_t at = 0; at < bytes; at += kLine) prefetch(row + at);
    }
  }

  // Whether scores are changed before the softmax, for which they must be scaled first.
  bool shaped() const { return op.softcap != 0.0f || op.alibi; }

  void shape_scores(const Item& item, const Work& work, int64_t start, float* scores) const {
    for (int64_t r = 0; r < item.rows; ++r) {
      const float slope = op.alibi ? op.alibi[item.head * group + (item.row + r) % group] : 0.0f;
      for (int v = 0; v < 4; ++v) {
        float* p = scores + r * kChunkKeys + 16 * v;
        F s = mul(load(p), splat(op.scale));
        if (op.softcap != 0.0f) s = mul(splat(op.softcap), tanh(div(s, splat(op.softcap))));
        if (op.alibi) {
          alignas(64) float distance[16];
          for (int i = 0; i < 16; ++i) distance[i] = static_cast<float>(work.position[r] - start - 16 * v - i);
          s = sub(s, mul(splat(slope), load(distance)));
        }
        store(p, s);
      }
    }
  }

  // Columns are positions start .. start + 63: what a row must not see becomes minus infinity.
  void mask_scores(const Item& item, const Work& work, const void* const* keys, int64_t start, float* scores) const {
    const F none = splat(-__builtin_inff());
    alignas(64) float holes[kTileKeys];
    for (int i = 0; i < kTileKeys; ++i) holes[i] = keys[i] == kZeroRow ? -__builtin_inff() : 0.0f;
    for (int64_t r = 0; r < item.rows; ++r) {
      const int64_t last = work.position[r] - start + 1;      // the first `last` keys are not in the future
      const int64_t gone = lowest(work.position[r]) - start;  // the first `gone` keys have left the window
      for (int v = 0; v < 4; ++v) {
        float* p = scores + r * kChunkKeys + 16 * v;
        const int64_t keep = at_least(0, at_most(16, last - 16 * v)), drop = at_least(0, at_most(16, gone - 16 * v));
        F s = add(load(p), load(holes + 16 * v));
        s = blend_first(s, none, static_cast<int>(keep));  // not a sum: NaN must go, too
        store(p, blend_first(none, s, static_cast<int>(drop)));
      }
    }
  }

  // Scores of tiles [begin, end) of a row -> exponentials, in pairs of bf16 from the row's start where values are
  // multiplied so; returns the row's (scaled) maximum and their sum.
  Row softmax(float* scores, int begin, int end) const {
    F top = splat(-__builtin_inff()), other = top;
    for (int i = begin * kTileKeys; i < end * kTileKeys; i += 32) {
      top = max(load(scores + i), top);
      other = max(load(scores + i + 16), other);
    }
    const float best = largest(max(top, other));
    if (!(best > -__builtin_inff())) {
      bool broken = false;
      for (int i = begin * kTileKeys; i < end * kTileKeys; ++i) broken = broken || scores[i] != scores[i];
      std::memset(scores, 0, kChunkKeys * 4);
      return {-__builtin_inff(), broken ? __builtin_nanf("") : 0.0f};
    }
    const float scale = shaped() ? 1.0f : op.scale;
    F total = zero();
    for (int i = begin * kTileKeys; i < end * kTileKeys; i += 16) {
      const F p = exp(mul(sub(load(scores + i), splat(best)), splat(scale)));
      total = add(total, p);
      if (kPaired) {
        store(reinterpret_cast<bf16*>(scores) + i, p);
      } else {
        store(scores + i, p);
      }
    }
    return {best * scale, sum(total)};
  }

  template <int R, int V>
  static void value_block(const float* p, const void* const* values, int64_t begin, int64_t end, int64_t at, int64_t n,
                          float* out, int64_t out_stride) {
    F acc[R][V];
    for (int r = 0; r < R; ++r) {
      for (int v = 0; v < V; ++v) acc[r][v] = zero();
    }
    for (int64_t k = begin; k < end; ++k) {
      const K* value = static_cast<const K*>(values[k]) + at;
      F line[V];
      for (int v = 0; v < V; ++v) line[v] = n >= 16 * V ? load(value + 16 * v) : load_part(value + 16 * v, n - 16 * v);
      for (int r = 0; r < R; ++r) {
        const F weight = splat(p[r * kChunkKeys + k]);
        for (int v = 0; v < V; ++v) acc[r][v] = fma(weight, line[v], acc[r][v]);
      }
    }
    for (int r = 0; r < R; ++r) {
      for (int v = 0; v < V; ++v) store(out + r * out_stride + at + 16 * v, acc[r][v]);
    }
  }
  template <int R>
  void value_rows(const float* p, const void* const* values, int64_t begin, int64_t end, float* out) const {
    int64_t at = 0;
    for (; at + 64 <= op.value_dim; at += 16 * kVectors) {
      value_block<R, kVectors>(p, values, begin, end, at, op.value_dim - at, out, value_pad);
    }
    for (; at < op.value_dim; at += 16) {
      value_block<R, 1>(p, values, begin, end, at, op.value_dim - at, out, value_pad);
    }
  }
#if defined(TM_BF16)
  // Two keys at a time: their values interleaved, the pair of their weights broadcast. B: blocks of 32 columns.
  template <int R, int B>
  static void pair_block(const float* scores, const void* const* values, int64_t begin, int64_t end, int64_t at,
                         int64_t n, float* out, int64_t out_stride) {
    F low[R][B], high[R][B];
    for (int r = 0; r < R; ++r) {
      for (int b = 0; b < B; ++b) low[r][b] = high[r][b] = zero();
    }
    for (int64_t k = begin; k < end; k += 2) {
      const K* one = static_cast<const K*>(values[k]) + at;
      const K* two = static_cast<const K*>(values[k + 1]) + at;
      Line front[B], back[B];
      for (int b = 0; b < B; ++b) {
        const Line x = B > 1 ? load_line(one + 32 * b) : pair_line(one, n);
        const Line y = B > 1 ? load_line(two + 32 * b) : pair_line(two, n);
        front[b] = mix_low(x, y);
        back[b] = mix_high(x, y);
      }
      for (int r = 0; r < R; ++r) {
        const Line weights = splat_pair(reinterpret_cast<const bf16*>(scores + r * kChunkKeys) + k);
        for (int b = 0; b < B; ++b) {
          low[r][b] = dot_pairs(low[r][b], front[b], weights);
          high[r][b] = dot_pairs(high[r][b], back[b], weights);
        }
      }
    }
    for (int r = 0; r < R; ++r) {
      for (int b = 0; b < B; ++b) {
        F first, second;
        unmix(low[r][b], high[r][b], &first, &second);
        float* to = out + r * out_stride + at + 32 * b;
        store(to, first);
        if (n > 32 * b + 16) store(to + 16, second);
      }
    }
  }
#endif
  template <int R>
  void any_value_rows(const float* p, const void* const* values, int64_t begin, int64_t end, float* out) const {
#if defined(TM_BF16)
    if (kPaired) {
      int64_t at = 0;
      for (; at + 64 <= op.value_dim; at += 64) {
        pair_block<R, 2>(p, values, begin, end, at, op.value_dim - at, out, value_pad);
      }
      for (; at < op.value_dim; at += 32) {
        pair_block<R, 1>(p, values, begin, end, at, op.value_dim - at, out, value_pad);
      }
      return;
    }
#endif
    value_rows<R>(p, values, begin, end, out);
  }
  void weighted_values(int64_t rows, const Work& work, int begin, int end) const {
    const int64_t a = int64_t{begin} * kTileKeys, b = int64_t{end} * kTileKeys;
    int64_t tiles = divide_up(rows, kRows);
    for (int64_t row = 0; row < rows; --tiles) {
      const int64_t n = divide_up(rows - row, tiles);
      const float* p = work.scores + row * kChunkKeys;
      float* out = work.values + row * value_pad;
      switch (n) {
        case 1: any_value_rows<1>(p, work.value, a, b, out); break;
        case 2: any_value_rows<2>(p, work.value, a, b, out); break;
        case 3: any_value_rows<(kRows < 3 ? 2 : 3)>(p, work.value, a, b, out); break;
        case 4: any_value_rows<(kRows < 4 ? 2 : 4)>(p, work.value, a, b, out); break;
        case 5: any_value_rows<(kRows < 5 ? 2 : 5)>(p, work.value, a, b, out); break;
        default: any_value_rows<(kRows < 6 ? 2 : 6)>(p, work.value, a, b, out); break;
      }
      row += n;
    }
  }

  bool broken_values(const void* const* values) const {
    F total = zero();
    for (int k = 0; k < kTileKeys; ++k) {
      const K* value = static_cast<const K*>(values[k]);
      for (int64_t i = 0; i < op.value_dim; i += 16) {
        const F v = load_part(value + i, op.value_dim - i);
        total = add(total, sub(v, v));
      }
    }
    return !(sum(total) == 0.0f);
  }

  // 0 * NaN is NaN: without this a broken token would reach the positions before it, and caches that share those.
  void weighted_seen_values(const Item& item, const Work& work, int64_t start, int begin, int end) const {
    const int64_t a = int64_t{begin} * kTileKeys, b = int64_t{end} * kTileKeys;
    for (int64_t r = 0; r < item.rows; ++r) {
      const int64_t at = work.position[r] - start, low = lowest(work.position[r]) - start;
      for (int64_t k = a; k < b; ++k) {
        const bool seen = k <= at && k >= low;
        work.seen[k] = seen ? work.value[k] : kZeroRow;
      }
      any_value_rows<1>(work.scores + r * kChunkKeys, work.seen, a, b, work.values + r * value_pad);
    }
  }

  // One chunk of keys for one item: work.state and work.values.
  void chunk(const Item& item, const Work& work, int64_t index) const {
    const int64_t start = index * kChunkKeys;
    const int64_t low = lowest(item.oldest);
    const int64_t high = at_most(item.newest + 1, op.kv_len[item.sequence]);
    const int begin = static_cast<int>(at_least(0, (low - start) / kTileKeys));
    const int end = static_cast<int>(at_least(begin, at_most(kTiles, divide_up(high - start, kTileKeys))));
    bool full[kTiles];
    for (int tile = begin; tile < end; ++tile) {
      const int at = tile * kTileKeys;
      full[tile] = locate(item, work, start + at, at);
    }
    bool broken = false;
    if (begin < end) prefetch_rows(work.key + begin * kTileKeys, op.key_dim);
    if (kScaled && begin < end) prefetch_rows(work.value + begin * kTileKeys, op.value_dim);
    for (int tile = begin; tile < end; ++tile) {
      const int at = tile * kTileKeys;
      const int64_t from = start + at;
      // Pages are scattered, so the machine does not guess what comes next.
      if (tile + 1 < end) prefetch_rows(work.key + at + kTileKeys, op.key_dim);
      if (!kScaled) {
        prefetch_rows(work.value + at, op.value_dim);
      } else {
        if (tile + 1 < end) prefetch_rows(work.value + at + kTileKeys, op.value_dim);
        widen(work, at);
      }
      pack_keys(work.key + at, work.keys);
      float* scores = work.scores + at;
      dense_tile<Step>(work.keys, steps, reinterpret_cast<const C*>(work.q), depth, item.rows, scores, kChunkKeys,
                       false);
      if (shaped()) shape_scores(item, work, from, scores);
      const bool seen = from + kTileKeys - 1 <= item.oldest && from >= lowest(item.newest);
      if (!seen || !full[tile]) mask_scores(item, work, work.key + at, from, scores);
      if (!seen) broken = broken || broken_values(work.value + at);
    }
    for (int64_t r = 0; r < item.rows; ++r) work.state[r] = softmax(work.scores + r * kChunkKeys, begin, end);
    if (broken) {
      weighted_seen_values(item, work, start, begin, end);
    } else {
      weighted_values(item.rows, work, begin, end);
    }
  }

  // state, values <- merged with a later chunk's.
  void merge(Row& state, float* values, const Row& later, const float* more) const {
    if (later.total == 0.0f) return;
    if (state.total == 0.0f) {
      state = later;
      std::memcpy(values, more, static_cast<size_t>(value_pad) * 4);
      return;
    }
    const float top = state.top > later.top ? state.top : later.top;
    const float mine = exp_one(state.top - top), theirs = exp_one(later.top - top);
    for (int64_t i = 0; i < value_pad; i += 16) {
      store(values + i, fma(load(more + i), splat(theirs), mul(load(values + i), splat(mine))));
    }
    state = {top, state.total * mine + later.total * theirs};
  }
  static TM_INLINE float exp_one(float x) {
    alignas(64) float v[16];
    store(v, exp(splat(x)));
    return v[0];
  }

  void finish_row(const Item& item, int64_t r, const Row& state, const float* values) const {
    const int64_t row = item.row + r, token = item.query + row / group, head = item.head * group + row % group;
    float total = state.total, scale = 1.0f;
    if (op.sinks) {  // one more logit that takes weight and gives no value
      const float sink = op.sinks[head];
      const float top = state.total != 0.0f && state.top > sink ? state.top : sink;
      scale = state.total != 0.0f ? exp_one(state.top - top) : 0.0f;
      total = state.total * scale + exp_one(sink - top);
    }
    const F by = splat(total != 0.0f ? scale / total : 0.0f);
    T* out = static_cast<T*>(op.out) + (token * op.heads + head) * op.value_dim;
    for (int64_t i = 0; i < op.value_dim; i += 16) {
      const F y = state.total != 0.0f ? mul(load(values + i), by) : zero();
      store_part(out + i, y, op.value_dim - i);
    }
  }

  void whole_item(const Item& item) const {
    const Work work = make_work(item.rows);
    load_queries(item, work);
    const auto floats = static_cast<size_t>(item.rows * (value_pad + 2));
    auto* values = static_cast<float*>(scratch(Scratch::partials, floats * 4 + 64));
    Row* state = reinterpret_cast<Row*>(values + item.rows * value_pad);
    for (int64_t r = 0; r < item.rows; ++r) state[r] = {-__builtin_inff(), 0.0f};
    for (int64_t c = item.chunk_begin; c < item.chunk_end; ++c) {
      chunk(item, work, c);
      for (int64_t r = 0; r < item.rows; ++r) {
        merge(state[r], values + r * value_pad, work.state[r], work.values + r * value_pad);
      }
    }
    for (int64_t r = 0; r < item.rows; ++r) finish_row(item, r, state[r], values + r * value_pad);
  }

  int64_t partial_floats(const Item& item) const { return item.rows * (value_pad + 2); }

  void one_chunk(const Item& item, int64_t index, float* partials) const {
    const Work work = make_work(item.rows);
    load_queries(item, work);
    chunk(item, work, index);
    float* values = partials + item.partial + (index - item.chunk_begin) * partial_floats(item);
    std::memcpy(values, work.values, static_cast<size_t>(item.rows * value_pad) * 4);
    std::memcpy(values + item.rows * value_pad, work.state, static_cast<size_t>(item.rows) * sizeof(Row));
  }

  void merge_item(const Item& item, float* partials) const {
    float* values = partials + item.partial;
    Row* state = reinterpret_cast<Row*>(values + item.rows * value_pad);
    for (int64_t c = item.chunk_begin + 1; c < item.chunk_end; ++c) {
      const float* more = partials + item.partial + (c - item.chunk_begin) * partial_floats(item);
      const Row* later = reinterpret_cast<const Row*>(more + item.rows * value_pad);
      for (int64_t r = 0; r < item.rows; ++r) merge(state[r], values + r * value_pad, later[r], more + r * value_pad);
    }
    for (int64_t r = 0; r < item.rows; ++r) finish_row(item, r, state[r], values + r * value_pad);
  }

  std::vector<Item> make_items() const {
    std::vector<Item> items;
    int64_t partial = 0;
    for (int64_t s = 0; s < op.sequences; ++s) {
      const int64_t query = op.query_start[s], queries = op.query_start[s + 1] - query;
      for (int64_t row = 0; row < queries * group; row += kQueryRows) {
        const int64_t rows = at_most(kQueryRows, queries * group - row);
        for (int64_t head = 0; head < op.kv_heads; ++head) {
          Item item{s, head, query, queries, row, rows, 0, 0, 0, 0, partial};
          item.oldest = position(item, row);
          item.newest = position(item, row + rows - 1);
          const int64_t low = lowest(item.oldest);
          const int64_t high = at_most(item.newest + 1, op.kv_len[s]);
          item.chunk_begin = low / kChunkKeys;
          item.chunk_end = at_least(item.chunk_begin + 1, divide_up(high, kChunkKeys));
          partial += (item.chunk_end - item.chunk_begin) * partial_floats(item);
          items.push_back(item);
        }
      }
    }
    return items;
  }

  void run() const {
    const std::vector<Item> items = make_items();
    const auto count = static_cast<int64_t>(items.size());
    if (count == 0) return;
    const Item& end = items.back();
    const int64_t floats = end.partial + (end.chunk_end - end.chunk_begin) * partial_floats(end);
    int64_t chunks = 0;
    for (const Item& item : items) chunks += item.chunk_end - item.chunk_begin;
    // Few rows over many keys: the chunks are the tasks. Otherwise enough items share the work, and no copy is needed.
    if (threads() == 1 || chunks == count || count >= 8 * threads() || floats > (int64_t{1} << 24)) {
      auto task = [&](int64_t i) { whole_item(items[static_cast<size_t>(count - 1 - i)]); };
      parallel_for(count, task);
      return;
    }
    auto* partials = static_cast<float*>(scratch(Scratch::chunks, static_cast<size_t>(floats) * 4));
    std::vector<ChunkTask> tasks;
    for (int64_t i = 0; i < count; ++i) {
      const Item& item = items[static_cast<size_t>(i)];
      for (int64_t c = item.chunk_begin; c < item.chunk_end; ++c) tasks.push_back({i, c});
    }
    auto task = [&](int64_t i) {
      const ChunkTask& task = tasks[static_cast<size_t>(i)];
      one_chunk(items[static_cast<size_t>(task.item)], task.chunk, partials);
    };
    parallel_for(static_cast<int64_t>(tasks.size()), task);
    for (const Item& item : items) merge_item(item, partials);
  }
};

void attention(const AttentionOp& op) {
  with_type(op.type, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    if (op.kv_type == Type::int8 || op.kv_type == Type::int4) {
      using K = typename std::conditional<kPairs && std::is_same<T, bf16>::value, bf16, float>::type;
      return Attention<T, K, true>(op).run();
    }
    with_type(op.kv_type, [&](auto* k) {
      Attention<T, std::remove_pointer_t<decltype(k)>>(op).run();
    });
  });
}

}  // namespace TM_NS
}  // namespace tokenmill
