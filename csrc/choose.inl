// A token per line of logits: the most likely one that a mask allows, or one that is drawn. The noise is the one that
// sampling/noise.py spells out; its logarithms are approximate here, and a draw that they might decide is left to others.
namespace tokenmill {
namespace TM_NS {

constexpr int64_t kRun = 256;      // logits at a time: plain loops over so many become vector code
constexpr int64_t kPiece = 8192;   // logits per task
constexpr float kNear = 1e-4f;     // far more than approximate scores are off by

struct Best {  // `second`: the best score of another token
  float top, second;
  int64_t id;
};

TM_INLINE void take(Best& best, float score, int64_t id) {
  if (score > best.top) {
    best.second = best.top;
    best.top = score;
    best.id = id;
  } else if (score > best.second) {
    best.second = score;
  }
}

// Logits [begin, begin + n) as floats, forbidden ones and those past the end as -inf; false: all are forbidden.
template <class T>
TM_INLINE bool allowed_run(const T* x, const uint32_t* mask, int64_t begin, int64_t n, float* out) {
  if (mask != nullptr) {
    uint32_t any = 0;
    for (int64_t w = 0; w < (n + 31) / 32; ++w) any |= mask[begin / 32 + w];
    if (any == 0) return false;
  }
  for (int64_t i = 0; i < kRun; i += 16) store(out + i, i < n ? load_part(x + begin + i, n - i) : zero());
  if (mask != nullptr) {
    for (int64_t w = 0; w < (n + 31) / 32; ++w) {
      const uint32_t bits = mask[begin / 32 + w];
      float* part = out + 32 * w;
      for (uint32_t j = 0; j < 32; ++j) part[j] = (bits >> j & 1u) != 0 ? part[j] : -__builtin_inff();
    }
  }
  for (int64_t i = n; i < kRun; ++i) out[i] = -__builtin_inff();
  return true;
}

TM_INLINE float run_largest(const float* x) {
  F top = load(x);
  for (int64_t i = 16; i < kRun; i += 16) top = max(load(x + i), top);
  return largest(top);
}
TM_INLINE float run_smallest(const float* x) {
  F low = load(x);
  for (int64_t i = 16; i < kRun; i += 16) low = min(load(x + i), low);
  return -largest(sub(zero(), low));
}

// Within 3e-7 of the logarithm of a positive, normal x.
TM_INLINE float log_of(float x) {
  int32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  const int32_t power = (bits - 0x3f3504f3) >> 23;
  bits -= power * (1 << 23);
  float m;
  __builtin_memcpy(&m, &bits, 4);
  const float f = m - 1.0f, n = static_cast<float>(power);
  float p = 7.0376836292e-2f;
  p = p * f - 1.1514610310e-1f;
  p = p * f + 1.1676998740e-1f;
  p = p * f - 1.2420140846e-1f;
  p = p * f + 1.4249322787e-1f;
  p = p * f - 1.6668057665e-1f;
  p = p * f + 2.0000714765e-1f;
  p = p * f - 2.4999993993e-1f;
  p = p * f + 3.3333331174e-1f;
  const float z = f * f;
  return f + (p * f * z - 0.5f * z + n * -2.12194440e-4f) + n * 0.693359375f;
}

// The noise's uniform numbers v of tokens [begin, begin + kRun), in (0, 1).
TM_INLINE void uniforms(uint32_t begin, uint32_t low, uint32_t high, float* out) {
  for (uint32_t i = 0; i < kRun; ++i) {
    uint32_t h = ((begin + i) * 0x9E3779B1u) ^ low;
    h = (h ^ (h >> 16)) * 0x7FEB352Du;
    h = ((h ^ (h >> 15)) + high) * 0x846CA68Bu;
    h ^= h >> 16;
    out[i] = (static_cast<float>(static_cast<int32_t>(h & 0x7FFFFFFFu)) + 0.5f) * 0x1.fffffep-32f;
  }
}

// scores[i] -= log(-log1p(-v[i])), to about 1e-5.
TM_INLINE void add_noise(float* scores, const float* uniform) {
  for (int64_t i = 0; i < kRun; ++i) {
    const float v = uniform[i];
    const float small = v * (1.0f + v * (0.5f + v * (1.0f / 3 + v * (0.25f + v * 0.2f))));
    const float large = -log_of(1.0f - v);
    scores[i] -= log_of(v < 0.0625f ? small : large);
  }
}

TM_INLINE uint64_t mix64(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

template <class T>
struct Chooser {
  const ChooseOp& op;

  const T* line(int64_t i) const { return static_cast<const T*>(op.x) + i * op.stride; }
  bool drawn(int64_t i) const { return op.streams != nullptr && (op.words == nullptr || op.words[i] >= kDrawn); }
  const uint32_t* mask(int64_t i) const {
    const int32_t number = op.words == nullptr ? 0 : op.words[i] & (kDrawn - 1);
    return number == 0 ? nullptr : op.masks + (number - 1) * op.mask_words;
  }

  // The largest allowed logit of a piece, and where it comes first.
  Best most_likely(int64_t i, int64_t begin, int64_t end) const {
    Best best{-__builtin_inff(), 0.0f, 0};
    alignas(64) float run[kRun];
    const uint32_t* bits = mask(i);
    for (int64_t at = begin; at < end; at += kRun) {
      if (!allowed_run(line(i), bits, at, at_most(kRun, end - at), run)) continue;
      const float top = run_largest(run);
      if (!(top > best.top)) continue;
      int64_t first = 0;
      while (run[first] != top) ++first;
      best.top = top;
      best.id = at + first;
    }
    return best;
  }

  Best draw(int64_t i, int64_t begin, int64_t end, float largest) const {
    Best best{-__builtin_inff(), -__builtin_inff(), 0};
    alignas(64) float run[kRun], noise[kRun];
    const int64_t row = op.row_ids[i], index = op.positions[i] + 1 - op.num_prompt[row * op.int_stride];
    const uint64_t key = mix64(static_cast<uint64_t>(op.streams[row * op.int_stride]) +
                               (static_cast<uint64_t>(index) + 1) * 0x9E3779B97F4A7C15u);
    const float scale = op.scales[row * op.scale_stride];
    const uint32_t* bits = mask(i);
    for (int64_t at = begin; at < end; at += kRun) {
      if (!allowed_run(line(i), bits, at, at_most(kRun, end - at), run)) continue;
      for (int64_t j = 0; j < kRun; ++j) run[j] = (run[j] - largest) * scale;
      // Of a score above s, which is at most `top` without its noise, v < -log1p(-v) < exp(top - s).
      const float room = run_largest(run) - best.second + 1e-3f;
      if (!(room > -22.5f)) continue;
      uniforms(static_cast<uint32_t>(at), static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32), noise);
      if (room < 0.0f && !(run_smallest(noise) < __builtin_expf(room))) continue;
      add_noise(run, noise);
      for (int64_t j = 0; j < kRun; ++j) take(best, run[j], at + j);
    }
    return best;
  }

  bool run() const {
    const int64_t pieces = divide_up(op.width, kPiece);
    const auto tasks = static_cast<size_t>(op.rows * pieces);
    auto* parts = static_cast<Best*>(scratch(Scratch::partials, tasks * (sizeof(Best) + sizeof(float))));
    auto* tops = reinterpret_cast<float*>(parts + op.rows * pieces);
    auto look = [&](int64_t task) {
      const int64_t i = task / pieces, begin = task % pieces * kPiece, end = at_most(begin + kPiece, op.width);
      tops[task] = largest_of(line(i) + begin, end - begin);
      parts[task] = mask(i) == nullptr && drawn(i) ? Best{tops[task], 0.0f, begin} : most_likely(i, begin, end);
    };
    parallel_for(op.rows * pieces, look);
    bool any = false;
    for (int64_t i = 0; i < op.rows; ++i) {
      const Best* mine = parts + i * pieces;
      float before = tops[i * pieces];
      Best best = mine[0];
      for (int64_t p = 1; p < pieces; ++p) {
        const float top = tops[i * pieces + p];
        if (before == before && !(top <= before)) before = top;
        if (mine[p].top > best.top) best = mine[p];
      }
      const bool good = before - before == 0.0f && best.top - best.top == 0.0f;
      op.before[i] = before;
      op.largest[i] = best.top;
      op.ids[i] = good ? best.id : 0;
      op.marked[i] = good ? best.id : ~int64_t{0};
      any |= good && drawn(i);
    }
    return !any || draws(parts, pieces);
  }

  bool draws(Best* parts, int64_t pieces) const {
    auto look = [&](int64_t task) {
      const int64_t i = task / pieces, begin = task % pieces * kPiece, end = at_most(begin + kPiece, op.width);
      if (op.marked[i] >= 0 && drawn(i)) parts[task] = draw(i, begin, end, op.largest[i]);
    };
    parallel_for(op.rows * pieces, look);
    for (int64_t i = 0; i < op.rows; ++i) {
      if (op.marked[i] < 0 || !drawn(i)) continue;
      Best best = parts[i * pieces];
      for (int64_t p = 1; p < pieces; ++p) {
        const Best& other = parts[i * pieces + p];
        take(best, other.top, other.id);
        if (other.second > best.second) best.second = other.second;
      }
      if (best.top - best.second < kNear) return false;
      op.ids[i] = op.marked[i] = best.id;
    }
    return true;
  }
};

bool choose(const ChooseOp& op) {
  return op.type == Type::f32 ? Chooser<float>{op}.run() : Chooser<bf16>{op}.run();
}

}  // namespace TM_NS
}  // namespace tokenmill
