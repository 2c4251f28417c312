// Python's view: functions that take addresses and sizes as integers. A call with addresses costs 0.2 us, one with
// tensors 7. Owns: the argument checks that keep memory safe given honest addresses, and when the GIL is released.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "group.h"
#include "machine.h"
#include "ops.h"
#include "pack.h"
#include "sparse.h"
#include "threads.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace nb = nanobind;
using namespace tokenmill;

namespace {

using Address = uint64_t;

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(static_cast<uintptr_t>(address));
}
void* raw(Address address) { return at<void>(address); }

void require(bool condition, const char* message) {
  if (!condition) throw std::invalid_argument(message);
}

// Giving the GIL up and taking it back may cost a switch interval when other threads compute: only for long work.
template <class Body>
void run(double work, Body body) {
  if (work < 2e6) {
    body();
    return;
  }
  nb::gil_scoped_release release;
  body();
}

// Calls in the order in which they were made, to be made again at once: what a decode step of a small model mostly
// pays for is the way here. Whoever records keeps alive and in place everything that the calls point to.
class Tape {
 public:
  ~Tape() { end(); }
  void begin() {
    require(recording() == nullptr, "this thread records already");
    recording() = this;
  }
  void end() {
    if (recording() == this) recording() = nullptr;
  }
  void add(std::function<void()> call) { calls_.push_back(std::move(call)); }
  void add(const LinearOp& op) {
    auto kept = std::make_shared<LinearOp>(op);
    if (last_) last_->next = kept.get();
    last_ = kept;
    calls_.push_back([kept] { table().linear(*kept); });
  }
  int64_t size() const { return static_cast<int64_t>(calls_.size()); }
  void replay() const {
    nb::gil_scoped_release release;
    for (const auto& call : calls_) call();
  }
  static Tape*& recording() {
    thread_local Tape* current = nullptr;
    return current;
  }

 private:
  std::vector<std::function<void()>> calls_;
  std::shared_ptr<LinearOp> last_;
};

// Makes a call, and keeps it if this thread records. `body` holds everything by value.
template <class Body>
void submit(double work, Body body) {
  if (Tape* tape = Tape::recording()) tape->add(body);
  run(work, body);
}

// Asks the system to back this memory with large pages, where they are given on request only: weights are read from end
// to end, and a page of 4 KB is done in less than the look-up of the next one.
void use_huge_pages(Address begin, int64_t bytes) {
#if defined(__linux__)
  const Address first = (begin + 4095) / 4096 * 4096, last = (begin + static_cast<Address>(bytes)) / 4096 * 4096;
  if (last > first) madvise(raw(first), last - first, MADV_HUGEPAGE);
#endif
}

// A norm, fixed when the model is built; kept by Python and named in calls.
struct NormSpec {
  Norm norm;
  int64_t width;
};

NormSpec make_norm(Address weight, Address bias, int type, int64_t width, float eps, float offset, bool layer) {
  require(weight != 0 && width > 0, "a norm needs its weight");
  return {{raw(weight), raw(bias), static_cast<Type>(type), eps, offset, layer}, width};
}

void norm(const NormSpec& spec, Address x, Address out, int64_t rows, int64_t stride, int type) {
  const NormOp op{raw(x), raw(out), rows, spec.width, stride, static_cast<Type>(type), spec.norm};
  submit(static_cast<double>(rows * spec.width), [op] { table().norm(op); });
}

Act act_of(int kind) {
  require(kind >= 0 && kind < static_cast<int>(Act::count), "no such activation");
  return static_cast<Act>(kind);
}

void act(Address x, Address out, int64_t rows, int64_t width, int type, int kind) {
  const ActOp op{raw(x), raw(out), rows, width, static_cast<Type>(type), act_of(kind)};
  submit(static_cast<double>(rows * width) * 4, [op] { table().act(op); });
}

void add(Address x, Address y, Address out, int64_t count, float scale, int type) {
  const AddOp op{raw(x), raw(y), raw(out), count, scale, static_cast<Type>(type)};
  submit(static_cast<double>(count), [op] { table().add(op); });
}

// factors: their address and the stride of their rows; sizes: rows, count, width; types: of x, of out.
void weigh(Address x, Address y, const std::tuple<Address, int64_t>& factors, Address out,
           const std::array<int64_t, 3>& sizes, const std::array<int, 2>& types) {
  const auto [rows, count, width] = sizes;
  const WeighOp op{raw(x), raw(y), at<const float>(std::get<0>(factors)), raw(out), rows, count, width,
                   std::get<1>(factors), static_cast<Type>(types[0]), static_cast<Type>(types[1])};
  submit(static_cast<double>(rows * count * width), [op] { table().weigh(op); });
}

// rows, query_start, positions, left, how many sequences, how many states there are.
using Step = std::tuple<Address, Address, Address, Address, int64_t, int64_t>;

