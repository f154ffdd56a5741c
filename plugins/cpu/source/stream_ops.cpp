// DeepSeek-V4's residual streams: how branches read them and join them.
#include <cmath>
#include <optional>

#include "registry.h"

namespace {

constexpr int64_t MOST_STREAMS = 16;
constexpr int64_t PIECE = 256;  // numbers of each stream in a task

// x [.., N E] and a branch's result [.., E] -> new streams: weights [.., N + N N] has the factors
// of the result, then those of the streams [from, to].
struct Joint {
  Tensor x, branch, weights;
  int64_t size, streams;

  Joint(const char* op, const Tensor& x, const Tensor& branch, const Tensor& weights)
      : x(x), branch(branch), weights(weights), size(branch.last()) {
    REQUIRE(x.rank() > 0 && size > 0 && x.last() % size == 0 && x.with_last(size) == branch.shape,
            op, "streams " + x.text() + " and " + branch.text());
    streams = x.last() / size;
    REQUIRE(streams <= MOST_STREAMS && weights.is(x.with_last(streams * (streams + 1))), op,
            "weights " + weights.text() + " of streams " + x.text());
  }
  // Writes numbers begin .. begin + count - 1 of each stream of a row to y [rows, N E].
  void join(const Kernels& k, int64_t row, int64_t begin, int64_t count, float* y) const {
    const float* own = weights.data<float>() + row * streams * (streams + 1);
    int64_t first = row * streams * size + begin;
    const float* terms[MOST_STREAMS + 1] = {branch.data<float>() + row * size + begin};
    for (int64_t j = 0; j < streams; j++) terms[j + 1] = x.data<float>() + first + j * size;
    for (int64_t i = 0; i < streams; i++) {
      float factors[MOST_STREAMS + 1] = {own[i]};
      for (int64_t j = 0; j < streams; j++) factors[j + 1] = own[streams * (j + 1) + i];
      k.mix(terms, factors, streams + 1, count, y + first + i * size);
    }
  }
};

struct JoinBranch : FloatOperator {
  static constexpr const char* name = "JoinBranch";
  static constexpr Operand inputs[] = {FLOAT, FLOAT, FLOAT};
  using FloatOperator::FloatOperator;

  void compute(Call& call) const {
    Joint joint(name, call.input(0), call.input(1), call.input(2));
    float* y = call.output(joint.x.shape);
    run_tasks(call, joint.x.rows(), joint.x.count() * (joint.streams + 1),
              [&](int64_t m) { joint.join(k, m, 0, joint.size, y); });
  }
};

// As defined in `plugins/mix_streams/op.py`: streams x [.., N E], fn [N E, M], base [M], scale,
// norm [E] -> a branch's input [.., E] and, unless M is N, the weights [.., N + N N] of its result.
// With the result and the weights of an earlier branch x is joined first, and is the third result.
// Products and sums of squares are cut into pieces of each stream, so that threads share a token.
struct MixStreams : FloatOperator {
  static constexpr const char* name = "MixStreams";
  static constexpr Operand inputs[] = {FLOAT, FLOAT,        FLOAT,       FLOAT,
                                       FLOAT, maybe(FLOAT), maybe(FLOAT)};
  static constexpr Operand results[] = {FLOAT, maybe(FLOAT), maybe(FLOAT)};
  using FloatOperator::FloatOperator;
  int64_t iterations = from.value_or<int64_t>("iterations", 1);
  float eps = from.real("eps"), epsilon = from.real("epsilon");

