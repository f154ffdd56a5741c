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

// What operators that choose rows have in common: queries q [B, T, H * D], weights [B, T, H] and
// angles [B, T, R / 2] -> the rows [B, T, count] with the highest scores, in rising order, padded
// with -1 (plugins/sparse_rows/op.py).
struct Choice : FloatOperator {
  static constexpr Operand results[] = {INT64};
  static constexpr int64_t MOST_CHOSEN = 1 << 20;
  static constexpr int64_t PIECE = 512;       // rows of a task
  static constexpr int64_t SCORES = 1 << 22;  // most scores in memory; one token may have more
  using FloatOperator::FloatOperator;
  int64_t count = from.integer("count");

 protected:
  struct Job {
    Tensor q, weights;
    int64_t slots, tokens, heads, size, count;
    Angles angles;
    bool interleaved, last;  // pairs are adjacent; they are a head's last numbers

    Job(const char* op, Call& call, int64_t count, bool interleaved, bool last)
        : q(call.input(0)),
          weights(call.input(1)),
          slots(weights.rank() == 3 ? weights.shape[0] : -1),
          tokens(weights.rank() == 3 ? weights.shape[1] : -1),
          heads(weights.last()),
          size(heads > 0 ? q.last() / heads : 0),
          count(count),
          angles(op, call.input(2), call.input(3), slots, tokens),
          interleaved(interleaved),
          last(last) {
      REQUIRE(size > 0 && q.is({slots, tokens, product(heads, size)}), op,
              "queries " + q.text() + ", weights " + weights.text());
      REQUIRE(2 * angles.half <= size, op, "angles " + angles.cos.text());
      REQUIRE(count > 0 && count <= MOST_CHOSEN, op, "a choice of " + std::to_string(count));
    }
  };

  // seen(m): the number of rows that token m (of all slots) sees. key(m, row, memory): the key of a
  // row, which may be written to `memory`.
  template <class S, class K>
  void choose_all(Call& call, const Job& job, const S& seen, const K& key) const {
    int64_t* y = call.output<int64_t>({job.slots, job.tokens, count});
    int64_t all = job.slots * job.tokens, most = 1;
    for (int64_t m = 0; m < all; m++) most = std::max<int64_t>(most, seen(m));
    int64_t some = min(all, std::max<int64_t>(1, SCORES / most)), pieces = ceil_div(most, PIECE);
    auto scores = scratch<float>(some, most);
    for (int64_t from = 0; from < all; from += some) {
      int64_t now = min(some, all - from);
      run_tasks(call, product(now, pieces), product(now, most, job.heads, job.size),
                [&](int64_t i) {
                  int64_t m = from + i / pieces, begin = i % pieces * PIECE;
                  int64_t end = min<int64_t>(seen(m), begin + PIECE);
                  if (seen(m) > count && begin < end)
                    score(job, m, begin, end, key, &scores[i / pieces * most]);
                });
      run_tasks(call, now, product(8, now, most), [&](int64_t i) {
        choose(&scores[i * most], seen(from + i), y + (from + i) * count);
      });
    }
  }