RowStep row_step(const Step& step) {
  const RowStep made{at<const int64_t>(std::get<0>(step)), at<const int32_t>(std::get<1>(step)),
                     at<const int64_t>(std::get<2>(step)), at<const int64_t>(std::get<3>(step)), std::get<4>(step)};
  const int64_t states = std::get<5>(step);
  for (int64_t i = 0; i < made.sequences; ++i) {
    require(made.rows[i] >= 0 && made.rows[i] < states, "a row that has no state");
    require(made.query_start[i] < made.query_start[i + 1], "a sequence without a token");
    require(made.last(i) >= 0, "a sequence that leaves no state");
  }
  for (int64_t t = 0; made.left && t < made.query_start[made.sequences]; ++t) {
    require(made.left[t] < states, "a state is left where there is none");
  }
  return made;
}

void short_conv(Address x, Address out, Address weight, Address bias, Address state, int64_t channels, int64_t stride,
                int taps, int type, bool silu, const Step& step) {
  require(taps >= 2 && taps <= kMostTaps && channels > 0, "short_conv: taps out of range");
  const ConvOp op{raw(x), raw(out), at<const float>(weight), at<const float>(bias), raw(state), channels, stride, taps,
                  static_cast<Type>(type), silu, row_step(step)};
  const double work = static_cast<double>(channels) * op.step.query_start[op.step.sequences] * taps;
  submit(work, [op] { table().short_conv(op); });
}

void delta_rule(Address mixed, Address gates, Address out, Address state, Address rate, Address shift,
                const std::tuple<int64_t, int64_t, int64_t, int64_t>& heads, int64_t stride, int64_t gates_stride,
                float most_beta, int type, bool by_key, bool tiled, const Step& step) {
  const auto [key_heads, value_heads, key_dim, value_dim] = heads;
  require(key_heads > 0 && value_heads % key_heads == 0 && value_dim > 0, "delta_rule: heads");
  require(key_dim > 0 && key_dim <= kMostKeys, "delta_rule: keys are too wide");
  const DeltaOp op{raw(mixed), raw(gates), raw(out), at<float>(state), at<const float>(rate), at<const float>(shift),
                   key_heads, value_heads, key_dim, value_dim, stride, gates_stride, most_beta,
                   static_cast<Type>(type), by_key, tiled, row_step(step)};
  const double work = static_cast<double>(value_heads * key_dim * value_dim) * 4;
  submit(work * op.step.query_start[op.step.sequences], [op] { table().delta_rule(op); });
}

// mixed, rates, out, state; rate, shift, skip; heads, head_dim, groups, keys; strides; bounds of the rate
void state_space(const std::array<Address, 4>& tensors, const std::array<Address, 3>& fixed,
                 const std::array<int64_t, 4>& sizes, const std::array<int64_t, 2>& strides,
                 const std::array<float, 2>& bounds, int type, const Step& step) {
  const auto [heads, head_dim, groups, keys] = sizes;
  require(heads > 0 && groups > 0 && heads % groups == 0 && head_dim > 0 && keys > 0, "state_space: sizes");
  const SpaceOp op{raw(tensors[0]), raw(tensors[1]), raw(tensors[2]), at<float>(tensors[3]),
                   at<const float>(fixed[0]), at<const float>(fixed[1]), at<const float>(fixed[2]),
                   heads, head_dim, groups, keys, strides[0], strides[1], bounds[0], bounds[1],
                   static_cast<Type>(type), row_step(step)};
  const double work = static_cast<double>(heads * head_dim * keys) * 3;
  submit(work * op.step.query_start[op.step.sequences], [op] { table().state_space(op); });
}

// x, rates, mixed, out, state; rate, skip; channels, keys; strides of x, rates and mixed
void selective_scan(const std::array<Address, 5>& tensors, const std::array<Address, 2>& fixed,
                    const std::array<int64_t, 2>& sizes, const std::array<int64_t, 3>& strides, int type,
                    const Step& step) {
  const auto [channels, keys] = sizes;
  require(channels > 0 && keys > 0 && keys <= kMostScanned, "selective_scan: sizes");
  const ScanOp op{raw(tensors[0]), raw(tensors[1]), raw(tensors[2]), raw(tensors[3]), at<float>(tensors[4]),
                  at<const float>(fixed[0]), at<const float>(fixed[1]), channels, keys, strides[0], strides[1],
                  strides[2], static_cast<Type>(type), row_step(step)};
  submit(static_cast<double>(channels * keys) * 16 * op.step.query_start[op.step.sequences],
         [op] { table().selective_scan(op); });
}

// norm: weight, how many, eps, offset; sizes: rows, width, size of a piece, strides of x and gate
void gated_norm(Address x, Address gate, Address out, const std::tuple<Address, int64_t, float, float>& norm,
                const std::array<int64_t, 5>& sizes, bool first, bool silu, int type) {
  const auto [weight, weights, eps, offset] = norm;
  const auto [rows, width, size, stride, gate_stride] = sizes;
  require(size > 0 && width % size == 0, "gated_norm: pieces");
  require(weight == 0 || weights == size || weights == width, "gated_norm: weights");
  const GateOp op{raw(x), raw(gate), raw(out), raw(weight), rows, width, size, weights, stride, gate_stride,
                  eps, offset, static_cast<Type>(type), first, silu};
  submit(static_cast<double>(rows * width) * 8, [op] { table().gated_norm(op); });
}

