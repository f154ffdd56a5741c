// Mixtures of experts: routing, and experts with fp32 or integer weights.
#include <cmath>

#include "exponential.h"
#include "registry.h"
#include "weights.h"

namespace {

// The rows of a pass, grouped by their experts. A token of x [.., E] has weights and ids [.., k],
// and so k rows, one for each expert. Its result is the weighted sum of the rows' results, in the
// order of ids; an id of -1 adds nothing.
struct Routed {
  struct Run {
    int64_t expert, first, count;  // at most ROWS rows
  };
  const int32_t* ids;         // of each row
  std::vector<int64_t> rows;  // sorted by expert
  std::vector<Run> runs;
  int64_t each, tokens;  // rows per token; tokens
  const float* weights;

  Routed(const char* op, const Tensor& x, const Tensor& weights, const Tensor& chosen,
         int64_t experts)
      : ids(chosen.data<int32_t>()), each(chosen.last()), weights(weights.data<float>()) {
    std::vector<int64_t> outer(x.shape.begin(), x.shape.end() - (x.rank() > 0));
    outer.push_back(each);
    REQUIRE(x.rank() > 0 && chosen.shape == outer && each > 0 && weights.shape == outer, op,
            "rows " + x.text() + " with experts " + chosen.text());
    tokens = x.rows();
    order(op, experts);
  }
  int64_t count() const { return tokens * each; }
  // Returns the token of row i of a run.
  int64_t token(const Run& run, int64_t i) const { return rows[run.first + i] / each; }

  // Computes y [tokens, width]: weighted sums of the rows' results, + sum if there is one.
  void finish(Call& call, const float* results, const Tensor& sum, int64_t width, float* y) const {
    run_tasks(call, tokens, product(count(), width), [&](int64_t m) {
      float* to = y + m * width;
      std::fill_n(to, width, 0.0f);
      for (int64_t row = m * each; row < (m + 1) * each; row++) {
        if (ids[row] < 0) continue;
        for (int64_t c = 0; c < width; c++) to[c] += results[row * width + c] * weights[row];
      }
      for (int64_t c = 0; sum.memory && c < width; c++) to[c] += sum.data<float>()[m * width + c];
    });
  }

 private:
  void order(const char* op, int64_t experts) {
    std::vector<int64_t> ends(experts + 1);
    for (int64_t m = 0; m < count(); m++) {
      REQUIRE(ids[m] >= -1 && ids[m] < experts, op,
              "no expert " + std::to_string(ids[m]) + " of " + std::to_string(experts));
      if (ids[m] >= 0) ends[ids[m] + 1]++;
    }
    for (int64_t e = 0; e < experts; e++) {
      ends[e + 1] += ends[e];
      for (int64_t first = ends[e]; first < ends[e + 1]; first += ROWS)
        runs.push_back({e, first, min(ROWS, ends[e + 1] - first)});
    }
    rows.resize(ends[experts]);
    for (int64_t m = 0; m < count(); m++)
      if (ids[m] >= 0) rows[ends[ids[m]]++] = m;
  }
};

// Runs each row through its expert, down(silu(gate(x)) * up(x)) or with gelu, and sums a token's
// rows as Routed says; adds sum [.., E], if there is one.
//
// Weights: gates and ups [X, 2 P, ..], whose panels alternate, and downs [X, ..], whose I inputs
// fill P panels; integers have scales. An expert's weights are read once for all of its rows.
struct Experts : FloatOperator {
  static constexpr const char* name = "Experts";
  static constexpr Operand inputs[] = {FLOAT,          FLOAT, INT32,          ANY,
                                       maybe(FLOAT16), ANY,   maybe(FLOAT16), maybe(FLOAT)};
  using FloatOperator::FloatOperator;
  decltype(k.gated) gated = from.value_or<int64_t>("gelu", 0) ? k.gated_gelu : k.gated;
  float limit = from.value_or("limit", 0.0f);  // as in GatedProduct

  void compute(Call& call) const {
    Tensor x = call.input(0), ups = call.input(3), downs = call.input(5);
    Weight down = weight_of(name, downs, call.input(6, true), 1, x.last());
    int64_t inner = std::visit([](const auto& w) { return w.inputs; }, down);
    Weight both = weight_of(name, ups, call.input(4, true), 1, 2 * ceil_div(inner, PANEL) * PANEL);
    REQUIRE(both.index() == down.index(), name, "experts in two formats");
    std::visit([&](const auto& w) { run(call, x, w, std::get<std::decay_t<decltype(w)>>(down)); },
               both);
  }

