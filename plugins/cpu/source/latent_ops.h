// What latent attention does around its products, and routing and acceptance: operators that take
// the place of many small ones. A part of ops.cpp, whose helpers it uses.
#pragma once
#include "logarithm.h"

namespace {

// Rotate the pairs of x [2 * half]; `interleaved`: they are neighbours, else `half` apart.
void rotate(const float* x, const float* cos, const float* sin, int64_t half, bool interleaved,
            float* y) {
  int64_t step = interleaved ? 2 : 1, apart = interleaved ? 1 : half;
  for (int64_t i = 0; i < half; i++) {
    float a = x[i * step], b = x[i * step + apart];
    y[i * step] = a * cos[i] - b * sin[i];
    y[i * step + apart] = b * cos[i] + a * sin[i];
  }
}

// cos and sin [B, T, half]
struct Angles {
  Tensor cos, sin;
  int64_t half;

  Angles(const char* op, const Tensor& c, const Tensor& s, int64_t slots, int64_t tokens)
      : cos(c), sin(s), half(c.last()) {
    std::vector<int64_t> shape{slots, tokens, half};
    NEED(c.shape == shape && s.shape == shape && half <= MOST, op,
         "angles " + c.text() + ", " + s.text() + " of " + std::to_string(tokens) + " tokens");
  }
  void rotate_row(int64_t row, const float* x, bool interleaved, float* y) const {
    rotate(x, cos.data<float>() + row * half, sin.data<float>() + row * half, half, interleaved, y);
  }
};

// a [B, T, Q + latent + R] -> query input [B, T, Q], normed if there is a norm [Q] for it; cache
// rows [B, 1, T, latent + R]: the latent, normed, and the rotated key. If there is a cache
// [B, 1, S, latent + R], it is the third result, with these rows from row start [B] on; it is
// written in place if it is bound so.
struct LatentRows : Usual {
  static constexpr const char* name = "LatentRows";
  static constexpr ort::Type inputs[] = {ort::FLOAT, ort::FLOAT, ort::FLOAT, ort::FLOAT,
                                         ort::FLOAT, ort::FLOAT, ort::INT64};
  static constexpr ort::Type results[] = {ort::FLOAT, ort::FLOAT, ort::FLOAT};
  static constexpr unsigned optional = 1 << 4 | 1 << 5 | 1 << 6, optional_results = 1 << 2;
  const Kernels& k;
  float epsilon;
  bool interleaved;

  LatentRows(const Kernels& k, const ort::Info* info)
      : k(k),
        epsilon(ort::float_attribute(info, "epsilon")),
        interleaved(attribute(info, "interleaved") != 0) {}

  void compute(ort::Context* context) const {
    Tensor a = ort::input(context, 0), weight = ort::input(context, 1);
    Tensor q_weight = ort::input(context, 4, true);
    NEED(a.rank() == 3 && weight.rank() == 1, name, a.text() + ", norm " + weight.text());
    int64_t slots = a.shape[0], tokens = a.shape[1], rows = slots * tokens;
    Angles angles(name, ort::input(context, 2), ort::input(context, 3), slots, tokens);
    int64_t latent = weight.shape[0], rotary = 2 * angles.half, width = latent + rotary;
    int64_t queries = a.shape[2] - width;
    NEED(queries >= 0 && (!q_weight.memory || q_weight.shape == std::vector<int64_t>{queries}),
         name, a.text() + ", norms " + weight.text() + ", " + q_weight.text());
    float* q = ort::output<float>(context, {slots, tokens, queries});
    float* fresh = ort::output<float>(context, {slots, 1, tokens, width}, 1);
    tasks(context, rows, 8 * rows * a.shape[2], [&](int64_t m) {
      const float* row = a.data<float>() + m * a.shape[2];
      if (q_weight.memory)
        k.norm(row, q_weight.data<float>(), queries, epsilon, q + m * queries);
      else
        std::memcpy(q + m * queries, row, queries * sizeof(float));
      float* own = fresh + m * width;
      k.norm(row + queries, weight.data<float>(), latent, epsilon, own);
      angles.rotate_row(m, row + queries + latent, interleaved, own + latent);
    });
    Tensor cache = ort::input(context, 5, true);
    if (cache.memory) write(context, cache, fresh, slots, tokens, width);
  }