void embed(Address data, Address ids, Address out, int64_t count, int64_t vocab, int64_t width, int64_t stride,
           float scale, int type) {
  const EmbedOp op{raw(data), at<const int64_t>(ids), raw(out), count, vocab, width, stride, scale,
                   static_cast<Type>(type)};
  submit(static_cast<double>(count * width), [op] {
    for (int64_t i = 0; i < op.count; ++i) {
      require(op.ids[i] >= 0 && op.ids[i] < op.vocab, "embed: token id out of range");
    }
    table().embed(op);
  });
}

void greedy(Address x, int64_t rows, int64_t width, int64_t stride, int type, Address ids, Address marked,
            Address largest) {
  require(rows > 0 && width > 0, "a choice needs something to choose from");
  const GreedyOp op{raw(x), at<int64_t>(ids), at<int64_t>(marked), at<float>(largest), rows, width, stride,
                    static_cast<Type>(type)};
  submit(static_cast<double>(rows * width), [op] { table().greedy(op); });
}

// masks: words, masks, how many and of how many words; draws: rows, positions, then by row streams, prompts, scales, how
// many rows and the two strides; out: ids, marked, largest. False: a draw is too close to call.
bool choose_tokens(Address x, int64_t rows, int64_t width, int64_t stride, int type,
                   const std::tuple<Address, Address, int64_t, int64_t>& masks, const std::vector<Address>& draws,
                   const std::tuple<Address, Address, Address>& out) {
  require(rows > 0 && width > 0, "a choice needs something to choose from");
  require(draws.empty() || draws.size() == 8, "draws: eight numbers");
  std::vector<float> largest(static_cast<size_t>(rows));
  const auto [words, packed, count, mask_words] = masks;
  ChooseOp op{};
  op.x = raw(x), op.rows = rows, op.width = width, op.stride = stride, op.type = static_cast<Type>(type);
  op.words = at<const int32_t>(words), op.masks = at<const uint32_t>(packed), op.mask_words = mask_words;
  for (int64_t i = 0; op.words != nullptr && i < rows; ++i) {
    require((op.words[i] & (kDrawn - 1)) <= count, "choose: no such mask");
  }
  require(count == 0 || mask_words * 32 >= width, "choose: masks are as wide as the logits");
  if (!draws.empty()) {
    op.row_ids = at<const int64_t>(draws[0]), op.positions = at<const int64_t>(draws[1]);
    op.streams = at<const int64_t>(draws[2]), op.num_prompt = at<const int64_t>(draws[3]);
    op.scales = at<const float>(draws[4]);
    op.int_stride = static_cast<int64_t>(draws[6]), op.scale_stride = static_cast<int64_t>(draws[7]);
    for (int64_t i = 0; i < rows; ++i) {
      require(op.row_ids[i] >= 0 && op.row_ids[i] < static_cast<int64_t>(draws[5]), "choose: no such row");
    }
  }
  op.ids = at<int64_t>(std::get<0>(out)), op.marked = at<int64_t>(std::get<1>(out));
  op.before = at<float>(std::get<2>(out)), op.largest = largest.data();
  bool certain = false;
  run(static_cast<double>(rows * width), [&] { certain = table().choose(op); });
  return certain;
}

void widen(Address x, Address out, int64_t count) {
  const WidenOp op{raw(x), at<float>(out), count};
  submit(static_cast<double>(count), [op] { table().widen(op); });
}

// offsets: 0, or how far after its row's next token each lies; shape: rows of the state, and how many tokens each has
// room for; out: token ids, positions, kv_len.
void gather_rows(Address row_ids, int64_t count, Address tokens, Address computed,
                 const std::tuple<int64_t, int64_t>& shape, const std::tuple<Address, Address, Address>& out,
                 Address offsets) {
  const GatherOp op{at<const int64_t>(row_ids), count, std::get<0>(shape), at<const int32_t>(tokens), std::get<1>(shape),
                    at<const int64_t>(computed), at<int64_t>(std::get<0>(out)), at<int64_t>(std::get<1>(out)),
                    at<int32_t>(std::get<2>(out)), at<const int64_t>(offsets)};
  submit(static_cast<double>(count), [op] { gather(op); });
}

// shape: rows and entries of the table; out: tables, entries, slots.
void gather_tables(Address row_ids, Address positions, int64_t count, Address table, int64_t block_size,
                   const std::tuple<int64_t, int64_t>& shape, const std::tuple<Address, Address, Address>& out) {
  require(block_size > 0, "a block has room for a token");
  const GatherTableOp op{at<const int64_t>(row_ids), at<const int64_t>(positions), count, std::get<0>(shape),
                         at<const int32_t>(table), std::get<1>(shape), block_size, at<int32_t>(std::get<0>(out)),
                         at<int32_t>(std::get<1>(out)), at<int64_t>(std::get<2>(out))};
  submit(static_cast<double>(count), [op] { gather_table(op); });
}

