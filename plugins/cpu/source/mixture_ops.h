// Mixtures of experts: routing, and rows through experts of either kind of weights.
#pragma once
#include "float_ops.h"

namespace {

// The rows of a pass, grouped by their experts. x [.., E] comes with ids and weights [.., k]: a
// token has k rows, and its result is the weighted sum of their results in that order; an id of -1
// adds nothing. In older engines ids are [N], and there are no weights.
struct Routed {
  static constexpr int64_t SOME = 48;  // most rows in a run
  struct Run {
    int64_t expert, first, count;
  };
  std::vector<int64_t> ids;   // of each row
  std::vector<int64_t> rows;  // sorted by expert
  std::vector<Run> runs;
  int64_t each, tokens;  // rows per token; tokens
  Tensor weights;

  Routed(const char* op, const Tensor& x, const Tensor& chosen, const Tensor& weights,
         int64_t experts)
      : each(weights.memory ? chosen.last() : 1), weights(weights) {
    bool one = !weights.memory && x.rank() == 2;
    std::vector<int64_t> outer(x.shape.begin(), x.shape.end() - (x.rank() > 0));
    if (!one) outer.push_back(each);
    bool fit = x.rank() > 0 && chosen.shape == outer && each > 0 &&
               (one || weights.shape == chosen.shape) &&
               (chosen.type == ort::INT64 || chosen.type == ort::INT32);
    NEED(fit, op, "rows " + x.text() + " with experts " + chosen.text());
    tokens = x.count(0, x.rank() - 1);
    ids.resize(tokens * each);
    for (size_t m = 0; m < ids.size(); m++)
      ids[m] = chosen.type == ort::INT64 ? chosen.data<int64_t>()[m] : chosen.data<int32_t>()[m];
    order(op, experts);
  }
  int64_t count() const { return static_cast<int64_t>(ids.size()); }
  // Returns the token of row i of a run.
  int64_t token(const Run& run, int64_t i) const { return rows[run.first + i] / each; }

  // Computes y [tokens, width]: weighted sums of the rows' results `made`, + sum if there is one.
  void finish(Call& call, const float* made, const Tensor& sum, int64_t width, float* y) const {
    tasks(call, tokens, product(count(), width), [&](int64_t m) {
      float* to = y + m * width;
      std::fill_n(to, width, 0.0f);
      for (int64_t row = m * each; row < (m + 1) * each; row++) {
        if (ids[row] < 0) continue;
        float weight = weights.data<float>()[row];
        for (int64_t c = 0; c < width; c++) to[c] += made[row * width + c] * weight;
      }
      for (int64_t c = 0; sum.memory && c < width; c++) to[c] += sum.data<float>()[m * width + c];
    });
  }

 private:
  void order(const char* op, int64_t experts) {
    std::vector<int64_t> ends(experts + 1);
    int64_t least = weights.memory ? -1 : 0;
    for (int64_t id : ids) {
      NEED(id >= least && id < experts, op,
           "no expert " + std::to_string(id) + " of " + std::to_string(experts));
      if (id >= 0) ends[id + 1]++;
    }
    for (int64_t e = 0; e < experts; e++) {
      ends[e + 1] += ends[e];
      for (int64_t first = ends[e]; first < ends[e + 1]; first += SOME)
        runs.push_back({e, first, min(SOME, ends[e + 1] - first)});
    }
    rows.resize(ends[experts]);
    for (int64_t m = 0; m < count(); m++)
      if (ids[m] >= 0) rows[ends[ids[m]]++] = m;
  }
};

// Rows through experts: down(silu(gate(x)) * up(x)), see Routed; + sum [.., E], if there is one.
//
// Panels of gates and ups alternate. An expert's weights are read once for all of its rows.
struct Experts : Usual {
  static constexpr const char* name = "Experts";
  static constexpr ort::Type inputs[] = {ort::FLOAT, ort::ANY,     ort::UINT8, ort::FLOAT16,
                                         ort::UINT8, ort::FLOAT16, ort::FLOAT, ort::FLOAT};
  static constexpr unsigned optional = 1 << 6 | 1 << 7;
  static constexpr int64_t SOME = Routed::SOME;
  const Kernels& k;

