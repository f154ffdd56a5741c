// Operators over single rows: norms, gates, sine and cosine, acceptance, log-softmax, argmax.
#include "logarithm.h"
#include "registry.h"
#include "trigonometry.h"

namespace {

// x [.., N] / rms(x) * weight [N]
struct Norm : FloatOperator {
  static constexpr const char* name = "Norm";
  static constexpr Operand inputs[] = {FLOAT, FLOAT};
  using FloatOperator::FloatOperator;
  float epsilon = from.real("epsilon");

  void compute(Call& call) const {
    Tensor x = call.input(0), w = call.input(1);
    REQUIRE(w.rank() == 1 && x.rank() > 0 && x.last() > 0 && x.last() == w.shape[0], name,
            x.text() + ", " + w.text());
    int64_t rows = x.rows(), size = x.last();
    float* y = call.output(x.shape);
    run_tasks(call, rows, product(4, rows, size), [&](int64_t m) {
      k.norm(x.data<float>() + m * size, w.data<float>(), size, epsilon, y + m * size);
    });
  }
};

// (x + y / rms(y) * weight [N]) * factor [1], if there is one; x and y [.., N]
struct NormSum : FloatOperator {
  static constexpr const char* name = "NormSum";
  static constexpr Operand inputs[] = {FLOAT, FLOAT, FLOAT, maybe(FLOAT)};
  using FloatOperator::FloatOperator;
  float epsilon = from.real("epsilon");

  void compute(Call& call) const {
    Tensor x = call.input(0), y = call.input(1), w = call.input(2), scale = call.input(3, true);
    REQUIRE(w.rank() == 1 && y.rank() > 0 && y.last() > 0 && y.last() == w.shape[0] &&
                x.shape == y.shape && (!scale.memory || scale.is({1})),
            name, x.text() + " + " + y.text() + ", " + w.text());
    int64_t rows = y.rows(), size = y.last();
    float factor = scale.memory ? *scale.data<float>() : 1.0f;
    float* sums = call.output(y.shape);
    run_tasks(call, rows, product(4, rows, size), [&](int64_t m) {
      auto normed = scratch<float>(size);
      k.norm(y.data<float>() + m * size, w.data<float>(), size, epsilon, normed.get());
      const float* row = x.data<float>() + m * size;
      for (int64_t i = 0; i < size; i++) sums[m * size + i] = (row[i] + normed[i]) * factor;
    });
  }
};

// cap * tanh(x / cap)
struct SoftCap : FloatOperator {
  static constexpr const char* name = "SoftCap";
  static constexpr Operand inputs[] = {FLOAT};
  static constexpr int64_t PART = 4096;  // numbers in a task
  using FloatOperator::FloatOperator;
  float cap = from.real("cap");

  void compute(Call& call) const {
    Tensor x = call.input(0);
    int64_t count = x.count();
    float* y = call.output(x.shape);
    run_tasks(call, ceil_div(count, PART), product(16, count), [&](int64_t i) {
      int64_t first = i * PART, some = min(PART, count - first);
      k.soft_cap(x.data<float>() + first, some, cap, y + first);
    });
  }
};

// x * silu(z), x * gelu(z) or x * sigmoid(z): x has as many numbers as z; the result has z's shape.
struct Gate : FloatOperator {
  static constexpr const char* name = "Gate";
  static constexpr Operand inputs[] = {FLOAT, FLOAT};
  static constexpr int64_t PART = 1024;  // numbers in a task
  using FloatOperator::FloatOperator;
  bool silu = from.value_or<int64_t>("silu", 0), gelu = from.value_or<int64_t>("gelu", 0);
  decltype(k.gated) gated = gelu ? k.gated_gelu : k.gated;

  void compute(Call& call) const {
    Tensor x = call.input(0), z = call.input(1);
    int64_t count = z.count();
    REQUIRE(x.count() == count, name, x.text() + " times " + z.text());
    float* y = call.output(z.shape);
    run_tasks(call, ceil_div(count, PART), product(32, count), [&](int64_t i) {
      int64_t first = i * PART, some = min(PART, count - first), vectors = some / LANES * LANES;
      const float *own = x.data<float>() + first, *gate = z.data<float>() + first;
      float* out = y + first;
      if (!silu && !gelu) {
        k.sigmoid(gate, some, out);
        for (int64_t j = 0; j < some; j++) out[j] *= own[j];
        return;
      }
      std::copy_n(gate, some, out);
      gated(out, own, vectors);
      if (vectors == some) return;
      float gates[LANES] = {}, factors[LANES] = {};
      std::copy(out + vectors, out + some, gates);
      std::copy(own + vectors, own + some, factors);
      gated(gates, factors, LANES);
      std::copy_n(gates, some - vectors, out + vectors);
    });
  }
};

// Cosines or sines of x, the angles by which queries and keys are rotated.
template <bool COSINE>
struct Circle : FloatOperator {
  static constexpr const char* name = COSINE ? "Cos" : "Sin";
  static constexpr Operand inputs[] = {FLOAT};

