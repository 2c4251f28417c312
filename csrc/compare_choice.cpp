// The part of compare.cpp that looks at integers: which tokens `choose` takes, against the formula of the noise in
// double precision and against the portable kernels, and what a decode step gathers and moves on. Every buffer is as
// long as what may be touched and no longer, so that AddressSanitizer sees the rest.
#include <algorithm>
#include <limits>
#include <stdexcept>
#include <vector>

#include "compare.h"
#include "numbers.h"
#include "ops.h"

namespace tokenmill::compare {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Lines {
  Type type;
  int64_t rows, width, stride;
  std::vector<float> logits;  // [rows, stride], as the kernel sees them
  std::vector<bf16> narrow;
  std::vector<int32_t> words;
  std::vector<uint32_t> masks;
  int64_t mask_words;
  std::vector<int64_t> row_ids, positions, streams, num_prompt;
  std::vector<float> scales;
  bool masked, drawn;

  bool draws(int64_t i) const { return drawn && (!masked || words[static_cast<size_t>(i)] >= kDrawn); }
  bool allows(int64_t i, int64_t token) const {
    const int64_t number = masked ? words[static_cast<size_t>(i)] & (kDrawn - 1) : 0;
    if (number == 0) return true;
    return masks[static_cast<size_t>((number - 1) * mask_words + token / 32)] >> token % 32 & 1u;
  }
  float logit(int64_t i, int64_t token) const { return logits[static_cast<size_t>(i * stride + token)]; }
};

struct Chosen {
  bool certain;
  std::vector<int64_t> ids, marked;
  std::vector<float> before, largest;
};

void spoil(Random& random, Lines& lines) {
  for (int64_t i = 0; i < lines.rows; ++i) {
    if (random.below(4) != 0) continue;
    const float bad = random.of({kInfinity, -kInfinity, std::numeric_limits<float>::quiet_NaN()});
    float* line = lines.logits.data() + i * lines.stride;
    if (random.below(8) == 0) std::fill(line, line + lines.width, -kInfinity);
    else line[random.below(lines.width)] = bad;
  }
}

Lines make_lines(Random& random) {
  Lines lines{};
  lines.type = random.of({Type::f32, Type::bf16});
  lines.rows = 1 + random.below(4);
  lines.width = random.of<int64_t>({1, 31, 32, 33, 255, 257, 300, 8191, 8193, 1 + random.below(2000), 16500});
  lines.stride = lines.width + random.below(3);
  const float scale = random.of({0.1f, 3.0f, 30.0f});
  const bool round = random.coin();  // equal ones: the lowest id wins
  for (int64_t i = 0; i < (lines.rows - 1) * lines.stride + lines.width; ++i) {
    const float x = random.value(scale);
    lines.logits.push_back(round ? std::round(x) : x);
  }
  spoil(random, lines);
  if (lines.type == Type::bf16) {
    for (float& x : lines.logits) {
      lines.narrow.push_back(to_bf16(x));
      x = to_float(lines.narrow.back());
    }
  }
  lines.mask_words = (lines.width + 31) / 32;
  const int64_t count = 1 + random.below(3);
  const uint32_t kind = static_cast<uint32_t>(random.below(3));
  for (int64_t w = 0; w < count * lines.mask_words; ++w) {
    const bool few = kind == 1 && random.below(lines.mask_words) != 0;
    lines.masks.push_back(kind == 2 && w < lines.mask_words ? 0 : few ? 0 : static_cast<uint32_t>(random.bits()));
  }
  lines.masked = random.below(4) != 0;
  lines.drawn = random.coin();
  const int64_t state = 3 + random.below(5);
  for (int64_t i = 0; i < lines.rows; ++i) {
    lines.words.push_back(static_cast<int32_t>(random.below(count + 1)) + (random.coin() ? kDrawn : 0));
    lines.row_ids.push_back(random.below(state));
    lines.positions.push_back(10 + random.below(50));
  }
  for (int64_t row = 0; row < state; ++row) {
    lines.streams.push_back(static_cast<int64_t>(uint64_t{random.bits()} << 32 | random.bits()));
    lines.num_prompt.push_back(random.below(10));
    lines.scales.push_back(1.0f / random.of({0.3f, 1.0f, 2.5f}));
  }
  return lines;
}

Chosen run(const Lines& lines) {
  const auto rows = static_cast<size_t>(lines.rows);
  Chosen out{false, std::vector<int64_t>(rows), std::vector<int64_t>(rows), std::vector<float>(rows), std::vector<float>(rows)};
  ChooseOp op{};
  op.x = lines.type == Type::f32 ? static_cast<const void*>(lines.logits.data()) : lines.narrow.data();
  op.rows = lines.rows;
  op.width = lines.width;
  op.stride = lines.stride;
  op.type = lines.type;
  op.words = lines.masked ? lines.words.data() : nullptr;
  op.masks = lines.masks.data();
  op.mask_words = lines.mask_words;
  op.row_ids = lines.row_ids.data();
  op.positions = lines.positions.data();
  op.streams = lines.drawn ? lines.streams.data() : nullptr;
  op.num_prompt = lines.num_prompt.data();
  op.scales = lines.scales.data();
  op.int_stride = op.scale_stride = 1;
  op.ids = out.ids.data();
  op.marked = out.marked.data();
  op.before = out.before.data();
  op.largest = out.largest.data();
  out.certain = table().choose(op);
  return out;
}

uint64_t mixed(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

// What sampling/noise.py takes off a score; float where it says float, logarithms in double.
double noise(uint64_t key, int64_t token) {
  uint32_t h = static_cast<uint32_t>(token) * 0x9E3779B1u ^ static_cast<uint32_t>(key);
  h = (h ^ (h >> 16)) * 0x7FEB352Du;
  h = ((h ^ (h >> 15)) + static_cast<uint32_t>(key >> 32)) * 0x846CA68Bu;
  h ^= h >> 16;
  const float v = (static_cast<float>(h & 0x7FFFFFFFu) + 0.5f) * 0x1.fffffep-32f;
  return std::log(-std::log1p(-static_cast<double>(v)));
}

struct Exact {
  bool good;
  float before, largest;
  int64_t id;
  double gap;  // to the second; of greedy lines none is needed
};

Exact exact(const Lines& lines, int64_t i) {
  Exact out{true, -kInfinity, -kInfinity, 0, 1.0};
  for (int64_t t = 0; t < lines.width; ++t) {
    const float x = lines.logit(i, t);
    if (std::isnan(x) || x > out.before) out.before = std::isnan(out.before) ? out.before : x;
    if (!lines.allows(i, t) || !(x > out.largest)) continue;
    out.largest = x;
    out.id = t;
  }
  out.good = std::isfinite(out.before) && std::isfinite(out.largest);
  if (!out.good || !lines.draws(i)) return out;
  const auto row = static_cast<size_t>(lines.row_ids[static_cast<size_t>(i)]);
  const auto index = static_cast<uint64_t>(lines.positions[static_cast<size_t>(i)] + 1 - lines.num_prompt[row]);
  const uint64_t key = mixed(static_cast<uint64_t>(lines.streams[row]) + (index + 1) * 0x9E3779B97F4A7C15u);
  double top = -kInfinity, second = -kInfinity;
  for (int64_t t = 0; t < lines.width; ++t) {
    if (!lines.allows(i, t)) continue;
    const double score = static_cast<double>((lines.logit(i, t) - out.largest) * lines.scales[row]) - noise(key, t);
    if (score > top) {
      second = top;
      top = score;
      out.id = t;
    } else if (score > second) {
      second = score;
    }
  }
  out.gap = top - second;
  return out;
}

void expect(bool good, const char* what, const char* why) {
  ++counts().checks;
  if (!good) fail(what, why);
}

bool same_number(float a, float b) { return a == b || (std::isnan(a) && std::isnan(b)); }

template <class Body>
bool refused(Body body) {
  try {
    body();
  } catch (const std::invalid_argument&) {
    return true;
  }
  return false;
}

}  // namespace

void choices(Random& random) {
  const Lines lines = make_lines(random);
  const Isa chosen = current_isa();
  set_isa(Isa::scalar);
  const Chosen plain = run(lines);
  set_isa(chosen);
  const Chosen found = run(lines);
  bool near = false, decided = true;
  for (int64_t i = 0; i < lines.rows; ++i) {
    const Exact wanted = exact(lines, i);
    const auto at = static_cast<size_t>(i);
    near |= wanted.gap < 1.5e-4;
    decided &= wanted.gap > 0.5e-4;
    expect(same_number(found.before[at], wanted.before), "choose", "another largest logit");
    if (wanted.good) expect(found.largest[at] == wanted.largest, "choose", "another largest allowed logit");
    if (!found.certain) continue;
    const int64_t marked = wanted.good ? wanted.id : ~int64_t{0};
    expect(found.marked[at] == marked && found.ids[at] == (wanted.good ? wanted.id : 0), "choose", "another token");
    if (plain.certain) expect(found.ids[at] == plain.ids[at], "choose", "another token than the portable one");
  }
  if (!found.certain) expect(near, "choose", "a clear draw is given back");
  else expect(decided, "choose", "a draw too close to call is decided");
}

void steps(Random& random) {
  const int64_t rows = 1 + random.below(6), room = 2 + random.below(40), size = random.of<int64_t>({1, 4, 16});
  const int64_t width = (room + size - 1) / size, count = 1 + random.below(rows);
  std::vector<int32_t> tokens(static_cast<size_t>(rows * room)), table(static_cast<size_t>(rows * width));
  for (int32_t& token : tokens) token = static_cast<int32_t>(random.below(1000));
  for (int32_t& block : table) block = static_cast<int32_t>(random.below(1000));
  std::vector<int64_t> computed, length, all;
  for (int64_t row = 0; row < rows; ++row) {
    length.push_back(1 + random.below(room - 1));
    computed.push_back(length.back() - 1);
    all.push_back(row);
  }
  for (int64_t i = rows - 1; i > 0; --i) std::swap(all[static_cast<size_t>(i)], all[static_cast<size_t>(random.below(i + 1))]);
  std::vector<int64_t> ids(all.begin(), all.begin() + count);
  const auto n = static_cast<size_t>(count);
  std::vector<int64_t> offsets;
  for (int64_t row : ids) offsets.push_back(random.below(room - computed[static_cast<size_t>(row)]));
  const bool several = random.coin();
  std::vector<int64_t> inputs(n), positions(n), slots(n);
  std::vector<int32_t> kv(n), entries(n), out(n * static_cast<size_t>(width), -7);
  GatherOp read{ids.data(), count, rows, tokens.data(), room, computed.data(), inputs.data(), positions.data(), kv.data(),
                several ? offsets.data() : nullptr};
  gather(read);
  GatherTableOp blocks{ids.data(), positions.data(), count, rows, table.data(), width, size, out.data(), entries.data(), slots.data()};
  gather_table(blocks);
  std::vector<int64_t> drawn(n), length_after = length, computed_after = computed;
  std::vector<int32_t> after = tokens;
  for (int64_t& id : drawn) id = random.below(1000);
  AdvanceOp move{ids.data(), drawn.data(), count, rows, after.data(), room, length_after.data(), computed_after.data()};
  advance(move);
  for (size_t i = 0; i < n; ++i) {
    const auto row = static_cast<size_t>(ids[i]);
    const int64_t position = computed[row] + (several ? offsets[i] : 0), block = position / size;
    expect(inputs[i] == tokens[row * static_cast<size_t>(room) + static_cast<size_t>(position)] && positions[i] == position &&
               kv[i] == position + 1, "gather", "other inputs");
    const int32_t* line = table.data() + row * static_cast<size_t>(width);
    expect(entries[i] == block + 1 && slots[i] == line[block] * size + position % size, "gather", "another place");
    for (int64_t j = 0; j < width; ++j) {
      expect(out[i * static_cast<size_t>(width) + static_cast<size_t>(j)] == (j <= block ? line[j] : -7), "gather", "another table");
    }
    tokens[row * static_cast<size_t>(room) + static_cast<size_t>(length[row])] = static_cast<int32_t>(drawn[i]);
    ++length[row];
    ++computed[row];
  }
  expect(tokens == after && length == length_after && computed == computed_after, "advance", "another row");
  const auto first = static_cast<size_t>(ids[0]);
  length_after[first] = room;
  expect(refused([&] { advance(move); }) && after == tokens, "advance", "writes past a full row");
  computed[first] = room;
  expect(refused([&] { gather(read); }), "gather", "reads past a row");
  read.offsets = offsets.data();
  computed[first] = 0;
  offsets[0] = random.of<int64_t>({-1, room, std::numeric_limits<int64_t>::max()});
  expect(refused([&] { gather(read); }), "gather", "reads an offset past a row");
  positions[0] = width * size;
  expect(refused([&] { gather_table(blocks); }), "gather", "reads past a table");
  ids[0] = rows;
  expect(refused([&] { gather(read); }) && refused([&] { gather_table(blocks); }) && refused([&] { advance(move); }),
         "steps", "a row that does not exist");
}

}  // namespace tokenmill::compare
