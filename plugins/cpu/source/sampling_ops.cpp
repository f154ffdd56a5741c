// Operators of sampling: a row's distribution as its request shapes it, and a token drawn from it.
#include "registry.h"

namespace {

// As defined in `plugins/shaped_probs/op.py`: logits [B, T, V], and temperature, top_k, top_p and
// min_p [B] -> probabilities.
struct ShapedProbs : FloatOperator {
  static constexpr const char* name = "ShapedProbs";
  static constexpr Operand inputs[] = {FLOAT, FLOAT, INT64, FLOAT, FLOAT};
  using FloatOperator::FloatOperator;

  void compute(Call& call) const {
    Tensor logits = call.input(0), temperature = call.input(1), top_k = call.input(2);
    Tensor top_p = call.input(3), min_p = call.input(4);
    REQUIRE(logits.rank() == 3 && logits.last() > 0, name, "logits " + logits.text());
    std::vector<int64_t> slots{logits.shape[0]};
    REQUIRE(temperature.shape == slots && top_k.shape == slots && top_p.shape == slots &&
                min_p.shape == slots,
            name, "settings " + temperature.text() + " of logits " + logits.text());
    int64_t T = logits.shape[1], V = logits.last(), rows = product(slots[0], T);
    float* probs = call.output(logits.shape);
    run_tasks(call, rows, product(16, rows, V), [&](int64_t m) {
      int64_t slot = m / T;
      const float* row = logits.data<float>() + m * V;
      float *p = probs + m * V, t = temperature.data<float>()[slot], least = 0.0f;
      bool sampled = t > 0.0f;
      k.weigh(row, V, k.best(row, V, false).top, sampled ? t : 1.0f, p);
      if (sampled)
        least = least_kept(p, V, top_k.data<int64_t>()[slot], top_p.data<float>()[slot],
                           min_p.data<float>()[slot]);
      if (least > 0.0f)
        for (int64_t i = 0; i < V; i++) p[i] = p[i] < least ? 0.0f : p[i];  // a NaN stays
      float total = sum_of(p, V);
      for (int64_t i = 0; i < V; i++) p[i] /= total;
    });
  }

 private:
  // Returns the smallest of a row's weights that its filters keep; the largest weight is 1.
  static float least_kept(const float* weights, int64_t size, int64_t top_k, float top_p,
                          float min_p) {
    bool counts = top_k > 0 && top_k < size, sums = top_p < 1.0f;
    float floor = std::max(min_p, 0.0f), total = sum_of(weights, size), seen = 0.0f;
    if (!counts && !sums) return floor;
    // All weights that are left out here are together less than half of what top-p may drop.
    float tiny = counts ? 0.0f : 0.5f * (1.0f - top_p) * total / static_cast<float>(size);
    auto heap = scratch<float>(size);
    float* begin = heap.get();
    float* end = std::copy_if(weights, weights + size, begin, [&](float w) { return w > tiny; });
    // Weights from `rest` on are sorted, the largest last; those before it are a heap.
    float* rest = end;
    auto sort_next = [&] { std::pop_heap(begin, rest--); };
    std::make_heap(begin, rest);
    if (counts) {
      while (rest > begin && (end - rest < top_k || *begin == *rest)) sort_next();
      if (rest < end) floor = std::max(floor, *rest);
      total = 0.0f;
      for (float* at = end; at > rest;) total += *--at;
    }
    if (sums) {
      float* at = end;
      do {
        if (at == rest && !counts && rest > begin) sort_next();
        if (at == rest) break;
        seen += *--at;
      } while (seen < top_p * total);
      if (at < end) floor = std::max(floor, *at);
    }
    return floor;
  }
};

// As defined in `plugins/draw/op.py`: weights [.., V] and uniform [..] -> token and margin. The sum
// up to a token begins with those of the stretches before its own, so that a row is read fast.
struct Draw : FloatOperator {
  static constexpr const char* name = "Draw";
  static constexpr Operand inputs[] = {FLOAT, FLOAT};
  static constexpr Operand results[] = {INT64, FLOAT};
  static constexpr int64_t STRETCH = 256;
  using FloatOperator::FloatOperator;

  void compute(Call& call) const {
    Tensor weights = call.input(0), uniform = call.input(1);
    REQUIRE(weights.rank() > 0 && weights.last() > 0, name, "weights " + weights.text());
    std::vector<int64_t> shape{weights.shape.begin(), weights.shape.end() - 1};
    REQUIRE(uniform.shape == shape, name, uniform.text() + " for weights " + weights.text());
    int64_t V = weights.last(), rows = weights.rows();
    int64_t* tokens = call.output<int64_t>(shape);
    float* margins = call.output(shape, 1);
    run_tasks(call, rows, product(rows, V), [&](int64_t m) {
      draw(weights.data<float>() + m * V, V, uniform.data<float>()[m], tokens + m, margins + m);
    });
  }

 private:
  static void draw(const float* weights, int64_t size, float uniform, int64_t* token,
                   float* margin) {
    int64_t stretches = ceil_div(size, STRETCH), stretch = 0, i = 0;
    auto sums = scratch<double>(stretches + 1);  // of the weights before a stretch
    sums[0] = 0.0;
    for (int64_t n = 0; n < stretches; n++)
      sums[n + 1] = sums[n] + sum_of(weights + n * STRETCH, min(STRETCH, size - n * STRETCH));
    double total = sums[stretches], at = uniform * total;
    while (stretch < stretches - 1 && sums[stretch + 1] <= at) stretch++;
    double below = sums[stretch];
    for (i = stretch * STRETCH; i < size - 1 && below + weights[i] <= at; i++) below += weights[i];
    if (!(weights[i] > 0.0f)) {  // rounding has carried `at` up to the total
      while (i > 0 && !(weights[i] > 0.0f)) i--;
      below = total - weights[i];
    }
    *token = i;
    *margin = static_cast<float>(std::min(at - below, below + weights[i] - at) / total);
  }
};

const Registered<ShapedProbs, Draw> registered;

}  // namespace