  using FloatOperator::FloatOperator;

  void compute(Call& call) const {
    Tensor x = call.input(0);
    float* y = call.output(x.shape);
    for (int64_t i = 0; i < x.count(); i++) {
      float sine, cosine;
      mtp::sine_and_cosine(x.data<float>()[i], &sine, &cosine);
      y[i] = COSINE ? cosine : sine;
    }
  }
};

// Strict greedy acceptance, as defined in `plugins/accept_rewind/op.py`: logits [B, T, V], window
// [B, T], num_drafts, lengths and active [B] -> tokens [B, T], num_tokens and new lengths [B],
// log-probabilities and margins [B, T].
struct Accept : FloatOperator {
  static constexpr const char* name = "Accept";
  static constexpr Operand inputs[] = {FLOAT, INT64, INT64, INT64, BOOL};
  static constexpr Operand results[] = {INT64, INT64, INT64, FLOAT, FLOAT};

  using FloatOperator::FloatOperator;

  void compute(Call& call) const {
    Tensor logits = call.input(0), window = call.input(1);
    Tensor drafts = call.input(2), lengths = call.input(3);
    Tensor active = call.input(4);
    std::vector<int64_t> slots{logits.rank() == 3 ? logits.shape[0] : -1};
    REQUIRE(logits.rank() == 3 && window.rank() == 2 && window.shape[0] == slots[0] &&
                window.shape[1] == logits.shape[1] && window.shape[1] > 0 && logits.shape[2] > 1 &&
                drafts.shape == slots && lengths.shape == slots && active.shape == slots,
            name, "logits " + logits.text() + " of a window " + window.text());
    int64_t T = window.shape[1], rows = slots[0] * T, V = logits.shape[2];
    int64_t* tokens = call.output<int64_t>(window.shape);
    int64_t* counts = call.output<int64_t>(slots, 1);
    int64_t* ends = call.output<int64_t>(slots, 2);
    float* logprobs = call.output(window.shape, 3);
    float* margins = call.output(window.shape, 4);
    run_tasks(call, rows, product(rows, V, 8), [&](int64_t m) {
      mtp::Best best = k.best(logits.data<float>() + m * V, V, true);
      tokens[m] = best.id;
      logprobs[m] = 0.0f - mtp::logarithm(best.total);  // as in LogSoftmax
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
      REQUIRE(lengths.data<int64_t>()[slot] <= INT64_MAX - T, name, "a length without an end");
      ends[slot] = lengths.data<int64_t>()[slot] + n;
    }
  }
};

// x [.., V] -> x - log(sum(exp(x))), with the same sum as Accept.
struct LogSoftmax : FloatOperator {
  static constexpr const char* name = "LogSoftmax";
  static constexpr Operand inputs[] = {FLOAT};

  using FloatOperator::FloatOperator;

  void compute(Call& call) const {
    Tensor x = call.input(0);
    REQUIRE(x.rank() > 0 && x.last() > 0, name, "rows " + x.text());
    int64_t rows = x.rows(), V = x.last();
    float* y = call.output(x.shape);
    run_tasks(call, rows, product(rows, V, 8), [&](int64_t m) {
      const float* row = x.data<float>() + m * V;
      mtp::Best best = k.best(row, V, true);
      float log = mtp::logarithm(best.total);
      for (int64_t i = 0; i < V; i++) y[m * V + i] = (row[i] - best.top) - log;
    });
  }
};

// x [.., V] -> the index [..] of each row's highest number; ties go to the lowest index.
struct ArgMax : FloatOperator {
  static constexpr const char* name = "ArgMax";
  static constexpr Operand inputs[] = {FLOAT};
  static constexpr Operand results[] = {INT64};

  using FloatOperator::FloatOperator;

  void compute(Call& call) const {
    Tensor x = call.input(0);
    REQUIRE(x.rank() > 0 && x.last() > 0, name, "rows " + x.text());
    int64_t rows = x.rows(), V = x.last();
    int64_t* y = call.output<int64_t>({x.shape.begin(), x.shape.end() - 1});
    run_tasks(call, rows, product(rows, V),
              [&](int64_t m) { y[m] = k.best(x.data<float>() + m * V, V, false).id; });
  }
};

// x [.., N] -> the sum [..] of each row
struct Sum : FloatOperator {
  static constexpr const char* name = "Sum";
  static constexpr Operand inputs[] = {FLOAT};

  using FloatOperator::FloatOperator;

  void compute(Call& call) const {
    Tensor x = call.input(0);
    REQUIRE(x.rank() > 0, name, "rows " + x.text());
    int64_t rows = x.rows(), size = x.last();
    float* y = call.output({x.shape.begin(), x.shape.end() - 1});
    run_tasks(call, rows, product(rows, size),
              [&](int64_t m) { y[m] = sum_of(x.data<float>() + m * size, size); });
  }
};

const Registered<Norm, NormSum, SoftCap, Gate, Circle<true>, Circle<false>, Accept, LogSoftmax,
                 ArgMax, Sum>
    registered;

}  // namespace
