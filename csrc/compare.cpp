// Every kernel of every instruction set that this machine has, against the portable ones, on random numbers; and each row
// alone against the same row in company, byte for byte. For machines (or emulators of them) where Python's tests, which
// hold the portable kernels against torch, cannot run: `make test-neon`. Exit code 1 if anything differs.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "coding.h"
#include "compare.h"
#include "machine.h"
#include "ops.h"
#include "pack.h"
#include "sparse.h"
#include "threads.h"

using namespace tokenmill;
using namespace tokenmill::compare;

namespace tokenmill::compare {

Counts& counts() {
  static Counts all;
  return all;
}

void fail(const std::string& what, const std::string& why) {
  if (++counts().failures <= 20) std::printf("%s, %s: %s\n", isa_name(current_isa()), what.c_str(), why.c_str());
}

}  // namespace tokenmill::compare

namespace {

using Bytes = std::vector<uint8_t>;

size_t size_of(Type type) { return type == Type::f32 ? 4 : type == Type::bf16 ? 2 : 1; }

Bytes tensor(Random& random, Type type, int64_t count, float scale) {
  Bytes data(static_cast<size_t>(count) * size_of(type) + 64);
  for (int64_t i = 0; i < count; ++i) {
    const float x = random.value(scale);
    if (type == Type::f32) reinterpret_cast<float*>(data.data())[i] = x;
    else if (type == Type::bf16) reinterpret_cast<bf16*>(data.data())[i] = to_bf16(x);
    else data[static_cast<size_t>(i)] = static_cast<uint8_t>(random.bits());
  }
  return data;
}

float number(const Bytes& data, Type type, int64_t i) {
  if (type == Type::f32) return reinterpret_cast<const float*>(data.data())[i];
  if (type == Type::bf16) return to_float(reinterpret_cast<const bf16*>(data.data())[i]);
  return static_cast<float>(static_cast<int8_t>(data[static_cast<size_t>(i)]));
}

// Largest difference within `tolerance` of the largest magnitude; what is not finite must be so in both.
void same(const std::string& what, const Bytes& expected, const Bytes& found, Type type, int64_t count, float tolerance) {
  ++counts().checks;
  float most = 1e-6f, off = 0.0f;
  for (int64_t i = 0; i < count; ++i) {
    const float a = number(expected, type, i), b = number(found, type, i);
    if (!std::isfinite(a) || !std::isfinite(b)) {
      if (std::isnan(a) != std::isnan(b) || (!std::isnan(a) && a != b)) return fail(what, "not finite in one only");
      continue;
    }
    most = std::fmax(most, std::fabs(a));
    off = std::fmax(off, std::fabs(a - b));
  }
  if (off > tolerance * most) fail(what, "off by " + std::to_string(off / most));
}

void equal(const std::string& what, const void* a, const void* b, size_t bytes) {
  ++counts().checks;
  if (std::memcmp(a, b, bytes) != 0) fail(what, "other bytes in company");
}

// Runs an operation with the portable kernels, then with the chosen ones: body(table, result).
template <class Body>
void both(const std::string& what, Type type, int64_t count, float tolerance, Body body) {
  Bytes expected(static_cast<size_t>(count) * size_of(type) + 64), found(expected.size());
  const Isa chosen = current_isa();
  set_isa(Isa::scalar);
  body(table(), expected.data());
  set_isa(chosen);
  body(table(), found.data());
  same(what, expected, found, type, count, tolerance);
}

float tolerance_of(Type type) { return type == Type::f32 ? 2e-5f : 1.6e-2f; }

Norm random_norm(Random& random, const Bytes& weight, const Bytes& bias, Type type) {
  return {weight.data(), random.coin() ? bias.data() : nullptr, type, 1e-5f, random.of({0.0f, 1.0f}), random.coin()};
}

void elementwise(Random& random) {
  const Type type = random.of({Type::f32, Type::bf16});
  const int64_t rows = 1 + random.below(5), width = 2 * (1 + random.below(150));
  Bytes x = tensor(random, type, rows * width, random.of({0.5f, 3.0f, 40.0f}));
  const Bytes y = tensor(random, type, rows * width, 1.0f), weight = tensor(random, type, width, 1.0f);
  const float near = tolerance_of(type);
  const Norm norm = random_norm(random, weight, y, type);
  both("norm", type, rows * width, near, [&](const Table& t, void* out) {
    t.norm({x.data(), out, rows, width, width, type, norm});
  });
  both("add", type, rows * width, near, [&](const Table& t, void* out) {
    t.add({x.data(), y.data(), out, rows * width, 0.7f, type});
  });
  const Bytes factors = tensor(random, Type::f32, rows * 4, 1.0f);
  const auto* factor = reinterpret_cast<const float*>(factors.data());
  for (const Type into : {Type::f32, type}) {
    both("weigh", into, rows * (width / 2), near, [&](const Table& t, void* out) {
      t.weigh({x.data(), nullptr, factor, out, rows, 2, width / 2, 4, type, into});
    });
  }
  both("weigh y", type, rows * width, near, [&](const Table& t, void* out) {
    t.weigh({x.data(), y.data(), factor, out, rows, 2, width / 2, 4, type, type});
  });
  if (type == Type::f32 && random.coin()) {
    reinterpret_cast<float*>(x.data())[random.below(rows * width)] = random.of({INFINITY, -INFINITY, NAN});
  }
  for (int act = static_cast<int>(Act::silu); act < static_cast<int>(Act::count); ++act) {
    const Act kind = static_cast<Act>(act);
    both("act " + std::to_string(act), type, rows * width / (gated(kind) ? 2 : 1), near, [&](const Table& t, void* out) {
      t.act({x.data(), out, rows, width, type, kind});
    });
  }
  std::vector<int64_t> ids(4);
  for (int64_t& id : ids) id = random.below(rows);
  both("embed", type, 4 * width, near, [&](const Table& t, void* out) {
    t.embed({x.data(), ids.data(), out, 4, rows, width, width, 1.5f, type});
  });
  both("greedy", Type::int8, rows * 20, 0.0f, [&](const Table& t, void* out) {
    auto* ids = static_cast<int64_t*>(out);
    std::vector<float> tops(static_cast<size_t>(rows));
    t.greedy({x.data(), ids, ids + rows, tops.data(), rows, width, width, type});
    std::memcpy(ids + 2 * rows, tops.data(), tops.size() * sizeof(float));
  });
  if (type == Type::bf16) {
    both("widen", Type::f32, rows * width, 0.0f, [&](const Table& t, void* out) {
      t.widen({x.data(), static_cast<float*>(out), rows * width});
    });
  }
}

// A packed matrix of random codes, whatever the format: bits at random, scales small and finite.
Bytes packed(Random& random, Format format, int64_t n, int64_t k, int group) {
  if (sparse(format)) {  // half of them zeros
    Bytes weight(static_cast<size_t>(n * k) * 2);
    auto* numbers = reinterpret_cast<uint16_t*>(weight.data());
    for (int64_t i = 0; i < n * k; ++i) {
      const float x = random.coin() ? random.value(0.1f) : 0.0f;
      numbers[i] = format == Format::f16_sparse ? float_to_half(x) : to_bf16(x).bits;
    }
    Bytes data(static_cast<size_t>(pack_sparse(numbers, n, k, k, format, nullptr)));
    pack_sparse(numbers, n, k, k, format, data.data());
    return data;
  }
  Bytes data(static_cast<size_t>(packed_bytes(format, n, k, group)) + 4096 + 64);
  if (plain(format)) {
    const Type type = format == Format::bf16 ? Type::bf16 : Type::f32;
    Bytes weight = tensor(random, type, n * k, 0.1f);
    if (format == Format::f16) {
      auto* halves = reinterpret_cast<uint16_t*>(weight.data());  // each in the place of an earlier number
      for (int64_t i = 0; i < n * k; ++i) halves[i] = float_to_half(number(weight, type, i));
    }
    pack_dense(weight.data(), type, n, k, k, format, data.data());
    return data;
  }
  for (uint8_t& byte : data) byte = static_cast<uint8_t>(random.bits());
  if (format == Format::fp8) {
    const int64_t unit = eight_unit(eight_columns(k, group)), tiles = packed_bytes(format, n, k, group) / eight_tile(k, group);
    for (int64_t number = 0; number < tiles * (k / eight_columns(k, group)); ++number) {
      auto* scales = reinterpret_cast<float*>(data.data() + number * unit);
      for (int i = 0; i < kTileColumns; ++i) scales[i] = random.value(0.02f);
    }
    return data;
  }
  const Coding kind = coding(format);
  const int64_t head = unit_head(kind), bytes = unit_bytes(kind, group), end = packed_bytes(format, n, k, group);
  const int64_t units = tile_units(kind, k, group), tile = tile_size(kind, k, group);
  for (int64_t start = 0; tile_head(kind) && start + tile <= end; start += tile) {
    auto* factors = reinterpret_cast<float*>(data.data() + start + kTableBytes);
    for (int i = 0; i < kTileColumns; ++i) factors[i] = random.value(0.02f);
    uint8_t* scales = data.data() + start + tile_head(kind);
    for (int64_t unit = 0; kind.scales == Scales::floats && unit < units; ++unit, scales += bytes) {
      for (int64_t i = 0; i < part_scales(kind); ++i) scales[i] = static_cast<uint8_t>(random.below(64));
    }
  }
  for (int64_t number = 0; number < end / tile * units; ++number) {
    const int64_t at = number / units * tile + tile_head(kind) + number % units * bytes;
    if (kind.scales == Scales::power) {
      for (int64_t i = 0; i < head; ++i) data[static_cast<size_t>(at + i)] = static_cast<uint8_t>(118 + random.below(8));
      continue;
    }
    auto* halves = reinterpret_cast<uint16_t*>(data.data() + at);
    for (int64_t i = 0; i < head / 2; ++i) {
      const bool zero = kind.zero && i >= kTileColumns;
      halves[i] = float_to_half(zero ? static_cast<float>(random.below(16)) : random.value(0.02f));
    }
  }
  return data;
}

void linear(Random& random, Format format) {
  const bool dense = plain(format) || sparse(format);
  const bool fixed = !dense && format != Format::fp8 && (coding(format).columns || scales_of_scales(coding(format)));
  const int group = dense || fixed ? 32 : random.of({32, 64, 128});
  const int64_t k = scales_of_scales(coding(format)) ? 256 * (1 + random.below(2)) : group * (1 + random.below(6));
  const bool gated = random.coin();
  const int64_t n = gated ? 2 * 64 * (1 + random.below(2)) : 1 + random.below(200), rows = 1 + random.below(20);
  const Type type = format == Format::f32 ? Type::f32 : random.of({Type::f32, Type::bf16});
  const Bytes weight = packed(random, format, n, k, group), x = tensor(random, type, rows * k, 1.0f);
  const Bytes bias = tensor(random, Type::f32, n, 1.0f), scale = tensor(random, type, k, 1.0f);
  const Bytes residual = tensor(random, type, rows * n, 1.0f);
  const float apart = format == Format::int8 && random.coin() ? 1.5f : 0.0f;
  const Part part{weight.data(), n, group, format, apart};
  LinearOp op{};
  op.x = x.data();
  op.parts = &part;
  op.count = 1;
  op.bias = random.coin() ? reinterpret_cast<const float*>(bias.data()) : nullptr;
  op.residual = random.coin() ? residual.data() : nullptr;
  op.rows = rows;
  op.n = n;
  op.k = k;
  op.stride = k;
  op.type = type;
  op.out_f32 = !op.residual && !gated;
  op.act = gated ? random.of({Act::silu_mul, Act::gelu_tanh_mul, Act::clipped_silu_mul}) : random.of({Act::none, Act::silu});
  if (random.coin()) op.norm = random_norm(random, scale, scale, type);
  const Type result = op.out_f32 ? Type::f32 : type;
  const int64_t width = gated ? n / 2 : n;
  const std::string what = "linear of format " + std::to_string(static_cast<int>(format));
  // Rounding an activation to int8 or bf16 the other way moves a sum by far more than the order of additions does.
  const float near = dense && type == Type::f32 ? 5e-5f : 1.6e-2f;
  both(what, result, rows * width, near, [&](const Table& t, void* out) {
    op.out = out;
    t.linear(op);
  });
  Bytes all(static_cast<size_t>(rows * width) * 4 + 64), one(static_cast<size_t>(width) * 4 + 64);
  op.out = all.data();
  table().linear(op);
  const int64_t row = random.below(rows);
  op.rows = 1;
  op.out = one.data();
  op.x = x.data() + static_cast<size_t>(row * k) * size_of(type);
  if (op.residual) op.residual = residual.data() + static_cast<size_t>(row * width) * size_of(type);
  table().linear(op);
  const size_t bytes = static_cast<size_t>(width) * size_of(result);
  equal(what, one.data(), all.data() + static_cast<size_t>(row) * bytes, bytes);
}

struct Cache {  // [block][head][token][dim], keys and values of one width
  Type type;
  int64_t blocks, heads, width;
  int block_size;
  Bytes key, value, key_scale, value_scale;
  int64_t token() const { return width; }
  int64_t head() const { return block_size * width; }
  int64_t block() const { return heads * head(); }
  ScaleOp scale(Bytes& data) const {
    if (type != Type::int8) return {};
    return {data.data(), heads * block_size, block_size, 1, width};
  }
};

Cache make_cache(Random& random, Type type, int64_t blocks, int64_t heads, int64_t width) {
  Cache cache{type, blocks, heads, width, 16, {}, {}, {}, {}};
  cache.key = tensor(random, type, blocks * cache.block(), 1.0f);
  cache.value = tensor(random, type, blocks * cache.block(), 1.0f);
  cache.key_scale = tensor(random, Type::bf16, blocks * heads * 16, 0.01f);
  cache.value_scale = tensor(random, Type::bf16, blocks * heads * 16, 0.01f);
  return cache;
}

void attention(Random& random) {
  const Type type = random.of({Type::f32, Type::bf16}), kv_type = random.of({type, Type::int8});
  const int kv_heads = 1 + static_cast<int>(random.below(2)), group = 1 + static_cast<int>(random.below(4));
  const int64_t width = random.of<int64_t>({16, 40, 64, 128}), sequences = 1 + random.below(3), entries = 80;
  Cache cache = make_cache(random, kv_type, entries * sequences, kv_heads, width);
  std::vector<int32_t> tables(static_cast<size_t>(entries * sequences)), counts(static_cast<size_t>(sequences), entries);
  for (size_t i = 0; i < tables.size(); ++i) tables[i] = static_cast<int32_t>(tables.size() - 1 - i);
  std::vector<int32_t> starts{0}, lengths;
  std::vector<int64_t> positions;
  for (int64_t s = 0; s < sequences; ++s) {
    const int64_t queries = random.coin() ? 1 : 1 + random.below(70), length = queries + random.below(entries * 16 - queries);
    for (int64_t i = 0; i < queries; ++i) positions.push_back(length - queries + i);
    starts.push_back(static_cast<int32_t>(positions.size()));
    lengths.push_back(static_cast<int32_t>(length));
  }
  const int heads = kv_heads * group;
  const auto tokens = static_cast<int64_t>(positions.size());
  const Bytes q = tensor(random, type, tokens * heads * width, 1.0f), extra = tensor(random, Type::f32, heads, 0.3f);
  AttentionOp op{};
  op.q = q.data();
  op.heads = heads;
  op.kv_heads = kv_heads;
  op.key_dim = op.value_dim = static_cast<int>(width);
  op.type = type;
  op.scale = 1.0f / std::sqrt(static_cast<float>(width));
  op.softcap = random.of({0.0f, 20.0f});
  op.sinks = random.coin() ? reinterpret_cast<const float*>(extra.data()) : nullptr;
  op.alibi = random.coin() ? reinterpret_cast<const float*>(extra.data()) : nullptr;
  op.window = random.of<int64_t>({0, 33, 700, -48});
  op.key = cache.key.data();
  op.value = cache.value.data();
  op.key_block = op.value_block = cache.block();
  op.key_head = op.value_head = cache.head();
  op.key_token = op.value_token = cache.token();
  op.block_size = cache.block_size;
  op.kv_type = kv_type;
  op.key_scale = cache.scale(cache.key_scale);
  op.value_scale = cache.scale(cache.value_scale);
  op.tables = tables.data();
  op.entries = counts.data();
  op.max_entries = entries;
  op.sequences = sequences;
  op.query_start = starts.data();
  op.kv_len = lengths.data();
  op.positions = positions.data();
  both("attention", type, tokens * heads * width, type == Type::f32 ? 1e-4f : 2.5e-2f, [&](const Table& t, void* out) {
    op.out = out;
    t.attention(op);
  });
  // The last sequence by itself.
  const size_t line = static_cast<size_t>(heads * width) * size_of(type), last = static_cast<size_t>(sequences - 1);
  Bytes all(static_cast<size_t>(tokens) * line + 64), alone(all.size());
  op.out = all.data();
  table().attention(op);
  const auto begin = static_cast<size_t>(starts[last]);
  const int32_t own[2] = {0, starts[last + 1] - starts[last]};
  op.q = q.data() + begin * line;
  op.out = alone.data();
  op.tables = tables.data() + last * entries;
  op.sequences = 1;
  op.query_start = own;
  op.kv_len = lengths.data() + last;
  op.positions = positions.data() + begin;
  table().attention(op);
  equal("attention", alone.data(), all.data() + begin * line, static_cast<size_t>(own[1]) * line);
}

void prepare(Random& random) {
  const Type type = random.of({Type::f32, Type::bf16}), kv_type = random.of({type, Type::int8});
  const int heads = 4, kv_heads = 2;
  const int64_t width = random.of<int64_t>({16, 64, 80}), tokens = 1 + random.below(9), stride = (heads + 2 * kv_heads) * width;
  const Bytes qkv = tensor(random, type, tokens * stride, 2.0f), weight = tensor(random, type, width, 1.0f);
  const Bytes turns = tensor(random, Type::f32, 64 * width, 0.7f);
  std::vector<int64_t> positions, slots;
  for (int64_t i = 0; i < tokens; ++i) {
    positions.push_back(random.below(60));
    slots.push_back(i == 1 ? -1 : 3 * i);
  }
  Cache cache = make_cache(random, kv_type, 2, kv_heads, width);
  const auto stored = static_cast<int64_t>(2 * cache.block());
  PrepareOp op{};
  op.qkv = qkv.data();
  op.tokens = tokens;
  op.stride = stride;
  op.heads = heads;
  op.kv_heads = kv_heads;
  op.key_dim = op.value_dim = static_cast<int>(width);
  op.type = type;
  if (random.coin()) op.q_norm = op.k_norm = {weight.data(), nullptr, type, 1e-6f, 0.0f, false};
  op.cos = reinterpret_cast<const float*>(turns.data());
  op.sin = op.cos + 32 * width;
  op.rope_dim = static_cast<int>(random.of<int64_t>({0, width, width / 2}));
  op.interleaved = random.coin();
  op.positions = positions.data();
  op.slots = slots.data();
  op.key_block = op.value_block = cache.block();
  op.key_head = op.value_head = cache.head();
  op.key_token = op.value_token = cache.token();
  op.block_size = cache.block_size;
  op.kv_type = kv_type;
  const Cache before = cache;
  Cache kept[2] = {before, before};
  int turn = 0;
  both("prepare", type, tokens * heads * width, tolerance_of(type), [&](const Table& t, void* out) {
    Cache& to = kept[turn++];
    op.out = out;
    op.key = to.key.data();
    op.value = to.value.data();
    op.key_scale = to.scale(to.key_scale);
    op.value_scale = to.scale(to.value_scale);
    t.prepare(op);
  });
  const float near = kv_type == Type::int8 ? 1.1f / 127 : tolerance_of(type);
  same("prepare: keys", kept[0].key, kept[1].key, kv_type, stored, near);
  same("prepare: values", kept[0].value, kept[1].value, kv_type, stored, near);
  same("prepare: scales", kept[0].key_scale, kept[1].key_scale, Type::bf16, 2 * kv_heads * 16, 1e-2f);
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 20;
  set_threads(2);
  for (int isa = 1; isa <= static_cast<int>(best_isa()); ++isa) {
    set_isa(static_cast<Isa>(isa));
    Random random{std::mt19937(static_cast<uint32_t>(17 + isa))};
    const int before = counts().checks;
    for (int round = 0; round < rounds; ++round) {
      elementwise(random);
      attention(random);
      prepare(random);
      for (int i = 0; i < 10; ++i) {
        choices(random);
        steps(random);
      }
      for (int format = 0; format < static_cast<int>(Format::count); ++format) linear(random, static_cast<Format>(format));
    }
    std::printf("%s: %d comparisons\n", isa_name(current_isa()), counts().checks - before);
  }
  std::printf("%d comparisons, %d differ\n", counts().checks, counts().failures);
  return counts().failures != 0 || counts().checks == 0;
}
