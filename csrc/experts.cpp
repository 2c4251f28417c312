// Mixtures of experts: choosing them, and running the chosen ones. Owns: the order of rows and of additions; the
// products are `linear` of the instruction set in use. A token's result is the sum over its experts in the order in
// which they were chosen, whatever other tokens chose.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "numbers.h"
#include "ops.h"
#include "threads.h"

namespace tokenmill {
namespace {

float at(const void* data, Type type, int64_t i) {
  return type == Type::f32 ? static_cast<const float*>(data)[i] : to_float(static_cast<const bf16*>(data)[i]);
}

// The `count` largest of x [n] that are not taken yet, best first; equal ones in ascending order.
void largest(const float* x, int64_t n, int64_t count, int64_t* out) {
  std::vector<int64_t> order(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) order[static_cast<size_t>(i)] = i;
  std::partial_sort(order.begin(), order.begin() + count, order.end(), [&](int64_t a, int64_t b) {
    const bool bad_a = x[a] != x[a], bad_b = x[b] != x[b];  // NaN first, as torch has it
    if (bad_a != bad_b) return bad_a;
    return x[a] > x[b] || (!(x[a] < x[b]) && a < b);
  });
  std::copy(order.begin(), order.begin() + count, out);
}

void softmax(float* x, int64_t n) {
  float top = x[0], total = 0.0f;
  for (int64_t i = 1; i < n; ++i) top = x[i] > top ? x[i] : top;
  for (int64_t i = 0; i < n; ++i) total += x[i] = std::exp(x[i] - top);
  for (int64_t i = 0; i < n; ++i) x[i] /= total;
}

// Puts every expert outside the best groups out of reach.
void keep_groups(const RouteOp& op, float* choice) {
  const int64_t width = op.experts / op.groups;
  std::vector<float> rank(static_cast<size_t>(op.groups));
  std::vector<int64_t> best(static_cast<size_t>(op.groups));
  for (int64_t g = 0; g < op.groups; ++g) {
    float first = -INFINITY, second = -INFINITY;
    for (int64_t i = g * width; i < (g + 1) * width; ++i) {
      if (choice[i] > first) {
        second = first;
        first = choice[i];
      } else if (choice[i] > second) {
        second = choice[i];
      }
    }
    rank[static_cast<size_t>(g)] = op.group_sum2 ? first + second : first;
  }
  largest(rank.data(), op.groups, op.top_groups, best.data());
  std::vector<bool> kept(static_cast<size_t>(op.groups));
  for (int64_t g = 0; g < op.top_groups; ++g) kept[static_cast<size_t>(best[static_cast<size_t>(g)])] = true;
  for (int64_t i = 0; i < op.experts; ++i) {
    if (!kept[static_cast<size_t>(i / width)]) choice[i] = -INFINITY;
  }
}

void sigmoid(float* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) x[i] = 1.0f / (1.0f + std::exp(-x[i]));
}

// Where experts are chosen by their logits, only the chosen ones are weighed: scores that round to the same number, as
// sigmoids near 1 do, would choose others.
void route_row(const RouteOp& op, int64_t row, std::vector<float>& scores, std::vector<float>& choice) {
  int64_t* ids = op.ids + row * op.top_k;
  float* gates = op.gates + row * op.top_k;
  for (int64_t i = 0; i < op.experts; ++i) scores[static_cast<size_t>(i)] = at(op.logits, op.type, row * op.experts + i);
  if (op.order == RouteOrder::softmax_topk) softmax(scores.data(), op.experts);
  if (op.order == RouteOrder::sigmoid_topk) sigmoid(scores.data(), op.experts);
  for (int64_t i = 0; i < op.experts; ++i) {
    choice[static_cast<size_t>(i)] = scores[static_cast<size_t>(i)] + (op.bias ? op.bias[i] : 0.0f);
  }
  if (op.groups > 1) keep_groups(op, choice.data());
  largest(choice.data(), op.experts, op.top_k, ids);
  for (int64_t j = 0; j < op.top_k; ++j) gates[j] = scores[static_cast<size_t>(ids[j])];
  if (op.order == RouteOrder::topk_softmax) softmax(gates, op.top_k);
  if (op.order == RouteOrder::topk_sigmoid) sigmoid(gates, op.top_k);
  float total = 0.0f;
  for (int64_t j = 0; j < op.top_k; ++j) total += gates[j];
  const bool divide = op.normalise && op.order != RouteOrder::topk_softmax;  // those add up to 1
  const float whole = (total < op.floor ? op.floor : total) + op.eps;
  for (int64_t j = 0; j < op.top_k; ++j) gates[j] = (divide ? gates[j] / whole : gates[j]) * op.scale;
}

// (token, choice) pairs one expert after the other: where each pair's row is, which pair each row is, and where each
// expert's rows begin.
struct Order {
  std::vector<int64_t> begin, place, pair;
};

Order sorted(const ExpertsOp& op) {
  const int64_t pairs = op.rows * op.top_k;
  Order found{std::vector<int64_t>(static_cast<size_t>(op.experts) + 1), std::vector<int64_t>(static_cast<size_t>(pairs), -1), {}};
  for (int64_t i = 0; i < pairs; ++i) {
    const int64_t id = op.ids[i] - op.first;
    if (id >= 0 && id < op.experts) ++found.begin[static_cast<size_t>(id) + 1];
  }
  for (size_t e = 1; e < found.begin.size(); ++e) found.begin[e] += found.begin[e - 1];
  found.pair.resize(static_cast<size_t>(found.begin.back()));
  std::vector<int64_t> next(found.begin.begin(), found.begin.end() - 1);
  for (int64_t i = 0; i < pairs; ++i) {
    const int64_t id = op.ids[i] - op.first;
    if (id < 0 || id >= op.experts) continue;
    const int64_t to = next[static_cast<size_t>(id)]++;
    found.place[static_cast<size_t>(i)] = to;
    found.pair[static_cast<size_t>(to)] = i;
  }
  return found;
}

LinearOp product(const MatrixRef& matrix, const void* x, void* out, int64_t rows, Type type) {
  LinearOp op{};
  op.x = x;
  op.parts = matrix.parts;
  op.count = matrix.count;
  op.bias = matrix.bias;
  op.out = out;
  op.rows = rows;
  op.n = matrix.n;
  op.k = op.stride = matrix.k;
  op.type = type;
  return op;
}

const uint8_t* row_of(const void* x, int64_t row, int64_t bytes) { return static_cast<const uint8_t*>(x) + row * bytes; }

// out[t] = the sum over j of gates[t, j] * y, the row of `found` at the place of choice t * k + j.
void weigh(const ExpertsOp& op, const float* found, const int64_t* places) {
  auto task = [&](int64_t t) {
    std::vector<float> total(static_cast<size_t>(op.hidden), 0.0f);
    for (int64_t j = 0; j < op.top_k; ++j) {
      const int64_t place = places[t * op.top_k + j];
      if (place < 0) continue;
      const float gate = op.gates[t * op.top_k + j];
      const float* y = found + place * op.hidden;
      for (int64_t i = 0; i < op.hidden; ++i) total[static_cast<size_t>(i)] += gate * y[i];
    }
    for (int64_t i = 0; i < op.hidden; ++i) {
      if (op.type == Type::f32) {
        static_cast<float*>(op.out)[t * op.hidden + i] = total[static_cast<size_t>(i)];
      } else {
        static_cast<bf16*>(op.out)[t * op.hidden + i] = to_bf16(total[static_cast<size_t>(i)]);
      }
    }
  };
  parallel_for(op.rows, task);
}

}  // namespace

