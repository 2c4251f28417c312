// Every operation of the native module as a plain record: pointers, sizes and flags, nothing else. Bindings fill them
// in; a later recorder may keep a list of them and replay a whole step. One Table per instruction set runs them.
//
// The rule all kernels keep: a row's result is the same bytes whatever the number of rows, their company, the thread
// count or the chunking. So every output element has one owner and one order of additions, and work is split over
// outputs, never over a sum. (Attention over long contexts is cut at fixed absolute positions.)
#pragma once
#include <cstdint>
#include <vector>

namespace tokenmill {

enum class Type : int { f32 = 0, bf16 = 1, int8 = 2, int4 = 3 };  // int8, int4: stored keys and values only
enum class Act : int {
  none, silu, gelu, gelu_tanh, relu, silu_mul, gelu_mul, gelu_tanh_mul, relu2, oai_swiglu, clipped_silu_mul, count
};
// Does it take [gate | up], and halve the width?
constexpr bool gated(Act act) {
  return act == Act::silu_mul || act == Act::gelu_mul || act == Act::gelu_tanh_mul || act == Act::oai_swiglu ||
         act == Act::clipped_silu_mul;
}
#if defined(__aarch64__)
enum class Isa : int { scalar, neon, neon_dot, neon_bf16 };  // each machine has all up to its best
#else
enum class Isa : int { scalar, avx2, avx512, avx512_vnni, avx512_bf16, avx512_amx };
#endif

constexpr int kTileColumns = 64;  // output columns of one packed weight tile
constexpr int kGroup = 32;        // activations quantised together; weight groups are multiples
constexpr int kChunkKeys = 512;   // attention is cut at multiples of this position

constexpr int kMaxHeadDim = 2048;
extern const unsigned char kZeroRow[kMaxHeadDim * 4];  // stands in for keys and values that do not exist

struct Norm {          // y = (x - mean if layer) / sqrt(var + eps) * (weight + offset) + bias
  const void* weight;  // null: no norm
  const void* bias;
  Type type;           // of weight and bias
  float eps;
  float offset;
  bool layer;
};

struct NormOp {
  const void* x;
  void* out;
  int64_t rows, width, stride;
  Type type;
  Norm norm;
};

struct ActOp {  // x [rows, width] -> out [rows, width], or width / 2 for the gated ones
  const void* x;
  void* out;
  int64_t rows, width;
  Type type;
  Act act;
};

struct AddOp {  // out = x + scale * y
  const void* x;
  const void* y;
  void* out;
  int64_t count;
  float scale;
  Type type;
};

struct WeighOp {  // out = the sum over j of factors[j] * x[j]; or, with y, out[j] = x[j] + factors[j] * y
  const void* x;         // [rows, count, width]
  const void* y;         // [rows, width] in x's type, or null
  const float* factors;  // [rows, count], row stride in elements
  void* out;             // [rows, width]; with y [rows, count, width]
  int64_t rows, count, width, stride;
  Type type, out_type;   // of x, of out
};

struct EmbedOp {  // out[i] = table[ids[i]] * scale
  const void* table;
  const int64_t* ids;
  void* out;
  int64_t count, vocab, width, stride;
  float scale;
  Type type;
};

struct GreedyOp {  // the first of the largest numbers of each row, where NaN counts as larger than all
  const void* x;
  int64_t* ids;
  int64_t* marked;  // the same, or ~id where the largest is not finite
  float* largest;
  int64_t rows, width, stride;
  Type type;
};

constexpr int32_t kDrawn = 1 << 30;

struct ChooseOp {  // greedy among allowed tokens, or a draw among them
  const void* x;
  int64_t rows, width, stride;
  Type type;
  const int32_t* words;  // per row 1 + the number of its mask, or 0, plus kDrawn; nullptr: no masks, all are drawn
  const uint32_t* masks;
  int64_t mask_words;
  const int64_t* row_ids;  // per line, into the following; streams may be nullptr: nothing is drawn
  const int64_t* positions;
  const int64_t* streams;
  const int64_t* num_prompt;
  const float* scales;
  int64_t int_stride, scale_stride;
  int64_t* ids;
  int64_t* marked;
  float* before;  // the largest logits, and the largest allowed ones
  float* largest;
};

struct WidenOp {  // bfloat16 as float32
  const void* x;
  float* out;
  int64_t count;
};

struct GatherOp {  // what a step's tokens need of the rows' state: of row ids[i] the token computed[ids[i]] + offsets[i]
  const int64_t* row_ids;
  int64_t count, rows;
  const int32_t* tokens;  // [rows, length]
  int64_t length;
  const int64_t* computed;  // [rows]
  int64_t* ids;             // the tokens [count]
  int64_t* positions;
  int32_t* kv_len;
  const int64_t* offsets = nullptr;  // [count]; null: all 0
};

struct GatherTableOp {  // and of one block table, whose entry j begins at j * block_size
  const int64_t* row_ids;
  const int64_t* positions;  // [count]
  int64_t count, rows;
  const int32_t* table;  // [rows, width]
  int64_t width, block_size;
  int32_t* out;  // [count, width]; only counted entries are written
  int32_t* entries;
  int64_t* slots;
};

struct AdvanceOp {  // tokens[row, length[row]] = id; length and computed grow by one
  const int64_t* row_ids;
  const int64_t* ids;
  int64_t count, rows;
  int32_t* tokens;  // [rows, room]
  int64_t room;
  int64_t* length;
  int64_t* computed;
};

// Integers, table, nvfp4 and fp8 are ours; the others hold what the GGUF types of these names hold (Q4_0 is int4, Q8_0 int8).
enum class Format : int {
  f32, bf16, int8, int4, int4_zero, q4_1, q5_0, q5_1, q2_k, q3_k, q4_k, q5_k, q6_k, iq4_nl, iq4_xs, mxfp4,
  int2, int2_zero, int3, int3_zero, int5_zero, int6_zero, int8_zero, table, nvfp4, fp8, f16,
  bf16_sparse, f16_sparse, count
};

struct Part {          // rows of a matrix in one format; all parts but the last are whole tiles
  const void* weight;  // packed, see pack.h
  int64_t n;
  int group;           // of the scales (integers, table and fp8)
  Format format;
  float apart = 0.0f;  // int8: activations of this magnitude or more are not rounded; 0: all are
};

struct LinearOp {        // out = residual + act(norm(x) @ W.T + bias)
  const void* x;         // [rows, k], row stride in elements
  const Part* parts;     // one, or several with integers
  int64_t count;
  const float* bias;     // [n] or null
  const void* residual;  // [rows, n (or n / 2 after a gated act)] in x's type, or null
  void* out;
  int64_t rows, n, k, stride;
  int64_t out_stride;    // of out, in elements; 0: its width
  int64_t residual_stride;  // of the residual, alike
  Type type;             // of x and residual; out too unless out_f32
  bool out_f32;
  Act act;
  Norm norm;
  const LinearOp* next;  // the product that follows in a recording, or null
  const float* gain;     // [rows, n] or null: what adapters multiply the product and its bias by
  const float* add;      // [rows, n] or null: what they add to it, before the activation
};

struct TokenSlots {      // whose adapters: the slot of each token (0: none)
  const int32_t* slots;
  int64_t tokens;
};

struct ShrinkOp {        // low[t, lane] = sum over k of x[t, k] * down[slot, k, lane]
  const void* x;         // [T, k], row stride in elements
  const void* down;      // [slots, k, lanes]
  const int32_t* ranks;  // [slots]
  float* low;            // [T, lanes]
  int64_t k, lanes, parts, stride;
  Type type, weights;    // of x, of down
  TokenSlots of;
};

struct ExpandOp {        // add[t, n] = shift + sum over j of low[t, part(n) * rank + j] * up[slot, j, n]; gain[t, n]
  const float* low;
  const void* up;        // [slots, most_rank, n]
  const int32_t* ranks;
  const int64_t* borders;  // [parts + 1]: where each part's columns begin
  const float* gains;    // [slots, n] or null, shifts alike
  const float* shifts;
  float* add;
  float* gain;           // null without gains
  int64_t n, lanes, parts, most_rank;
  Type weights;
  TokenSlots of;
};

// Keys and values in int8 and int4: the scales (bf16) of a head's numbers, `columns` of which share one. In int4 a scale's
// least value lies `least` behind it, and numbers from `half` on are the upper halves of the bytes.
struct ScaleOp {
  void* data;  // null: not stored so
  int64_t block, head, token;  // strides in elements
  int64_t columns;
  int64_t least, half;  // int8: 0
};

struct PrepareOp {  // q, k of qkv are normed and rotated; q goes to out, k and v go to their slots
  const void* qkv;
  void* out;
  int64_t tokens, stride;
  int heads, kv_heads, key_dim, value_dim;  // value_dim 0: latent, nothing but the key is stored
  Type type;
  Norm q_norm, k_norm;
  bool q_norm_whole, k_norm_whole;          // the norm spans all heads
  const float* cos;
  const float* sin;
  int rope_dim, rope_start;                 // rope_dim 0: none
  bool interleaved;
  const int64_t* positions;
  const int64_t* slots;                     // < 0: nothing is stored
  void* key;
  void* value;
  int64_t key_block, key_head, key_token;   // strides in elements
  int64_t value_block, value_head, value_token;
  int block_size;
  Type kv_type;
  ScaleOp key_scale, value_scale;
};

struct AttentionOp {  // out [T, heads * value_dim]
  const void* q;      // [T, heads, key_dim]
  void* out;
  int heads, kv_heads, key_dim, value_dim;
  Type type;
  float scale, softcap;
  const float* sinks;  // [heads] or null
  const float* alibi;  // [heads] slopes or null
  int64_t window;      // 0: none; below: chunks of so many positions, within which queries see
  const void* key;
  const void* value;
  int64_t key_block, key_head, key_token;
  int64_t value_block, value_head, value_token;
  int block_size;
  Type kv_type;
  ScaleOp key_scale, value_scale;
  const int32_t* tables;  // [S, max_entries]
  const int32_t* first;   // the same shape, or null: entry j starts at j * block_size
  const int32_t* entries; // [S]
  int64_t max_entries, sequences;
  const int32_t* query_start;  // [S + 1]
  const int32_t* kv_len;       // [S]
  const int64_t* positions;    // [T]
  const int64_t* roots;  // [S] or null; position p of a sequence from its root on lies at root + places[p - root]
  const int32_t* places; // [S, path_width]
  int64_t path_width;
};

struct MatrixRef {  // a packed matrix [n, k] with its bias
  const Part* parts;
  int64_t count;
  const float* bias;
  int64_t n, k;
};

struct ExpertsOp {  // out[t] = sum over j of gates[t, j] * downs[ids[t, j]](act(ups[ids[t, j]](x[t])))
  const void* x;    // [rows, hidden]
  void* out;
  int64_t rows, hidden, inner, top_k, experts;
  const MatrixRef* ups;
  const MatrixRef* downs;
  const int64_t* ids;  // [rows, top_k]; outside 0..experts - 1: adds nothing
  const float* gates;
  Type type;
  Act act;
  bool inside = true, outside = true;  // one half alone: x or out is [rows * top_k, inner], a row for each choice
  bool summed = true;  // false: out is float [rows * top_k, hidden], a row for each choice, of zeros where there is none
  int64_t first = 0;   // ids begin at this one
};

struct RowStep {  // of what a recurrent layer's sequences are: where their states lie, borders in the batch, positions
  const int64_t* rows;         // [sequences]: the state that each begins with, and leaves its own in if `left` is null
  const int32_t* query_start;  // [sequences + 1]
  const int64_t* positions;    // [T]; a sequence that begins at 0 has a state of zeros
  const int64_t* left;         // [T] or null: where the state behind each token is left, -1: nowhere; never the last one
  int64_t sequences;