 private:
  static void write(ort::Context* context, const Tensor& cache, const float* fresh, int64_t slots,
                    int64_t tokens, int64_t width) {
    Tensor start = ort::input(context, 6);
    NEED(cache.rank() == 4 && cache.shape[0] == slots && cache.shape[1] == 1 &&
             cache.shape[3] == width && start.shape == std::vector<int64_t>{slots},
         name, "rows of " + std::to_string(width) + " numbers into " + cache.text());
    float* held = ort::output<float>(context, cache.shape, 2);
    if (held != cache.memory) std::memcpy(held, cache.memory, cache.count(0, 4) * sizeof(float));
    for (int64_t slot = 0; slot < slots; slot++) {
      int64_t at = start.data<int64_t>()[slot], rows = cache.shape[2];
      NEED(at >= 0 && tokens <= rows && at <= rows - tokens, name,
           std::to_string(tokens) + " rows from " + std::to_string(at) + " on in a cache of " +
               std::to_string(rows));
      std::memcpy(held + (slot * rows + at) * width, fresh + slot * tokens * width,
                  tokens * width * sizeof(float));
    }
  }
};

// A matrix for each head, packed: fp32 [H, panels, K, 32], or integers with scales.
struct Heads {
  std::unique_ptr<FloatWeight> floats;
  std::unique_ptr<Weight> integers;
  int64_t count, inputs, outputs;

  Heads(const char* op, const Tensor& values, const Tensor& scales, int64_t outputs)
      : outputs(outputs) {
    if (values.type == ort::FLOAT) {
      NEED(!scales.memory, op, "scales of fp32");
      floats = std::make_unique<FloatWeight>(op, values, 1, outputs);
      count = floats->matrices, inputs = floats->inputs;
    } else {
      NEED(values.type == ort::UINT8 && scales.memory, op, "no packed weight");
      integers = std::make_unique<Weight>(op, values, scales, 4, outputs);
      count = integers->matrices, inputs = integers->inputs();
    }
  }
  // Some rows, at most ROWS, times a head's matrix.
  void multiply(const Kernels& k, int64_t head, int64_t rows, const float* const* from,
                float* const* to) const {
    if (floats) return k.floats(floats->from(head, 0), outputs, rows, from, to);
    int64_t blocks = integers->blocks;
    auto memory = scratch<InputBlock>(rows * blocks);
    const InputBlock* in[ROWS];
    float* out[ROWS];
    for (int64_t i = 0; i < rows; i++) {
      k.quantise(from[i], blocks, &memory[i * blocks]);
      in[i] = &memory[i * blocks];
    }
    for (int64_t p = 0; p < integers->panels; p++) {
      for (int64_t i = 0; i < rows; i++) out[i] = to[i] + p * PANEL;
      ::multiply(k, *integers, integers->panel(head, p), min(PANEL, outputs - p * PANEL), rows, in,
                 out);
    }
  }
};

// Latent attention between its products: q [B, T, H * n + H * R], all heads' numbers without a
// position, then all heads' rotary ones; w_uk makes n numbers of a head into `latent`; what
// Attention mixes goes through w_uv -> [B, T, H * N].
struct LatentAttention : Usual {
  static constexpr const char* name = "LatentAttention";
  static constexpr ort::Type inputs[] = {ort::FLOAT, ort::ANY,     ort::ANY,    ort::FLOAT,
                                         ort::FLOAT, ort::FLOAT,   ort::FLOAT,  ort::INT64,
                                         ort::INT64, ort::FLOAT16, ort::FLOAT16};
  static constexpr unsigned optional = 1 << 9 | 1 << 10;
  const Kernels& k;
  Attention attention;
  int64_t latent, outputs;
  bool interleaved;

  LatentAttention(const Kernels& k, const ort::Info* info)
      : k(k),
        attention(k, info),
        latent(attribute(info, "latent")),
        outputs(attribute(info, "N")),
        interleaved(attribute(info, "interleaved") != 0) {}