void advance_rows(Address row_ids, Address ids, int64_t count, Address tokens,
                  const std::tuple<int64_t, int64_t>& shape, Address length, Address computed) {
  const AdvanceOp op{at<const int64_t>(row_ids), at<const int64_t>(ids), count, std::get<0>(shape),
                     at<int32_t>(tokens), std::get<1>(shape), at<int64_t>(length), at<int64_t>(computed)};
  submit(static_cast<double>(count), [op] { advance(op); });
}

void check_format(int format, int64_t k, int group) {
  require(format >= 0 && format < static_cast<int>(Format::count), "unknown weight format");
  const auto kind = static_cast<Format>(format);
  if (plain(kind) || sparse(kind)) return;
  if (kind == Format::fp8) {
    require(group >= 0 && group % kGroup == 0, "scales are shared by multiples of 32 columns, or by rows");
    return;
  }
  require(!grouped(kind) || (group >= kGroup && group % kGroup == 0), "weight groups are multiples of 32");
  require(grouped(kind) || k % unit_columns(coding(kind), group) == 0, "rows of this format are whole blocks");
}

// A packed matrix: what stays the same from call to call.
struct Matrix {
  std::vector<Part> parts;
  int64_t n = 0, k;
  Address bias;

  // parts: (address, rows, format, group) each. apart: see Part.
  Matrix(const std::vector<std::tuple<Address, int64_t, int, int>>& from, int64_t k, Address bias, float apart)
      : k(k), bias(bias) {
    require(!from.empty() && k > 0, "a matrix needs data and a shape");
    for (const auto& [data, rows, format, group] : from) {
      require(data != 0 && rows > 0 && n % kTileColumns == 0, "all parts but the last are whole tiles");
      check_format(format, k, group);
      const auto kind = static_cast<Format>(format);
      require(from.size() == 1 || !(plain(kind) || sparse(kind) || kind == Format::fp8), "only integers are multiplied in parts");
      require(!(apart > 0.0f) || kind == Format::int8, "only int8 keeps activations apart");
      parts.push_back({raw(data), rows, group, kind, apart});
      n += rows;
    }
  }

  // residual_stride: 0: its rows follow each other.
  void linear(Address x, int64_t rows, int64_t stride, Address out, int type, bool out_f32, Address residual, int kind,
              const NormSpec* norm, Address gain, Address add, int64_t residual_stride) const {
    LinearOp op{};
    op.gain = at<const float>(gain);
    op.add = at<const float>(add);
    op.x = raw(x);
    op.parts = parts.data();
    op.count = static_cast<int64_t>(parts.size());
    op.bias = at<const float>(bias);
    op.residual = raw(residual);
    op.residual_stride = residual_stride;
    op.out = raw(out);
    op.rows = rows;
    op.n = n;
    op.k = k;
    op.stride = stride;
    op.type = static_cast<Type>(type);
    op.out_f32 = out_f32;
    op.act = act_of(kind);
    if (norm) {
      require(norm->width == k, "the norm's width is not the matrix's");
      op.norm = norm->norm;
    }
    require(!gated(op.act) || n % (2 * kTileColumns) == 0, "a gated activation needs halves of whole tiles");
    if (Tape* tape = Tape::recording()) tape->add(op);
    run(static_cast<double>(n * k) * static_cast<double>(rows), [&op] { table().linear(op); });
  }

  MatrixRef ref() const { return {parts.data(), static_cast<int64_t>(parts.size()), at<const float>(bias), n, k}; }

  void rows(Address ids, int64_t count, Address out, int type) const {
    const auto* wanted = at<const int64_t>(ids);
    submit(static_cast<double>(count * k) * 8, [this, wanted, count, out, type] {
      for (int64_t i = 0; i < count; ++i) require(wanted[i] >= 0 && wanted[i] < n, "rows: index out of range");
      unpack_rows(parts.data(), static_cast<int64_t>(parts.size()), k, wanted, count, static_cast<Type>(type),
                  raw(out));
    });
  }
};

// A product's adapters in all slots, fixed when they get memory; whoever makes one keeps the tensors alive.
struct Site {
  Address down, up, ranks, gains, shifts;
  std::vector<int64_t> borders;
  int64_t k, lanes, most_rank, slots;
  Type weights;

  Site(const std::tuple<Address, Address, Address, Address, Address>& tensors, const std::vector<int64_t>& borders,
       int64_t k, int64_t lanes, int64_t most_rank, int64_t slots, int type)
      : borders(borders), k(k), lanes(lanes), most_rank(most_rank), slots(slots), weights(static_cast<Type>(type)) {
    std::tie(down, up, ranks, gains, shifts) = tensors;
    require(down != 0 && up != 0 && ranks != 0, "a site needs its tensors");
    require(borders.size() >= 2 && lanes % 16 == 0 && k > 0, "a site's shape");
    require((gains == 0) == (shifts == 0), "gains and shifts go together");
  }

  // Whose: the slot of each token, how many tokens.
  using Whose = std::tuple<Address, int64_t>;

  TokenSlots slots_of(const Whose& whose) const { return {at<const int32_t>(std::get<0>(whose)), std::get<1>(whose)}; }
  // Checked at each call: replays read slots that have changed.
  void check(const TokenSlots& of) const {
    for (int64_t i = 0; i < of.tokens; ++i)
      require(of.slots[i] >= 0 && of.slots[i] < slots, "adapters: no such slot");
  }