  int64_t last(int64_t sequence) const { return left ? left[query_start[sequence + 1] - 1] : rows[sequence]; }
};

constexpr int kMostTaps = 16;
constexpr int kMostKeys = 512;
constexpr int kMostScanned = 64;

struct ConvOp {  // out[t, c] = bias[c] + sum of weight[k, c] * the row's last inputs of channel c, or silu of it
  const void* x;  // [T, channels], row stride in elements
  void* out;
  const float* weight;  // [taps, channels]
  const float* bias;    // [channels] or null
  void* state;          // [rows, taps - 1, channels] in x's type, oldest first
  int64_t channels, stride;
  int taps;
  Type type;
  bool silu;
  RowStep step;
};

struct GateOp {  // out = act(gate) norm(x), or norm(act(gate) x) if the gate comes first; normed by pieces of `size`
  const void* x;  // [rows, width], row strides in elements
  const void* gate;
  void* out;
  const void* weight;  // [weights]: size or width of them; null: no norm
  int64_t rows, width, size, weights, stride, gate_stride;
  float eps, offset;
  Type type;
  bool first, silu;
};

struct DeltaOp {  // kernels/states.py says what it computes
  const void* mixed;  // [T, (q | k | v)], row stride in elements
  const void* gates;  // [T, (beta | pace)]
  void* out;          // [T, value_heads, value_dim]
  float* state;       // [rows, value_heads, key_dim, value_dim]
  const float* rate;  // [value_heads]
  const float* shift;  // [value_heads], or [value_heads, key_dim] (by_key); paces alike
  int64_t key_heads, value_heads, key_dim, value_dim, stride, gates_stride;
  float most_beta;
  Type type;
  bool by_key;
  bool tiled;  // value head h belongs to key head h % key_heads; else to h / (value_heads / key_heads)
  RowStep step;
};

struct SpaceOp {  // state-space layers with one decay a head; kernels/states.py says what they compute
  const void* mixed;  // [T, (x | b | c)], row stride in elements
  const void* rates;  // [T, heads]
  void* out;          // [T, heads * head_dim]
  float* state;       // [rows, heads, keys, head_dim]
  const float* rate;  // [heads], shift and skip alike
  const float* shift;
  const float* skip;
  int64_t heads, head_dim, groups, keys, stride, rates_stride;
  float low, high;
  Type type;
  RowStep step;
};

struct ScanOp {  // state-space layers with a decay of each channel and state number
  const void* x;      // [T, channels], row strides in elements
  const void* rates;  // [T, channels]
  const void* mixed;  // [T, (b | c)]
  void* out;          // [T, channels]
  float* state;       // [rows, keys, channels]
  const float* rate;  // [keys, channels]
  const float* skip;  // [channels]
  int64_t channels, keys, stride, rates_stride, mixed_stride;
  Type type;
  RowStep step;
};

enum class RouteOrder : int { softmax_topk, topk_softmax, sigmoid_topk, topk_sigmoid };

struct RouteOp {
  const void* logits;  // [rows, experts]
  const float* bias;   // [experts] or null: added for choosing only
  int64_t* ids;        // [rows, top_k], best first
  float* gates;
  int64_t rows, experts, top_k, groups, top_groups;
  float scale, eps, floor;  // normalised gates are divided by max(their sum, floor) + eps
  Type type;
  RouteOrder order;
  bool normalise, group_sum2;
};

void experts(const ExpertsOp& op);
void route(const RouteOp& op);

// These throw where an index lies outside what it names, before they write anything.
void gather(const GatherOp& op);
void gather_table(const GatherTableOp& op);
void advance(const AdvanceOp& op);

struct Table {
  void (*norm)(const NormOp&);
  void (*act)(const ActOp&);
  void (*add)(const AddOp&);
  void (*weigh)(const WeighOp&);
  void (*embed)(const EmbedOp&);
  void (*greedy)(const GreedyOp&);
  bool (*choose)(const ChooseOp&);  // false: a draw is too close to call
  void (*widen)(const WidenOp&);
  void (*linear)(const LinearOp&);
  void (*prepare)(const PrepareOp&);
  void (*attention)(const AttentionOp&);
  void (*short_conv)(const ConvOp&);
  void (*delta_rule)(const DeltaOp&);
  void (*shrink)(const ShrinkOp&);
  void (*expand)(const ExpandOp&);
  void (*gated_norm)(const GateOp&);
  void (*state_space)(const SpaceOp&);
  void (*selective_scan)(const ScanOp&);
};

extern const Table table_scalar, table_avx2, table_avx512, table_avx512_vnni, table_avx512_bf16,
    table_avx512_amx, table_neon,
    table_neon_dot, table_neon_bf16;

std::vector<Isa> isas();  // that were compiled and that this machine has, from the least to the best; none: no kernel runs
Isa best_isa();
Isa current_isa();
bool set_isa(Isa isa);  // false when it is none of these
const Table& table();

}  // namespace tokenmill