  void compute(ort::Context* context) const {
    Tensor q = ort::input(context, 0);
    Heads uk(name, ort::input(context, 1), ort::input(context, 9, true), latent);
    Heads uv(name, ort::input(context, 2), ort::input(context, 10, true), outputs);
    NEED(q.rank() == 3 && uk.count == uv.count && uv.inputs == latent, name,
         "queries " + q.text() + " of " + std::to_string(uk.count) + " heads");
    int64_t slots = q.shape[0], tokens = q.shape[1], heads = uk.count, rows = slots * tokens;
    Angles angles(name, ort::input(context, 3), ort::input(context, 4), slots, tokens);
    int64_t nope = heads * uk.inputs, rotary = 2 * angles.half, width = latent + rotary;
    NEED(q.shape[2] == nope + heads * rotary, name,
         "queries " + q.text() + " of " + std::to_string(heads) + " heads");
    Tensor cache = ort::input(context, 5), fresh = ort::input(context, 6);
    Tensor base = ort::input(context, 7), first = ort::input(context, 8);
    float* y = ort::output<float>(context, {slots, tokens, heads * outputs});

    Tensor queries{{slots, heads, tokens, width}, nullptr, ort::FLOAT};
    auto memory = scratch<float>(heads * rows * width);
    queries.memory = memory.get();
    int64_t pieces = up(tokens, ROWS);
    // Some tokens of a head: row i lies at place(i) of what is by heads, at row(i) of the others.
    auto by_head = [&](int64_t work, auto&& task) {
      tasks(context, slots * heads * pieces, work, [&](int64_t t) {
        int64_t slot = t / pieces / heads, head = t / pieces % heads, begin = t % pieces * ROWS;
        int64_t some = min(ROWS, tokens - begin);
        task(head, some, slot * tokens + begin, (slot * heads + head) * tokens + begin);
      });
    };
    by_head(rows * nope * latent, [&](int64_t head, int64_t some, int64_t row, int64_t place) {
      const float* from[ROWS];
      float* to[ROWS];
      for (int64_t i = 0; i < some; i++) {
        const float* own = q.data<float>() + (row + i) * q.shape[2];
        from[i] = own + head * uk.inputs;
        to[i] = &memory[(place + i) * width];
        angles.rotate_row(row + i, own + nope + head * rotary, interleaved, to[i] + latent);
      }
      uk.multiply(k, head, some, from, to);
    });
    auto mixed = scratch<float>(heads * rows * latent);
    attention.attend(context, queries, cache, fresh, base, first, mixed.get());
    by_head(rows * heads * latent * outputs,
            [&](int64_t head, int64_t some, int64_t row, int64_t place) {
              const float* from[ROWS];
              float* to[ROWS];
              for (int64_t i = 0; i < some; i++) {
                from[i] = &mixed[(place + i) * latent];
                to[i] = y + ((row + i) * heads + head) * outputs;
              }
              uv.multiply(k, head, some, from, to);
            });
  }
};

// logits [.., X], bias [X] -> weights and ids [.., experts + always]: `experts` of the highest
// biased sigmoid among the kept groups, in that order, the lower id first where they tie; then
// experts X, X + 1, .. with weight 1.
struct Route : Usual {
  static constexpr const char* name = "Route";
  static constexpr ort::Type inputs[] = {ort::FLOAT, ort::FLOAT};
  static constexpr ort::Type results[] = {ort::FLOAT, ort::INT32};
  const Kernels& k;
  int64_t groups, kept, experts, always;
  bool normalise;
  float factor;

  Route(const Kernels& k, const ort::Info* info)
      : k(k),
        groups(attribute(info, "groups")),
        kept(attribute(info, "kept")),
        experts(attribute(info, "experts")),
        always(attribute(info, "always")),
        normalise(attribute(info, "normalise") != 0),
        factor(ort::float_attribute(info, "factor")) {}

  void compute(ort::Context* context) const {
    Tensor logits = ort::input(context, 0), bias = ort::input(context, 1);
    int64_t all = logits.last();
    bool fit = logits.rank() > 0 && bias.shape == std::vector<int64_t>{all} && groups > 0 &&
               all % groups == 0 && kept > 0 && kept <= groups && experts > 0 && always >= 0 &&
               always <= MOST && experts <= all / groups * kept;
    NEED(fit, name, "logits " + logits.text() + ", bias " + bias.text());
    int64_t chosen = experts + always, rows = logits.count(0, logits.rank() - 1);
    std::vector<int64_t> shape = logits.shape;
    shape.back() = chosen;
    float* weights = ort::output<float>(context, shape);
    int32_t* ids = ort::output<int32_t>(context, shape, 1);
    tasks(context, rows, rows * all * 16, [&](int64_t m) {
      const float* row = logits.data<float>() + m * all;
      choose(row, bias.data<float>(), all, weights + m * chosen, ids + m * chosen);
    });
  }

 private:
  // The highest number that is not taken, the first of equal ones.
  static int64_t highest(const float* x, const std::vector<char>& taken) {
    int64_t best = -1, count = static_cast<int64_t>(taken.size());
    for (int64_t i = 0; i < count; i++)
      if (!taken[i] && (best < 0 || x[i] > x[best])) best = i;
    return best;
  }