  void shrink(Address x, int64_t stride, int type, const Whose& whose, Address low) const {
    const auto parts = static_cast<int64_t>(borders.size()) - 1;
    const ShrinkOp op{raw(x), raw(down), at<const int32_t>(ranks), at<float>(low), k, lanes, parts, stride,
                      static_cast<Type>(type), weights, slots_of(whose)};
    submit(static_cast<double>(k * lanes * op.of.tokens), [this, op] {
      check(op.of);
      table().shrink(op);
    });
  }

  void expand(Address low, const Whose& whose, Address add, Address gain) const {
    require(gain == 0 || gains != 0, "there are no gains");
    const auto parts = static_cast<int64_t>(borders.size()) - 1;
    const ExpandOp op{at<const float>(low), raw(up), at<const int32_t>(ranks), borders.data(), at<const float>(gains),
                      at<const float>(shifts), at<float>(add), at<float>(gain), borders.back(), lanes, parts,
                      most_rank, weights, slots_of(whose)};
    submit(static_cast<double>(borders.back() * most_rank * op.of.tokens), [this, op] {
      check(op.of);
      table().expand(op);
    });
  }
};

// The experts of one layer, fixed when the model is built; whoever makes one keeps the matrices alive. Of several ranks
// each has some columns of the first matrices and some rows of the second: then only the halves can be called.
struct Experts {
  std::vector<MatrixRef> ups, downs;
  int64_t inner;  // of this rank
  bool whole;
  Act act;

  Experts(const std::vector<const Matrix*>& up, const std::vector<const Matrix*>& down, int kind)
      : act(act_of(kind)) {
    require(!up.empty() && up.size() == down.size(), "every expert has two matrices");
    inner = up[0]->n / (gated(act) ? 2 : 1);
    whole = down[0]->n == up[0]->k && down[0]->k == inner;
    for (size_t e = 0; e < up.size(); ++e) {
      require(up[e]->k == up[0]->k && up[e]->n == up[0]->n, "experts differ in shape");
      require(down[e]->k == down[0]->k && down[e]->n == down[0]->n, "experts differ in shape");
      require(!gated(act) || up[e]->n % (2 * kTileColumns) == 0, "a gated activation needs halves of whole tiles");
      ups.push_back(up[e]->ref());
      downs.push_back(down[e]->ref());
    }
  }

  // half: 0 both, 1 up to the activation, 2 behind it, 3 both and not summed. first: the first one's id.
  void call(Address x, int64_t rows, Address out, int type, Address ids, Address gates, int64_t top_k, int half,
            int64_t first) const {
    require((half != 0 && half != 3) || whole, "these experts are a rank's share");
    ExpertsOp op{};
    op.x = raw(x);
    op.out = raw(out);
    op.rows = rows;
    op.hidden = half == 2 ? downs[0].n : ups[0].k;
    op.inner = half == 2 ? downs[0].k : inner;
    op.top_k = top_k;
    op.experts = static_cast<int64_t>(ups.size());
    op.ups = ups.data();
    op.downs = downs.data();
    op.ids = at<const int64_t>(ids);
    op.gates = at<const float>(gates);
    op.type = static_cast<Type>(type);
    op.act = act;
    op.inside = half != 2;
    op.outside = half != 1;
    op.summed = half != 3;
    op.first = first;
    submit(static_cast<double>(rows * top_k) * static_cast<double>(3 * op.hidden * op.inner), [op] { experts(op); });
  }
};

void choose(Address logits, int64_t rows, int64_t count, int type, Address bias, Address ids, Address gates,
            int64_t top_k, const std::tuple<int, bool, float, float, float, int64_t, int64_t, bool>& how) {
  const auto& [order, normalise, scale, eps, floor, groups, top_groups, sum2] = how;
  require(top_k > 0 && top_k <= count && groups > 0 && count % groups == 0, "no such choice of experts");
  require(groups == 1 || (top_groups > 0 && top_groups <= groups), "no such choice of groups");
  const RouteOp op{raw(logits), at<const float>(bias), at<int64_t>(ids), at<float>(gates), rows, count, top_k, groups,
                   top_groups, scale, eps, floor, static_cast<Type>(type), static_cast<RouteOrder>(order), normalise, sum2};
  submit(static_cast<double>(rows * count) * 16, [op] { route(op); });
}