  void compute(Call& call) const {
    Tensor x = call.input(0), fn = call.input(1), base = call.input(2), scale = call.input(3);
    Tensor norm = call.input(4), branch = call.input(5, true);
    int64_t size = norm.last(), outputs = base.last();
    REQUIRE(x.rank() > 0 && norm.rank() == 1 && size > 0 && x.last() > 0 && x.last() % size == 0,
            name, "streams " + x.text() + ", norm " + norm.text());
    int64_t streams = x.last() / size, rows = x.rows();
    bool joins = outputs != streams;
    REQUIRE(streams <= MOST_STREAMS && (!joins || outputs == streams * (streams + 2)) &&
                base.is({outputs}) && iterations <= 1000 && fn.is({x.last(), outputs}) &&
                scale.is({joins ? 3 : 1}),
            name, fn.text() + ", " + base.text() + ", " + scale.text() + " of " + x.text());
    const float* all = x.data<float>();
    float* y = call.output(x.with_last(size));
    float* weights = joins ? call.output(x.with_last(outputs - streams), 1) : nullptr;
    std::optional<Joint> joint;
    float* joined = nullptr;
    if (branch.memory) {
      joint.emplace(name, x, branch, call.input(6, true));
      REQUIRE(joint->size == size, name, branch.text() + ", norm " + norm.text());
      all = joined = call.output(x.shape, 2);
    }
    int64_t pieces = ceil_div(size, PIECE), blocks = ceil_div(rows, ROWS), width = outputs + 1;
    auto sums = scratch<float>(rows, pieces, width);  // of products, then of squares
    int64_t work = product(rows, x.last(), outputs);
    run_tasks(call, product(pieces, blocks), work, [&](int64_t t) {
      int64_t begin = t / blocks * PIECE, count = min(PIECE, size - begin);
      int64_t first = t % blocks * ROWS, some = min(ROWS, rows - first);
      auto products = scratch<float>(some, outputs);
      const float* in[ROWS];
      float* out[ROWS];
      for (int64_t i = 0; i < some; i++) {
        std::fill_n(&sums[((first + i) * pieces + t / blocks) * width], width, 0.0f);
        out[i] = &products[i * outputs];
        if (joint) joint->join(k, first + i, begin, count, joined);
      }
      for (int64_t n = 0; n < streams; n++) {
        int64_t place = n * size + begin;
        for (int64_t i = 0; i < some; i++) in[i] = all + (first + i) * x.last() + place;
        const float* own = fn.data<float>() + place * outputs;
        k.floats({own, count, PANEL, outputs}, outputs, some, in, out);
        for (int64_t i = 0; i < some; i++) {
          float* to = &sums[((first + i) * pieces + t / blocks) * width];
          for (int64_t o = 0; o < outputs; o++) to[o] += out[i][o];
          to[outputs] += k.squares(in[i], count);
        }
      }
    });
    run_tasks(call, rows, product(8, rows, x.last()), [&](int64_t m) {
      float* total = &sums[m * pieces * width];
      for (int64_t p = 1; p < pieces; p++)
        for (int64_t o = 0; o < width; o++) total[o] += total[p * width + o];
      float mean = total[outputs] / static_cast<float>(x.last());
      float factor = 1.0f / std::sqrt(mean + epsilon);
      for (int64_t o = 0; o < outputs; o++) {
        float own = scale.data<float>()[joins ? min<int64_t>(o / streams, 2) : 0];
        total[o] = total[o] * factor * own + base.data<float>()[o];
      }
      float shares[2 * MOST_STREAMS];
      k.sigmoid(total, min(outputs, 2 * streams), shares);
      const float* terms[MOST_STREAMS];
      for (int64_t n = 0; n < streams; n++) {
        terms[n] = all + (m * streams + n) * size;
        if (joins) weights[m * (outputs - streams) + n] = 2.0f * shares[streams + n];
        shares[n] += eps;
      }
      auto mixed = scratch<float>(size);
      k.mix(terms, shares, streams, size, mixed.get());
      k.norm(mixed.get(), norm.data<float>(), size, epsilon, y + m * size);
      if (joins) balance(total + 2 * streams, streams, weights + m * (outputs - streams) + streams);
    });
  }

 private:
  // Computes a softmax of each row of x [N, N], then makes columns and rows sum to 1 by turns.
  void balance(const float* x, int64_t streams, float* y) const {
    for (int64_t r = 0; r < streams; r++) {
      const float* row = x + r * streams;
      float top = row[0], total = 0.0f;
      for (int64_t c = 1; c < streams; c++) top = row[c] > top ? row[c] : top;
      k.weigh(row, streams, top, 1.0f, y + r * streams);
      for (int64_t c = 0; c < streams; c++) total += y[r * streams + c];
      for (int64_t c = 0; c < streams; c++) y[r * streams + c] = y[r * streams + c] / total + eps;
    }
    auto divide = [&](int64_t apart, int64_t step) {
      for (int64_t i = 0; i < streams; i++) {
        float total = 0.0f;
        for (int64_t j = 0; j < streams; j++) total += y[i * apart + j * step];
        for (int64_t j = 0; j < streams; j++) y[i * apart + j * step] /= total + eps;
      }
    };
    divide(1, streams);
    for (int64_t i = 1; i < iterations; i++) divide(streams, 1), divide(1, streams);
  }
};

const Registered<JoinBranch, MixStreams> registered;

}  // namespace