 private:
  template <class W>
  void run(Call& call, const Tensor& x, const W& both, const W& down) const {
    using Input = typename W::Input;
    int64_t width = x.last(), panels = ceil_div(down.inputs, PANEL), units = panels * W::UNIT;
    REQUIRE(panels > 0 && both.inputs == width && both.matrices == down.matrices, name,
            "gates and ups do not fit downs of " + std::to_string(down.inputs) + " inputs");
    Routed routed(name, x, call.input(1), call.input(2), down.matrices);
    Tensor sum = call.input(7, true);
    REQUIRE(!sum.memory || sum.shape == x.shape, name, "the sum with " + sum.text());
    float* y = call.output(x.shape);
    Inputs<W> in(k, call, both, x.data<float>(), routed.tokens);
    int64_t rows = routed.count(), runs = static_cast<int64_t>(routed.runs.size());
    auto hidden = scratch<Input>(rows, units);
    Shares inners(panels * PANEL, W::share(panels)), outers(width, W::share(down.panels));
    int64_t work = W::work(rows, product(down.inputs, width));
    if (mtp::is_short_of_memory())
      ort::parallel(call.context, runs, [&](int64_t i) {
        both.fetch(routed.runs[i].expert);
        down.fetch(routed.runs[i].expert);
      });
    run_tasks(call, product(runs, inners.count), product(2, work), [&](int64_t t) {
      const Routed::Run& run = routed.runs[t / inners.count];
      int64_t panel = inners.first(t % inners.count), columns = inners.columns(t % inners.count);
      alignas(64) float all[ROWS][2 * WIDE * PANEL];
      const Input* from[ROWS];
      float* to[ROWS];
      for (int64_t i = 0; i < run.count; i++) {
        from[i] = in[routed.token(run, i)];
        to[i] = all[i];
      }
      both.multiply(k, run.expert, 2 * panel, 2 * columns, run.count, from, to);
      for (int64_t i = 0; i < run.count; i++) {
        Input* own = &hidden[routed.rows[run.first + i] * units + panel * W::UNIT];
        for (int64_t n = 0; n < columns; n += PANEL, own += W::UNIT) {
          float *gates = all[i] + 2 * n, *ups = gates + PANEL;
          clamp_gates(gates, ups, PANEL, limit);
          gated(gates, ups, PANEL);
          W::convert(k, gates, PANEL, own);
        }
      }
    });
    auto results = scratch<float>(rows, width);
    run_tasks(call, product(runs, outers.count), work, [&](int64_t t) {
      const Routed::Run& run = routed.runs[t / outers.count];
      int64_t panel = outers.first(t % outers.count);
      const Input* from[ROWS];
      float* to[ROWS];
      for (int64_t i = 0; i < run.count; i++) {
        int64_t row = routed.rows[run.first + i];
        from[i] = &hidden[row * units];
        to[i] = &results[row * width + panel * PANEL];
      }
      down.multiply(k, run.expert, panel, outers.columns(t % outers.count), run.count, from, to);
    });
    routed.finish(call, results.get(), sum, width, y);
  }
};

// Returns the index of the highest number that is not taken; ties go to the lowest index.
int64_t highest(const float* x, const std::vector<char>& taken) {
  int64_t best = -1, count = static_cast<int64_t>(taken.size());
  for (int64_t i = 0; i < count; i++)
    if (!taken[i] && (best < 0 || x[i] > x[best])) best = i;
  return best;
}

// logits [.., X], scales [X] -> weights and ids [.., experts]: the softmax of the highest logits,
// in falling order, ties by rising id; each is times its expert's scale. A NaN makes them NaN.
struct SoftmaxRoute : FloatOperator {
  static constexpr const char* name = "SoftmaxRoute";
  static constexpr Operand inputs[] = {FLOAT, FLOAT};
  static constexpr Operand results[] = {FLOAT, INT32};
  using FloatOperator::FloatOperator;
  int64_t experts = from.integer("experts");

  void compute(Call& call) const {
    Tensor logits = call.input(0), scales = call.input(1);
    int64_t all = logits.last();
    REQUIRE(logits.rank() > 0 && scales.is({all}) && experts > 0 && experts <= all, name,
            "logits " + logits.text() + ", scales " + scales.text());
    std::vector<int64_t> shape = logits.with_last(experts);
    float* weights = call.output(shape);
    int32_t* ids = call.output<int32_t>(shape, 1);
    int64_t rows = logits.rows();
    run_tasks(call, rows, product(rows, all, 16), [&](int64_t m) {
      const float* row = logits.data<float>() + m * all;
      std::vector<char> taken(all, 0);
      std::vector<double> shares(experts);
      double total = std::any_of(row, row + all, [](float x) { return x != x; }) ? NAN : 0.0;
      for (int64_t i = 0; i < experts; i++) {
        int64_t best = std::max<int64_t>(0, highest(row, taken));
        taken[best] = 1;
        ids[m * experts + i] = static_cast<int32_t>(best);
        total += shares[i] =
            mtp::exponential(static_cast<double>(row[best]) - row[ids[m * experts]]);
      }
      for (int64_t i = 0; i < experts; i++)
        weights[m * experts + i] =
            static_cast<float>(shares[i] / total) * scales.data<float>()[ids[m * experts + i]];
    });
  }
};

// logits [.., X], bias [X] -> weights and ids [.., experts + always]: the `experts` experts with
// the highest biased score in the kept groups, in falling order, ties by rising id; then experts
// X, X + 1, .. with weight 1. A score is a sigmoid, or sqrt(log(1 + exp(logit))) if `roots`. With a
// table [V, experts] of ids in place of the bias, the tokens [..] choose the experts. A NaN in a
// row's logits or biases makes its weights NaN.
struct Route : FloatOperator {
  static constexpr const char* name = "Route";
  static constexpr Operand inputs[] = {FLOAT, maybe(FLOAT), maybe(FLOAT), maybe(INT64)};
  static constexpr Operand results[] = {FLOAT, INT32};
  using FloatOperator::FloatOperator;
  int64_t groups = from.integer("groups"), kept = from.integer("kept");
  int64_t experts = from.integer("experts"), always = from.integer("always");
  bool normalise = from.flag("normalise"), roots = from.value_or<int64_t>("roots", 0);
  float factor = from.real("factor");