// One product per head: x [T, heads, k] against the matrix's rows h * n .. (h + 1) * n - 1, which are whole tiles.
void heads(const Matrix& matrix, int64_t count, Address x, int64_t tokens, Address out, int type) {
  const int64_t n = matrix.n / count, element = type == static_cast<int>(Type::f32) ? 4 : 2;
  require(count > 0 && n % kTileColumns == 0 && matrix.parts.size() == 1, "a head's rows are whole tiles");
  const int64_t bytes = packed_bytes(matrix.parts[0].format, n, matrix.k, matrix.parts[0].group);
  submit(static_cast<double>(matrix.n * matrix.k) * static_cast<double>(tokens), [=, part = matrix.parts[0], k = matrix.k] {
    for (int64_t head = 0; head < count; ++head) {
      Part mine = part;
      mine.weight = static_cast<const uint8_t*>(part.weight) + head * bytes;
      mine.n = n;
      LinearOp op{};
      op.x = static_cast<const uint8_t*>(raw(x)) + head * k * element;
      op.parts = &mine;
      op.count = 1;
      op.out = static_cast<uint8_t*>(raw(out)) + head * n * element;
      op.rows = tokens;
      op.n = n;
      op.k = k;
      op.stride = count * k;
      op.out_stride = count * n;
      op.type = static_cast<Type>(type);
      table().linear(op);
    }
  });
}

// One attention layer: shapes, norms, rope and where its pages lie.
struct Layer {
  PrepareOp prepare_op{};
  AttentionOp attention_op{};
  int64_t rope_rows = 0, slots_held = 0;

  Layer(int heads, int kv_heads, int key_dim, int value_dim, bool latent, float scale, float softcap, int64_t window,
        Address sinks, Address alibi) {
    require(heads > 0 && kv_heads > 0 && heads % kv_heads == 0, "query heads are a multiple of key/value heads");
    require(key_dim > 0 && key_dim <= kMaxHeadDim && value_dim > 0 && value_dim <= kMaxHeadDim, "head too wide");
    PrepareOp& p = prepare_op;
    AttentionOp& a = attention_op;
    p.heads = a.heads = heads;
    p.kv_heads = a.kv_heads = kv_heads;
    p.key_dim = a.key_dim = key_dim;
    a.value_dim = value_dim;
    p.value_dim = latent ? 0 : value_dim;
    a.scale = scale;
    a.softcap = softcap;
    a.window = window;
    a.sinks = at<const float>(sinks);
    a.alibi = at<const float>(alibi);
  }

  void rope(Address cos, Address sin, int64_t rows, int dim, int start, bool interleaved) {
    require(dim > 0 && dim % 2 == 0 && start >= 0 && start + dim <= prepare_op.key_dim, "rope does not fit the head");
    rope_rows = rows;
    prepare_op.cos = at<const float>(cos);
    prepare_op.sin = at<const float>(sin);
    prepare_op.rope_dim = dim;
    prepare_op.rope_start = start;
    prepare_op.interleaved = interleaved;
  }

  void norms(const NormSpec* q, const NormSpec* k) {
    const int width = prepare_op.key_dim;
    if (q) {
      prepare_op.q_norm = q->norm;
      prepare_op.q_norm_whole = q->width == int64_t{prepare_op.heads} * width && q->width != width;
      require(q->width == width || prepare_op.q_norm_whole, "the query norm spans neither a head nor all of them");
    }
    if (k) {
      prepare_op.k_norm = k->norm;
      prepare_op.k_norm_whole = k->width == int64_t{prepare_op.kv_heads} * width && k->width != width;
      require(k->width == width || prepare_op.k_norm_whole, "the key norm spans neither a head nor all of them");
    }
  }

  static bool scaled(Type type) { return type == Type::int8 || type == Type::int4; }

  // strides: block, head and token of the keys, then of the values.
  void pages(Address key, Address value, const std::vector<int64_t>& strides, int64_t blocks, int block_size,
             int kv_type) {
    require(strides.size() == 6 && block_size > 0, "pages need six strides");
    slots_held = blocks * block_size;
    auto set = [&](auto& op) {
      op.key = at<std::remove_pointer_t<decltype(op.key)>>(key);
      op.value = at<std::remove_pointer_t<decltype(op.value)>>(value);
      op.key_block = strides[0];
      op.key_head = strides[1];
      op.key_token = strides[2];
      op.value_block = strides[3];
      op.value_head = strides[4];
      op.value_token = strides[5];
      op.block_size = block_size;
      op.kv_type = static_cast<Type>(kv_type);
    };
    set(prepare_op);
    set(attention_op);
  }

  // Of pages in int8 and int4: addresses and strides (block, head, token) as in `pages`, and how many numbers share a scale.
  void scales(Address key, Address value, const std::vector<int64_t>& strides, int64_t key_columns,
              int64_t value_columns) {
    require(strides.size() == 6 && key != 0 && value != 0, "scales need six strides");
    require(key_columns > 0 && value_columns > 0, "a scale belongs to at least one number");
    const bool fours = prepare_op.kv_type == Type::int4;
    const int64_t key_dim = prepare_op.key_dim, value_dim = prepare_op.value_dim ? prepare_op.value_dim : key_dim;
    require(!fours || (key_dim % 2 == 0 && value_dim % 2 == 0), "two numbers share a byte of int4");
    const auto of = [&](Address data, size_t i, int64_t columns, int64_t dim) {
      return ScaleOp{raw(data), strides[i], strides[i + 1], strides[i + 2], columns, fours ? dim / columns : 0, fours ? dim / 2 : 0};
    };
    prepare_op.key_scale = attention_op.key_scale = of(key, 0, key_columns, key_dim);
    prepare_op.value_scale = attention_op.value_scale = of(value, 3, value_columns, value_dim);
  }

