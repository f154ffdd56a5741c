// An indexer's keys, and its choice of rows for each token.
#include <cmath>

#include "cache_rows.h"
#include "registry.h"

namespace {

// LayerNorm of a [B, T, D] with weight [D] and bias [D], then rotation of the first R numbers by
// cos, sin [B, T, R / 2]. Sums are added in ascending order.
struct IndexKeys : FloatOperator {
  static constexpr const char* name = "IndexKeys";
  static constexpr Operand inputs[] = {FLOAT, FLOAT, FLOAT, FLOAT, FLOAT};
  using FloatOperator::FloatOperator;
  float epsilon = from.real("epsilon");
  bool interleaved = from.flag("interleaved");

  void compute(Call& call) const {
    Tensor a = call.input(0), weight = call.input(1), bias = call.input(2);
    std::vector<int64_t> row{a.rank() == 3 ? a.shape[2] : -1};
    REQUIRE(weight.shape == row && bias.shape == row && row[0] > 0, name,
            a.text() + ", norms " + weight.text() + ", " + bias.text());
    int64_t rows = a.shape[0] * a.shape[1], size = row[0];
    Angles angles(name, call.input(3), call.input(4), a.shape[0], a.shape[1]);
    REQUIRE(2 * angles.half <= size, name, "angles " + angles.cos.text() + " of " + a.text());
    float* y = call.output(a.shape);
    run_tasks(call, rows, product(8, rows, size), [&](int64_t m) {
      auto normed = scratch<float>(size);
      norm(a.data<float>() + m * size, weight.data<float>(), bias.data<float>(), size, &normed[0]);
      std::memcpy(y + m * size, &normed[0], size * sizeof(float));
      angles.rotate_row(m, &normed[0], interleaved, y + m * size);
    });
  }

 private:
  void norm(const float* x, const float* weight, const float* bias, int64_t size, float* y) const {
    float count = static_cast<float>(size), sum = 0.0f, squares = 0.0f;
    for (int64_t i = 0; i < size; i++) sum += x[i];
    float mean = sum / count;
    for (int64_t i = 0; i < size; i++) squares += (x[i] - mean) * (x[i] - mean);
    float factor = 1.0f / std::sqrt(squares / count + epsilon);
    for (int64_t i = 0; i < size; i++) y[i] = (x[i] - mean) * factor * weight[i] + bias[i];
  }
};

// q [B, T, H * D], weights [B, T, H], cos, sin [B, T, R / 2], cache [B, 1, S, C], fresh
// [B, 1, F, C], base [B], first [B] -> the positions [B, T, count] with the highest scores, in
// rising order, padded with -1 (plugins/sparse_rows/op.py). Positions before base are rows of the
// cache, those from base on fresh rows; token t sees positions up to base + first + t. A row's key
// is its last D numbers.
struct ChooseRows : FloatOperator {
  static constexpr const char* name = "ChooseRows";
  static constexpr Operand inputs[] = {FLOAT, FLOAT, FLOAT, FLOAT, ANY, FLOAT, INT64, INT64};
  static constexpr Operand results[] = {INT64};
  static constexpr int64_t MOST_CHOSEN = 1 << 20;
  static constexpr int64_t PIECE = 512;       // rows of a task
  static constexpr int64_t SCORES = 1 << 22;  // most scores in memory; one token may have more
  using FloatOperator::FloatOperator;
  int64_t count = from.integer("count");
  bool interleaved = from.flag("interleaved");

  void compute(Call& call) const {
    Job job(call, count);
    Angles angles(name, call.input(2), call.input(3), job.slots, job.tokens);
    REQUIRE(2 * angles.half <= job.size, name, "angles " + angles.cos.text());
    int64_t* y = call.output<int64_t>({job.slots, job.tokens, count});
    int64_t all = job.slots * job.tokens, most = 1;
    for (int64_t m = 0; m < all; m++) most = std::max(most, job.seen(m));
    int64_t some = min(all, std::max<int64_t>(1, SCORES / most)), pieces = ceil_div(most, PIECE);
    auto scores = scratch<float>(some, most);
    for (int64_t from = 0; from < all; from += some) {
      int64_t now = min(some, all - from);
      run_tasks(call, product(now, pieces), product(now, most, job.heads, job.size),
                [&](int64_t i) {
                  int64_t m = from + i / pieces, begin = i % pieces * PIECE;
                  int64_t end = min(job.seen(m), begin + PIECE);
                  if (job.seen(m) > count && begin < end)
                    score(job, angles, m, begin, end, &scores[i / pieces * most]);
                });
      run_tasks(call, now, product(8, now, most), [&](int64_t i) {
        choose(&scores[i * most], job.seen(from + i), y + (from + i) * count);
      });
    }
  }

 private:
  struct Job {
    Tensor q, weights, base, first;
    Rows rows;
    int64_t slots, tokens, heads, size;