 private:
  // Computes the scores of rows begin .. end - 1 for token m.
  template <class K>
  void score(const Job& job, int64_t m, int64_t begin, int64_t end, const K& key,
             float* scores) const {
    int64_t D = job.size, H = job.heads;
    auto queries = scratch<float>(ceil_div(H, PANEL), PANEL, D), shares = scratch<float>(H);
    lay_out(job, m, &queries[0]);
    float each = 1.0f / std::sqrt(static_cast<float>(H));
    for (int64_t h = 0; h < H; h++) shares[h] = job.weights.data<float>()[m * H + h] * each;
    float scale = 1.0f / std::sqrt(static_cast<float>(D));
    auto wide = scratch<float>(ROWS, D), products = scratch<float>(ROWS, H);
    const float* rows[ROWS];
    float* out[ROWS];
    for (int64_t at = begin; at < end; at += ROWS) {
      int64_t some = min(ROWS, end - at);
      for (int64_t i = 0; i < some; i++) {
        rows[i] = key(m, at + i, &wide[i * D]);
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
  void lay_out(const Job& job, int64_t m, float* to) const {
    int64_t D = job.size, H = job.heads, turned = job.last ? D - 2 * job.angles.half : 0;
    auto own = scratch<float>(D);
    std::memset(to, 0, ceil_div(H, PANEL) * PANEL * D * sizeof(float));
    for (int64_t h = 0; h < H; h++) {
      const float* from = job.q.data<float>() + (m * H + h) * D;
      std::memcpy(&own[0], from, D * sizeof(float));
      job.angles.rotate_row(m, from + turned, job.interleaved, &own[turned]);
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

// Chooses among rows of a cache [B, 1, S, C], base [B] of them, and fresh rows [B, 1, F, C], whose
// positions follow; token t sees positions up to base + first [B] + t. A row's key is its last D
// numbers.
struct ChooseRows : Choice {
  static constexpr const char* name = "ChooseRows";
  static constexpr Operand inputs[] = {FLOAT, FLOAT, FLOAT, FLOAT, ANY, FLOAT, INT64, INT64};
  using Choice::Choice;
  bool interleaved = from.flag("interleaved");

  void compute(Call& call) const {
    Job job(name, call, count, interleaved, false);
    Tensor base = call.input(6), first = call.input(7);
    Rows rows(name, call.input(4), call.input(5), job.slots);
    REQUIRE(!rows.integers, name, "keys in int8");
    REQUIRE(job.size <= rows.stride && base.is({job.slots}) && first.is({job.slots}), name,
            "queries " + job.q.text() + " of rows " + rows.fresh.text());
    auto old = [&](int64_t m) { return rows.clamped(base.data<int64_t>()[m / job.tokens]); };
    auto seen = [&](int64_t m) {
      int64_t offset = min(first.data<int64_t>()[m / job.tokens], rows.count);
      return old(m) + min(rows.count, std::max<int64_t>(0, offset) + m % job.tokens + 1);
    };
    choose_all(call, job, seen, [&](int64_t m, int64_t at, float* memory) {
      return rows.at(m / job.tokens, old(m), at, rows.stride - job.size, job.size, memory);
    });
  }
};

// Chooses among the compressed rows (`CompressedCache`) that are complete before a token's position
// base [B] + first [B] + t. A row's key is its numbers from `place` on. The last numbers of queries
// are rotated.
struct ChooseCompressed : Choice {
  static constexpr const char* name = "ChooseCompressed";
  static constexpr Operand inputs[] = {FLOAT, FLOAT, FLOAT, FLOAT, ANY, INT64, INT64};
  using Choice::Choice;
  int64_t ratio = from.integer("ratio"), group = from.integer("group");
  int64_t place = from.integer("place");

  void compute(Call& call) const {
    Job job(name, call, count, true, true);
    Tensor base = call.input(5), first = call.input(6);
    REQUIRE(place >= 0 && place <= INT32_MAX && base.is({job.slots}) && first.is({job.slots}), name,
            "keys from " + std::to_string(place) + " on");
    CompressedCache rows(name, call.input(4), {ratio, group}, job.slots, place + job.size);
    auto seen = [&](int64_t m) {
      int64_t slot = m / job.tokens;
      int64_t position = at_least_0(base.data<int64_t>()[slot]) +
                         at_least_0(first.data<int64_t>()[slot]) + m % job.tokens;
      return min(rows.count, (position + 1) / ratio);
    };
    choose_all(call, job, seen, [&](int64_t m, int64_t row, float* memory) {
      return rows.at(m / job.tokens, row, place, job.size, memory);
    });
  }

 private:
  // Clamps, as an idle slot may have any base and first.
  static int64_t at_least_0(int64_t x) { return std::max<int64_t>(0, min<int64_t>(x, INT32_MAX)); }
};

const Registered<IndexKeys, ChooseRows, ChooseCompressed> registered;

}  // namespace