  void choose(const float* logits, const float* bias, int64_t all, float* weights,
              int32_t* ids) const {
    std::vector<float> scores(all), biased(all);
    k.sigmoid(logits, all, scores.data());
    for (int64_t i = 0; i < all; i++) biased[i] = scores[i] + bias[i];
    std::vector<char> taken(all, kept < groups);
    if (kept < groups) {
      int64_t size = all / groups;
      std::vector<float> sums(groups);
      for (int64_t g = 0; g < groups; g++) {
        std::vector<char> own(all, 1);
        std::fill_n(own.begin() + g * size, size, 0);
        for (int64_t i = 0; i < min<int64_t>(2, size); i++) {
          int64_t best = highest(biased.data(), own);
          own[best] = 1;
          sums[g] += biased[best];
        }
      }
      std::vector<char> used(groups, 0);
      for (int64_t i = 0; i < kept; i++) {
        int64_t best = highest(sums.data(), used);
        used[best] = 1;
        std::fill_n(taken.begin() + best * size, size, 0);
      }
    }
    float total = 0.0f;
    for (int64_t i = 0; i < experts; i++) {
      int64_t best = highest(biased.data(), taken);
      taken[best] = 1;
      ids[i] = static_cast<int32_t>(best);
      total += weights[i] = scores[best];
    }
    for (int64_t i = 0; i < experts; i++)
      weights[i] = (normalise ? weights[i] / (total + 1e-20f) : weights[i]) * factor;
    for (int64_t i = 0; i < always; i++) {
      ids[experts + i] = static_cast<int32_t>(all + i);
      weights[experts + i] = 1.0f;
    }
  }
};

// Strict greedy acceptance, as `plugins/accept_rewind/op.py` says: logits [B, T, V], window [B, T],
// num_drafts, lengths and active [B] -> tokens [B, T], how many count, new lengths,
// log-probabilities and margins [B, T].
struct Accept : Usual {
  static constexpr const char* name = "Accept";
  static constexpr ort::Type inputs[] = {ort::FLOAT, ort::INT64, ort::INT64, ort::INT64, ort::BOOL};
  static constexpr ort::Type results[] = {ort::INT64, ort::INT64, ort::INT64, ort::FLOAT,
                                          ort::FLOAT};
  const Kernels& k;

  Accept(const Kernels& k, const ort::Info*) : k(k) {}

  void compute(ort::Context* context) const {
    Tensor logits = ort::input(context, 0), window = ort::input(context, 1);
    Tensor drafts = ort::input(context, 2), lengths = ort::input(context, 3);
    Tensor active = ort::input(context, 4);
    std::vector<int64_t> slots{logits.rank() == 3 ? logits.shape[0] : -1};
    NEED(logits.rank() == 3 && window.rank() == 2 && window.shape[0] == slots[0] &&
             window.shape[1] == logits.shape[1] && window.shape[1] > 0 && logits.shape[2] > 1 &&
             drafts.shape == slots && lengths.shape == slots && active.shape == slots,
         name, "logits " + logits.text() + " of a window " + window.text());
    int64_t T = window.shape[1], rows = slots[0] * T, V = logits.shape[2];
    int64_t* tokens = ort::output<int64_t>(context, window.shape);
    int64_t* counts = ort::output<int64_t>(context, slots, 1);
    int64_t* ends = ort::output<int64_t>(context, slots, 2);
    float* logprobs = ort::output<float>(context, window.shape, 3);
    float* margins = ort::output<float>(context, window.shape, 4);
    tasks(context, rows, rows * V * 8, [&](int64_t m) {
      mtp::Best best = k.best(logits.data<float>() + m * V, V);
      tokens[m] = best.id;
      logprobs[m] = 0.0f - mtp::logarithm(best.total);  // as LogSoftmax has it
      margins[m] = best.top - best.second;
    });
    for (int64_t slot = 0; slot < slots[0]; slot++) {
      const int64_t* drafted = window.data<int64_t>() + slot * T + 1;
      int64_t* own = tokens + slot * T;
      int64_t most = min(T - 1, drafts.data<int64_t>()[slot]), n = 0;
      if (active.data<uint8_t>()[slot])
        for (n = 1; n <= most && drafted[n - 1] == own[n - 1];) n++;
      for (int64_t i = n; i < T; i++) own[i] = -1;
      counts[slot] = n;
      ends[slot] = lengths.data<int64_t>()[slot] + n;
    }
  }
};

// x [.., V] -> x - log(sum(exp(x))), the sum as Accept adds it up.
struct LogSoftmax : Usual {
  static constexpr const char* name = "LogSoftmax";
  static constexpr ort::Type inputs[] = {ort::FLOAT};
  const Kernels& k;

  LogSoftmax(const Kernels& k, const ort::Info*) : k(k) {}

  void compute(ort::Context* context) const {
    Tensor x = ort::input(context, 0);
    NEED(x.rank() > 0 && x.last() > 0, name, "rows " + x.text());
    int64_t rows = x.count(0, x.rank() - 1), V = x.last();
    float* y = ort::output(context, x.shape);
    tasks(context, rows, rows * V * 8, [&](int64_t m) {
      const float* row = x.data<float>() + m * V;
      mtp::Best best = k.best(row, V);
      float log = mtp::logarithm(best.total);
      for (int64_t i = 0; i < V; i++) y[m * V + i] = (row[i] - best.top) - log;
    });
  }
};

}  // namespace