  Experts(const Kernels& k, const Attributes&) : k(k) {}

  void compute(Call& call) const {
    Tensor x = call.input(0), downs = call.input(4);
    Tensor sum = call.input(7, true);
    int64_t width = x.last();
    int64_t inner = downs.rank() == 4 ? downs.shape[2] * BLOCK : 0;
    Weight both(name, call.input(2), call.input(3), 4, 2 * inner);
    Weight down(name, downs, call.input(5), 4, width);
    NEED(both.inputs() == width && both.matrices == down.matrices && both.panels % 2 == 0, name,
         "gates and ups do not fit " + downs.text());
    Routed routed(name, x, call.input(1), call.input(6, true), down.matrices);
    NEED(!sum.memory || (routed.weights.memory && sum.shape == x.shape), name,
         "the sum with " + sum.text());
    float* y = call.output(x.shape);
    auto in = rounded(k, call, x.data<float>(), routed.tokens, both.blocks);
    int64_t rows = routed.count(), panels = inner / PANEL;
    int64_t runs = static_cast<int64_t>(routed.runs.size());
    auto hidden = scratch<InputBlock>(rows, down.blocks);
    tasks(call, product(runs, panels), product(rows, 2, inner, width) / INTEGERS, [&](int64_t t) {
      gate_and_up(both, routed, routed.runs[t / panels], t % panels, in.get(), hidden.get(),
                  down.blocks);
    });
    auto made = scratch<float>(routed.weights.memory ? rows : 0, width);
    float* results = routed.weights.memory ? made.get() : y;
    tasks(call, product(runs, down.panels), product(rows, inner, width) / INTEGERS, [&](int64_t t) {
      const Routed::Run& run = routed.runs[t / down.panels];
      int64_t p = t % down.panels, columns = min(PANEL, width - p * PANEL);
      const InputBlock* from[SOME];
      float* to[SOME];
      for (int64_t i = 0; i < run.count; i++) {
        int64_t row = routed.rows[run.first + i];
        from[i] = &hidden[row * down.blocks];
        to[i] = results + row * width + p * PANEL;
      }
      multiply(k, down, down.panel(run.expert, p), columns, run.count, from, to);
    });
    if (routed.weights.memory) routed.finish(call, results, sum, width, y);
  }

 private:
  void gate_and_up(const Weight& both, const Routed& routed, const Routed::Run& run, int64_t p,
                   const InputBlock* in, InputBlock* hidden, int64_t blocks) const {
    alignas(64) float gates[SOME][PANEL], ups[SOME][PANEL];
    const InputBlock* from[SOME];
    float *gate[SOME], *up[SOME];
    for (int64_t i = 0; i < run.count; i++) {
      from[i] = in + routed.token(run, i) * both.blocks;
      gate[i] = gates[i];
      up[i] = ups[i];
    }
    multiply(k, both, both.panel(run.expert, 2 * p), PANEL, run.count, from, gate);
    multiply(k, both, both.panel(run.expert, 2 * p + 1), PANEL, run.count, from, up);
    for (int64_t i = 0; i < run.count; i++) {
      k.gated(gates[i], ups[i], PANEL);
      k.quantise(gates[i], 1, hidden + routed.rows[run.first + i] * blocks + p);
    }
  }
};

// Rows through experts: down(silu(gate(x)) * up(x)), see Routed; + sum [.., E], if there is one.
//
// gates and ups [X, 2 P, E, 32], whose panels alternate; downs [X, panels, I, 32], where I outputs
// fill P panels. An expert's weights are read once for all of its rows.
struct FloatExperts : Usual {
  static constexpr const char* name = "FloatExperts";
  static constexpr ort::Type inputs[] = {ort::FLOAT, ort::ANY,   ort::FLOAT,
                                         ort::FLOAT, ort::FLOAT, ort::FLOAT};
  static constexpr unsigned optional = 1 << 4 | 1 << 5;
  const Kernels& k;