  void compute(Call& call) const {
    Tensor logits = call.input(0), bias = call.input(1, true), table = call.input(2, true);
    int64_t all = logits.last();
    Chosen by(call, table, logits, experts);
    std::vector<float> zeros(bias.memory ? 0 : all, 0.0f);
    bool fit = logits.rank() > 0 && (bias.is({all}) || by.table) && groups > 0 &&
               all % groups == 0 && kept > 0 && kept <= groups && experts > 0 && always >= 0 &&
               always <= INT32_MAX - all && experts <= all / groups * kept;
    REQUIRE(fit, name, "logits " + logits.text() + ", bias " + bias.text());
    int64_t chosen = experts + always, rows = logits.rows();
    std::vector<int64_t> shape = logits.with_last(chosen);
    float* weights = call.output(shape);
    int32_t* ids = call.output<int32_t>(shape, 1);
    run_tasks(call, rows, product(rows, all, 16), [&](int64_t m) {
      const float* row = logits.data<float>() + m * all;
      choose(row, bias.memory ? bias.data<float>() : zeros.data(), by.row(m, all), all,
             weights + m * chosen, ids + m * chosen);
    });
  }

 private:
  // The table of ids and the tokens, if there are any.
  struct Chosen {
    const float* table;
    const int64_t* tokens = nullptr;
    int64_t count, vocabulary = 0;

    Chosen(Call& call, const Tensor& given, const Tensor& logits, int64_t count)
        : table(given.data<float>()), count(count) {
      if (!table) return;
      Tensor ids = call.input(3);
      tokens = ids.data<int64_t>();
      vocabulary = given.rank() == 2 ? given.shape[0] : 0;
      REQUIRE(count > 0 && given.is({vocabulary, count}) && logits.rank() > 0 &&
                  ids.count() == logits.rows(),
              name, "a table " + given.text() + " for tokens " + ids.text());
    }
    // Returns the ids of token m, or null without a table.
    const float* row(int64_t m, int64_t all) const {
      if (!table) return nullptr;
      REQUIRE(tokens[m] >= 0 && tokens[m] < vocabulary, name,
              "no token " + std::to_string(tokens[m]) + " of " + std::to_string(vocabulary));
      const float* ids = table + tokens[m] * count;
      float most = static_cast<float>(all);
      REQUIRE(std::all_of(ids, ids + count, [&](float id) { return id >= 0.0f && id < most; }),
              name, "no expert of " + std::to_string(all) + " in the table");
      return ids;
    }
  };

  void choose(const float* logits, const float* bias, const float* own, int64_t all, float* weights,
              int32_t* ids) const {
    std::vector<float> scores(all), biased(all);
    if (!roots) k.sigmoid(logits, all, scores.data());
    for (int64_t i = 0; roots && i < all; i++)
      scores[i] = static_cast<float>(std::sqrt(mtp::softplus(logits[i])));
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
      int64_t best = own ? static_cast<int64_t>(own[i]) : highest(biased.data(), taken);
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
struct Weigh : FloatOperator {
  static constexpr const char* name = "Weigh";
  static constexpr Operand inputs[] = {FLOAT, FLOAT, INT32};
  using FloatOperator::FloatOperator;
  int64_t experts = from.integer("experts"), always = from.integer("always");

  void compute(Call& call) const {
    Tensor x = call.input(0), weights = call.input(1), ids = call.input(2);
    bool fit = x.rank() > 0 && weights.rank() == x.rank() && ids.shape == weights.shape &&
               std::equal(x.shape.begin(), x.shape.end() - 1, ids.shape.begin()) && experts > 0 &&
               always >= 0 && always <= experts && x.last() > 0 && x.last() % experts == 0;
    REQUIRE(fit, name, std::to_string(experts) + " experts' " + x.text() + ", ids " + ids.text());
    int64_t rows = x.rows(), inner = x.last() / experts, k = ids.last();
    float* y = call.output(x.shape);
    run_tasks(call, rows, product(rows, x.last()), [&](int64_t m) {
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

const Registered<Experts, SoftmaxRoute, Route, Weigh> registered;

}  // namespace