  void prepare(Address qkv, Address out, int64_t tokens, int64_t stride, int type, Address positions,
               Address slots) const {
    require(!scaled(prepare_op.kv_type) || prepare_op.key_scale.data, "pages in 8 and 4 bits need scales");
    PrepareOp op = prepare_op;
    op.qkv = raw(qkv);
    op.out = raw(out);
    op.tokens = tokens;
    op.stride = stride;
    op.type = static_cast<Type>(type);
    op.positions = at<const int64_t>(positions);
    op.slots = at<const int64_t>(slots);
    submit(static_cast<double>(tokens * stride) * 4, [op, held = slots_held, last = rope_rows] {
      for (int64_t i = 0; i < op.tokens; ++i) {
        require(op.slots[i] < held, "prepare_qkv: a slot outside the pages");
        require(op.positions[i] >= 0 && (op.rope_dim == 0 || op.positions[i] < last),
                "prepare_qkv: a position beyond the rope table");
      }
      table().prepare(op);
    });
  }

  void attend(Address q, Address out, int type, const std::vector<int64_t>& plan, int64_t max_entries,
              int64_t sequences, double work) const {
    require(plan.size() == 9, "a plan is six addresses, and two with a width of trees");
    require(!scaled(attention_op.kv_type) || attention_op.key_scale.data, "pages in 8 and 4 bits need scales");
    AttentionOp op = attention_op;
    op.q = raw(q);
    op.out = raw(out);
    op.type = static_cast<Type>(type);
    auto ints = [&](int i) { return at<const int32_t>(static_cast<Address>(plan[static_cast<size_t>(i)])); };
    op.tables = ints(0);
    op.first = ints(1);
    op.entries = ints(2);
    op.query_start = ints(3);
    op.kv_len = ints(4);
    op.positions = at<const int64_t>(static_cast<Address>(plan[5]));
    op.roots = at<const int64_t>(static_cast<Address>(plan[6]));
    op.places = at<const int32_t>(static_cast<Address>(plan[7]));
    op.path_width = plan[8], op.max_entries = max_entries;
    op.sequences = sequences;
    submit(work, [op] { table().attention(op); });
  }
};

void register_packing(nb::module_& m) {
  m.def("packed_bytes", [](int format, int64_t n, int64_t k, int group) {
    return packed_bytes(static_cast<Format>(format), n, k, group);
  });
  m.def("pack_dense", [](Address weight, int type, int64_t n, int64_t k, int64_t stride, int format, Address out) {
    run(1e9, [&] { pack_dense(raw(weight), static_cast<Type>(type), n, k, stride, static_cast<Format>(format), raw(out)); });
  });
  m.def("pack_sparse", [](Address weight, int64_t n, int64_t k, int64_t stride, int format, Address out) {
    int64_t bytes = 0;
    run(1e9, [&] { bytes = pack_sparse(at<const uint16_t>(weight), n, k, stride, static_cast<Format>(format), raw(out)); });
    return bytes;
  });
  m.def("pack_quantised",
        [](Address q, Address scales, int64_t n, int64_t k, int group, int format, Address out, Address zeros) {
          check_format(format, k, group);
          const Coding kind = coding(static_cast<Format>(format));
          require(format >= 2 && grouped(static_cast<Format>(format)) && !kind.lookup, "this format has no packer for integers");
          require(!kind.zero || zeros != 0, "zero points are missing");
          run(1e9, [&] {
            pack_quantised(at<const int8_t>(q), at<const uint16_t>(scales), at<const uint16_t>(zeros), n, k, group,
                           static_cast<Format>(format), raw(out));
          });
        },
        nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg() = 0);
  m.def("pack_blocks", [](Address blocks, int64_t row_bytes, int64_t n, int64_t k, int format, Address out) {
    check_format(format, k, kGroup);
    require(format >= 2 && has_blocks(static_cast<Format>(format)) && k % kGroup == 0, "no blocks of this format");
    run(1e9, [&] { pack_blocks(at<const uint8_t>(blocks), row_bytes, n, k, static_cast<Format>(format), raw(out)); });
  });
  m.def("pack_eights", [](Address data, Address scales, int64_t n, int64_t k, int group, Address out) {
    check_format(static_cast<int>(Format::fp8), k, group);
    run(1e9, [&] { pack_eights(at<const uint8_t>(data), at<const float>(scales), n, k, group, raw(out)); });
  });
  m.def("pack_table", [](const std::tuple<Address, Address, Address, Address>& from, int64_t n, int64_t k, int group,
                         int format, Address out) {
    check_format(format, k, group);
    require(format >= 2 && tile_head(coding(static_cast<Format>(format))) > 0 && k % kGroup == 0, "no table in this format");
    const auto& [codes, scales, factors, table] = from;
    const Table16 said{at<const uint8_t>(codes), raw(scales), at<const float>(factors), at<const uint8_t>(table)};
    run(1e9, [&] { pack_table(said, n, k, group, static_cast<Format>(format), raw(out)); });
  });
  m.def("use_huge_pages", &use_huge_pages);
  m.def("quantise", [](Address weight, int type, int64_t n, int64_t k, int64_t stride, int format, int group, Address q,
                       Address scales) {
    run(1e9, [&] {
      quantise(raw(weight), static_cast<Type>(type), n, k, stride, static_cast<Format>(format), group, at<int8_t>(q),
               at<uint16_t>(scales));
    });
  });
}