  FloatExperts(const Kernels& k, const Attributes&) : k(k) {}

  void compute(Call& call) const {
    Tensor x = call.input(0), ups = call.input(2), downs = call.input(3);
    Tensor sum = call.input(5, true);
    int64_t width = x.last(), inner = downs.rank() == 4 ? downs.shape[2] : 0;
    int64_t panels = up(inner, PANEL);
    NEED(panels > 0, name, "downs are " + downs.text());
    FloatWeight both(name, ups, 1, 2 * panels * PANEL), down(name, downs, 1, width);
    NEED(both.inputs == width && both.matrices == down.matrices, name,
         "gates and ups " + ups.text() + " do not fit " + downs.text());
    Routed routed(name, x, call.input(1), call.input(4, true), down.matrices);
    NEED(!sum.memory || (routed.weights.memory && sum.shape == x.shape), name,
         "the sum with " + sum.text());
    float* y = call.output(x.shape);
    int64_t rows = routed.count(), runs = static_cast<int64_t>(routed.runs.size());
    auto hidden = scratch<float>(rows, panels, PANEL);
    Shares inners(panels), outers(down.panels());
    tasks(call, product(runs, inners.count), product(rows, 2, inner, width), [&](int64_t t) {
      const Routed::Run& run = routed.runs[t / inners.count];
      int64_t share = t % inners.count, panel = inners.first(share);
      int64_t columns = inners.columns(share, panels * PANEL);
      alignas(64) float all[ROWS][2 * WIDE * PANEL];
      const float* from[ROWS];
      float* to[ROWS];
      for (int64_t i = 0; i < run.count; i++) {
        from[i] = x.data<float>() + routed.token(run, i) * width;
        to[i] = all[i];
      }
      k.floats(both.from(run.expert, 2 * panel), 2 * columns, run.count, from, to);
      for (int64_t i = 0; i < run.count; i++) {
        float* own = &hidden[(routed.rows[run.first + i] * panels + panel) * PANEL];
        for (int64_t n = 0; n < columns; n += PANEL) {
          std::memcpy(own + n, all[i] + 2 * n, PANEL * sizeof(float));
          k.gated(own + n, all[i] + 2 * n + PANEL, PANEL);
        }
      }
    });
    auto made = scratch<float>(routed.weights.memory ? rows : 0, width);
    float* results = routed.weights.memory ? made.get() : y;
    tasks(call, product(runs, outers.count), product(rows, inner, width), [&](int64_t t) {
      const Routed::Run& run = routed.runs[t / outers.count];
      int64_t share = t % outers.count, panel = outers.first(share);
      const float* from[ROWS];
      float* to[ROWS];
      for (int64_t i = 0; i < run.count; i++) {
        int64_t row = routed.rows[run.first + i];
        from[i] = &hidden[row * panels * PANEL];
        to[i] = results + row * width + panel * PANEL;
      }
      int64_t columns = outers.columns(share, width);
      k.floats(down.from(run.expert, panel), columns, run.count, from, to);
    });
    if (routed.weights.memory) routed.finish(call, results, sum, width, y);
  }
};

// logits [.., X], bias [X] -> weights and ids [.., experts + always]: the `experts` experts with
// the highest biased sigmoid in the kept groups, in falling order, ties by rising id; then experts
// X, X + 1, .. with weight 1. A NaN in a row's logits or biases makes its weights NaN.
struct Route : Usual {
  static constexpr const char* name = "Route";
  static constexpr ort::Type inputs[] = {ort::FLOAT, ort::FLOAT};
  static constexpr ort::Type results[] = {ort::FLOAT, ort::INT32};
  const Kernels& k;
  int64_t groups, kept, experts, always;
  bool normalise;
  float factor;