    Job(Call& call, int64_t count)
        : q(call.input(0)),
          weights(call.input(1)),
          base(call.input(6)),
          first(call.input(7)),
          rows(name, call.input(4), call.input(5), weights.rank() > 0 ? weights.shape[0] : 0) {
      REQUIRE(!rows.integers, name, "keys in int8");
      REQUIRE(q.rank() == 3 && weights.rank() == 3, name,
              "queries " + q.text() + ", weights " + weights.text());
      slots = q.shape[0], tokens = q.shape[1], heads = weights.shape[2];
      size = heads > 0 ? q.shape[2] / heads : 0;
      REQUIRE(size > 0 && size <= rows.stride && q.shape[2] % heads == 0 &&
                  weights.is({slots, tokens, heads}) && base.is({slots}) && first.is({slots}),
              name, "queries " + q.text() + ", weights " + weights.text());
      REQUIRE(count > 0 && count <= MOST_CHOSEN, name, "a choice of " + std::to_string(count));
    }
    int64_t old(int64_t slot) const { return rows.clamped(base.data<int64_t>()[slot]); }
    // Returns the number of positions that token m (of all slots) sees.
    int64_t seen(int64_t m) const {
      int64_t slot = m / tokens, offset = min(first.data<int64_t>()[slot], rows.count);
      return old(slot) + min(rows.count, std::max<int64_t>(0, offset) + m % tokens + 1);
    }
  };

  // Computes the scores of positions begin .. end - 1 for token m.
  void score(const Job& job, const Angles& angles, int64_t m, int64_t begin, int64_t end,
             float* scores) const {
    int64_t D = job.size, H = job.heads, slot = m / job.tokens, old = job.old(slot);
    auto queries = scratch<float>(ceil_div(H, PANEL), PANEL, D), shares = scratch<float>(H);
    lay_out(job, angles, m, &queries[0]);
    float each = 1.0f / std::sqrt(static_cast<float>(H));
    for (int64_t h = 0; h < H; h++) shares[h] = job.weights.data<float>()[m * H + h] * each;
    float scale = 1.0f / std::sqrt(static_cast<float>(D));
    auto wide = scratch<float>(ROWS, D), products = scratch<float>(ROWS, H);
    const float* rows[ROWS];
    float* out[ROWS];
    for (int64_t at = begin; at < end; at += ROWS) {
      int64_t some = min(ROWS, end - at);
      for (int64_t i = 0; i < some; i++) {
        rows[i] = job.rows.at(slot, old, at + i, job.rows.stride - D, D, &wide[i * D]);
        out[i] = &products[i * H];
      }
      k.floats({&queries[0], D, PANEL * D, PANEL}, H, some, rows, out);
      for (int64_t i = 0; i < some; i++) {
        float sum = 0.0f;
        for (int64_t h = 0; h < H; h++)
          sum += shares[h] * std::max(out[i][h] * scale, 0.0f);  // keeps NaN
        scores[at + i] = sum;
      }
    }
  }

  // Writes a token's rotated queries in panels of 32 heads: [H / 32][D][32].
  void lay_out(const Job& job, const Angles& angles, int64_t m, float* to) const {
    int64_t D = job.size, H = job.heads;
    auto own = scratch<float>(D);
    std::memset(to, 0, ceil_div(H, PANEL) * PANEL * D * sizeof(float));
    for (int64_t h = 0; h < H; h++) {
      const float* from = job.q.data<float>() + (m * H + h) * D;
      std::memcpy(&own[0], from, D * sizeof(float));
      angles.rotate_row(m, from, interleaved, &own[0]);
      float* panel = to + h / PANEL * PANEL * D + h % PANEL;
      for (int64_t d = 0; d < D; d++) panel[d * PANEL] = own[d];
    }
  }

  // Ties go to the lowest position. If a score is NaN, all choices become NO_NUMBER.
  void choose(const float* scores, int64_t seen, int64_t* to) const {
    int64_t found = 0;
    if (seen <= count) {
      for (; found < seen; found++) to[found] = found;
    } else {
      bool ordered = std::none_of(scores, scores + seen, [](float x) { return x != x; });
      if (!ordered) return std::fill_n(to, count, NO_NUMBER), void();
      auto sorted = scratch<float>(seen);
      std::memcpy(&sorted[0], scores, seen * sizeof(float));
      std::nth_element(&sorted[0], &sorted[count - 1], &sorted[0] + seen, std::greater<float>());
      float least = sorted[count - 1];
      int64_t equal = count;
      for (int64_t i = 0; i < seen; i++) equal -= scores[i] > least;
      for (int64_t i = 0; i < seen; i++)
        if (scores[i] > least || (scores[i] == least && equal-- > 0)) to[found++] = i;
    }
    for (; found < count; found++) to[found] = -1;
  }
};

const Registered<IndexKeys, ChooseRows> registered;

}  // namespace