void register_group(nb::module_& m) {
  nb::class_<SharedGroup>(m, "SharedGroup")
      .def(nb::init<Address, int64_t, int, int>())
      .def("begin", &SharedGroup::begin)
      .def("fail", &SharedGroup::fail)
      .def("gather", [](SharedGroup& group, Address x, Address out, int64_t rows, int64_t bytes) {
        submit(1e9, [&group, x, out, rows, bytes] { group.gather(raw(x), raw(out), rows, bytes); });
      })
      .def("reduce", [](SharedGroup& group, Address x, Address residual, Address out, int64_t count, int type) {
        submit(1e9, [=, &group] { group.reduce(raw(x), raw(residual), raw(out), count, static_cast<Type>(type)); });
      });
}

}  // namespace

NB_MODULE(_native, m) {
  if (isas().empty()) throw std::runtime_error("the kernels were compiled for another processor: make setup does it anew");
  m.doc() = "tokenmill's CPU kernels. Addresses are integers; nothing here keeps a tensor alive.";
  m.attr("MOST_TAPS") = kMostTaps;
  m.attr("MOST_KEYS") = kMostKeys;
  m.attr("MOST_SCANNED") = kMostScanned;
  m.attr("TILE_COLUMNS") = kTileColumns;
  m.attr("GROUP") = kGroup;
  m.attr("MAX_HEAD_DIM") = kMaxHeadDim;
  m.def("expands", &machine_expands);
  m.def("isa", [] { return std::string(isa_name(current_isa())); });
  m.def("isas", [] {
    std::vector<std::string> names;
    for (const Isa isa : isas()) names.emplace_back(isa_name(isa));
    return names;
  });
  m.def("set_isa", [](const std::string& name) {
    for (const Isa isa : isas()) {
      if (name == isa_name(isa)) return (void)set_isa(isa);
    }
    throw std::invalid_argument("here is no instruction set " + name);
  });
  m.def("threads", &threads);
  m.def("thread_limit", &thread_limit);
  m.def("set_threads", &set_threads, nb::call_guard<nb::gil_scoped_release>());
  nb::class_<Tape>(m, "Tape")
      .def(nb::init<>())
      .def("begin", &Tape::begin)
      .def("end", &Tape::end)
      .def("size", &Tape::size)
      .def("replay", &Tape::replay);
  nb::class_<NormSpec>(m, "Norm");
  m.def("make_norm", &make_norm);
  m.def("norm", &norm);
  m.def("act", &act);
  m.def("short_conv", &short_conv);
  m.def("delta_rule", &delta_rule);
  m.def("gated_norm", &gated_norm);
  m.def("state_space", &state_space);
  m.def("selective_scan", &selective_scan);
  m.def("add", &add);
  m.def("weigh", &weigh);
  m.def("embed", &embed);
  m.def("greedy", &greedy);
  m.def("choose_tokens", &choose_tokens);
  m.def("widen", &widen);
  m.def("gather_rows", &gather_rows, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg() = 0);
  m.def("gather_tables", &gather_tables);
  m.def("advance_rows", &advance_rows);
  nb::class_<Matrix>(m, "Matrix")
      .def(nb::init<const std::vector<std::tuple<Address, int64_t, int, int>>&, int64_t, Address, float>(), nb::arg(),
           nb::arg(), nb::arg(), nb::arg() = 0.0f)
      .def("linear", &Matrix::linear, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg() = false,
           nb::arg() = 0, nb::arg() = 0, nb::arg().none() = nb::none(), nb::arg() = 0, nb::arg() = 0, nb::arg() = 0)
      .def("rows", &Matrix::rows);
  nb::class_<Site>(m, "Site")
      .def(nb::init<const std::tuple<Address, Address, Address, Address, Address>&, const std::vector<int64_t>&, int64_t,
                    int64_t, int64_t, int64_t, int>())
      .def("shrink", &Site::shrink)
      .def("expand", &Site::expand);
  nb::class_<Experts>(m, "Experts")
      .def(nb::init<const std::vector<const Matrix*>&, const std::vector<const Matrix*>&, int>())
      .def("call", &Experts::call, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(),
           nb::arg() = 0, nb::arg() = 0);
  m.def("choose", &choose);
  m.def("heads", &heads);
  nb::class_<Layer>(m, "Layer")
      .def(nb::init<int, int, int, int, bool, float, float, int64_t, Address, Address>())
      .def("rope", &Layer::rope)
      .def("norms", &Layer::norms, nb::arg().none(), nb::arg().none())
      .def("pages", &Layer::pages)
      .def("scales", &Layer::scales)
      .def("prepare", &Layer::prepare)
      .def("attend", &Layer::attend);

  register_packing(m);
  register_group(m);
}