void route(const RouteOp& op) {
  const int64_t rows = at_least(1, 4096 / at_least(1, op.experts));
  auto task = [&](int64_t piece) {
    std::vector<float> scores(static_cast<size_t>(op.experts)), choice(scores);
    for (int64_t row = piece * rows; row < at_most(op.rows, (piece + 1) * rows); ++row) {
      route_row(op, row, scores, choice);
    }
  };
  parallel_for(divide_up(op.rows, rows), task);
}

void experts(const ExpertsOp& op) {
  const Order order = sorted(op);
  const auto count = static_cast<int64_t>(order.pair.size());
  const int64_t element = op.type == Type::f32 ? 4 : 2, most = op.rows;  // a token visits an expert once
  auto* gathered = static_cast<uint8_t*>(
      scratch(Scratch::partials, static_cast<size_t>(most * (op.hidden + op.inner) * element) + 64));
  uint8_t* inner = gathered + most * op.hidden * element;
  auto* found = static_cast<float*>(scratch(Scratch::chunks, static_cast<size_t>(at_least(1, count) * op.hidden) * 4));
  for (int64_t e = 0; e < op.experts; ++e) {
    const int64_t begin = order.begin[static_cast<size_t>(e)], all = order.begin[static_cast<size_t>(e) + 1] - begin;
    for (int64_t from = 0; from < all; from += most) {
      const int64_t rows = at_most(most, all - from);
      const int64_t* pairs = order.pair.data() + begin + from;
      if (op.inside) {
        for (int64_t i = 0; i < rows; ++i) {
          std::memcpy(gathered + i * op.hidden * element, row_of(op.x, pairs[i] / op.top_k, op.hidden * element),
                      static_cast<size_t>(op.hidden * element));
        }
        LinearOp up = product(op.ups[e], gathered, inner, rows, op.type);
        up.act = op.act;
        table().linear(up);
      }
      for (int64_t i = 0; i < rows && !(op.inside && op.outside); ++i) {
        uint8_t* mine = inner + i * op.inner * element;
        if (op.inside) {
          std::memcpy(static_cast<uint8_t*>(op.out) + pairs[i] * op.inner * element, mine,
                      static_cast<size_t>(op.inner * element));
        } else {
          std::memcpy(mine, row_of(op.x, pairs[i], op.inner * element), static_cast<size_t>(op.inner * element));
        }
      }
      if (op.outside) {
        LinearOp down = product(op.downs[e], inner, found + (begin + from) * op.hidden, rows, op.type);
        down.out_f32 = true;
        table().linear(down);
      }
    }
  }
  if (!op.outside) {
    for (int64_t i = 0; i < op.rows * op.top_k; ++i) {
      if (order.place[static_cast<size_t>(i)] >= 0) continue;
      std::memset(static_cast<uint8_t*>(op.out) + i * op.inner * element, 0, static_cast<size_t>(op.inner * element));
    }
    return;
  }
  if (!op.summed) {
    for (int64_t i = 0; i < op.rows * op.top_k; ++i) {
      const int64_t place = order.place[static_cast<size_t>(i)];
      float* out = static_cast<float*>(op.out) + i * op.hidden;
      if (place < 0) {
        std::memset(out, 0, static_cast<size_t>(op.hidden) * 4);
      } else {
        std::memcpy(out, found + place * op.hidden, static_cast<size_t>(op.hidden) * 4);
      }
    }
    return;
  }
  weigh(op, found, order.place.data());
}

}  // namespace tokenmill