  Route(const Kernels& k, const Attributes& from)
      : k(k),
        groups(from.integer("groups")),
        kept(from.integer("kept")),
        experts(from.integer("experts")),
        always(from.integer("always")),
        normalise(from.integer("normalise") != 0),
        factor(from.real("factor")) {}

  void compute(Call& call) const {
    Tensor logits = call.input(0), bias = call.input(1);
    int64_t all = logits.last();
    bool fit = logits.rank() > 0 && bias.shape == std::vector<int64_t>{all} && groups > 0 &&
               all % groups == 0 && kept > 0 && kept <= groups && experts > 0 && always >= 0 &&
               always <= INT32_MAX - all && experts <= all / groups * kept;
    NEED(fit, name, "logits " + logits.text() + ", bias " + bias.text());
    int64_t chosen = experts + always, rows = logits.count(0, logits.rank() - 1);
    std::vector<int64_t> shape = logits.shape;
    shape.back() = chosen;
    float* weights = call.output(shape);
    int32_t* ids = call.output<int32_t>(shape, 1);
    tasks(call, rows, product(rows, all, 16), [&](int64_t m) {
      const float* row = logits.data<float>() + m * all;
      choose(row, bias.data<float>(), all, weights + m * chosen, ids + m * chosen);
    });
  }

 private:
  // Returns the index of the highest number that is not taken; ties go to the lowest index.
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
    bool ordered = true;
    for (int64_t i = 0; i < all; i++) {
      biased[i] = scores[i] + bias[i];
      ordered = ordered && biased[i] == biased[i];
    }
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
      weights[i] =
          !ordered ? NAN : (normalise ? weights[i] / (total + 1e-20f) : weights[i]) * factor;
    for (int64_t i = 0; i < always; i++) {
      ids[experts + i] = static_cast<int32_t>(all + i);
      weights[experts + i] = 1.0f;
    }
  }
};

// x [.., X * I] of X experts, weights and ids [.., k] -> each expert's I numbers times its weight:
// 0 if it is not chosen, 1 if it is one of the last `always` experts.
struct Weigh : Usual {
  static constexpr const char* name = "Weigh";
  static constexpr ort::Type inputs[] = {ort::FLOAT, ort::FLOAT, ort::INT32};
  int64_t experts, always;

  Weigh(const Kernels&, const Attributes& from)
      : experts(from.integer("experts")), always(from.integer("always")) {}

  void compute(Call& call) const {
    Tensor x = call.input(0), weights = call.input(1), ids = call.input(2);
    bool fit = x.rank() > 0 && weights.rank() == x.rank() && ids.shape == weights.shape &&
               std::equal(x.shape.begin(), x.shape.end() - 1, ids.shape.begin()) && experts > 0 &&
               always >= 0 && always <= experts && x.last() > 0 && x.last() % experts == 0;
    NEED(fit, name, std::to_string(experts) + " experts' " + x.text() + ", ids " + ids.text());
    int64_t rows = x.count(0, x.rank() - 1), inner = x.last() / experts, k = ids.last();
    float* y = call.output(x.shape);
    tasks(call, rows, product(rows, x.last()), [&](int64_t m) {
      std::vector<float> every(experts, 0.0f);
      std::fill(every.end() - always, every.end(), 1.0f);
      for (int64_t i = m * k; i < (m + 1) * k; i++) {
        int64_t id = ids.data<int32_t>()[i];
        if (id >= 0 && id < experts - always) every[id] = weights.data<float>()[i];
      }
      const float* from = x.data<float>() + m * x.last();
      for (int64_t i = 0; i < x.last(); i++) y[m * x.last() + i] = from[i] * every[i / inner];
    });
  }
};

}  // namespace
