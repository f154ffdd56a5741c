// The gated delta rule, token by token, and the convolution before it.
//
// begins [B]: slots whose request begins; their states are read as zeros.
#include "exponential.h"
#include "registry.h"

namespace {

using mtp::COLUMNS;

bool are_of(const Tensor& begins, int64_t slots) { return !begins.memory || begins.is({slots}); }

// silu of a causal convolution: x [B, T, C], the k - 1 inputs before x [B, k - 1, C], weight
// [k, C], begins or none -> [B, T, C].
struct CausalConv : FloatOperator {
  static constexpr const char* name = "CausalConv";
  static constexpr Operand inputs[] = {FLOAT, FLOAT, FLOAT, maybe(BOOL)};
  static constexpr int64_t TAPS = 64;  // maximum of k

  using FloatOperator::FloatOperator;

  void compute(Call& call) const override {
    Tensor x = call.input(0), tail = call.input(1), weight = call.input(2);
    Tensor begins = call.input(3, true);
    bool fit = x.rank() == 3 && weight.rank() == 2 && weight.shape[0] > 0 &&
               weight.shape[0] <= TAPS && weight.shape[1] == x.shape[2] &&
               tail.is({x.shape[0], weight.shape[0] - 1, x.shape[2]}) && are_of(begins, x.shape[0]);
    REQUIRE(fit, name, x.text() + " behind " + tail.text() + ", weight " + weight.text());
    int64_t slots = x.shape[0], tokens = x.shape[1], C = x.shape[2], taps = weight.shape[0];
    float* y = call.output(x.shape);
    std::vector<float> none(begins.memory ? C : 0);
    run_tasks(call, slots * tokens, product(slots * tokens, C, taps + 8), [&](int64_t m) {
      int64_t slot = m / tokens, t = m % tokens;
      const float* rows[TAPS];
      for (int64_t j = 0; j < taps; j++) {
        int64_t at = t + j - (taps - 1);
        bool zero = begins.memory && begins.data<uint8_t>()[slot];
        rows[j] = at >= 0 ? x.data<float>() + (slot * tokens + at) * C
                  : zero  ? none.data()
                          : tail.data<float>() + (slot * (taps - 1) + t + j) * C;
      }
      k.convolve(rows, weight.data<float>(), taps, C, y + m * C);
    });
  }
};

// The last k inputs before token n [B] of each slot: tail [B, k, C] before this pass, inputs
// [B, T, C], n, begins or none -> [B, k, C].
struct LastInputs : FloatOperator {
  static constexpr const char* name = "LastInputs";
  static constexpr Operand inputs[] = {FLOAT, FLOAT, INT64, maybe(BOOL)};

  using FloatOperator::FloatOperator;

  void compute(Call& call) const override {
    Tensor tail = call.input(0), x = call.input(1), n = call.input(2);
    Tensor begins = call.input(3, true);
    std::vector<int64_t> slots{x.rank() == 3 ? x.shape[0] : -1};
    bool fit = x.rank() == 3 && tail.rank() == 3 && tail.shape[0] == slots[0] &&
               tail.shape[2] == x.shape[2] && n.shape == slots && are_of(begins, slots[0]);
    REQUIRE(fit, name, x.text() + " behind " + tail.text());
    int64_t k = tail.shape[1], tokens = x.shape[1], C = x.shape[2];
    float* y = call.output(tail.shape);
    for (int64_t slot = 0; slot < slots[0]; slot++) {
      int64_t end = n.data<int64_t>()[slot];
      REQUIRE(end >= 0 && end <= tokens, name,
              "no token " + std::to_string(end) + " of " + x.text());
      bool zero = begins.memory && begins.data<uint8_t>()[slot];
      for (int64_t at = end - k; at < end; at++, y += C) {
        if (at >= 0)
          std::copy_n(x.data<float>() + (slot * tokens + at) * C, C, y);
        else if (zero)
          std::fill_n(y, C, 0.0f);
        else
          std::copy_n(tail.data<float>() + (slot * k + k + at) * C, C, y);
      }
    }
  }
};

// The operands, as defined in plugins/delta_rule/op.py: mixed [B, T, 2 G K + H V], ba [B, T, 2 H],
// rate [H], bias [H], state [B, H, K, V]. DeltaAdvance has n [B]: tokens from n on change nothing.
struct DeltaJob {
  Tensor mixed, ba, rate, bias, state, n, begins;
  int64_t slots, tokens, heads, width, values, groups, each;
  std::unique_ptr<float[]> queries, keys, decays, shares;

  DeltaJob(const char* op, Call& call, bool counted)
      : mixed(call.input(0)),
        ba(call.input(1)),
        rate(call.input(2)),
        bias(call.input(3)),
        state(call.input(4)),
        begins(call.input(counted ? 6 : 5, true)) {
    if (counted) n = call.input(5);
    REQUIRE(mixed.rank() == 3 && state.rank() == 4, op, mixed.text() + " with " + state.text());
    slots = mixed.shape[0], tokens = mixed.shape[1];
    heads = state.shape[1], width = state.shape[2], values = state.shape[3];
    bool known = heads > 0 && width > 0 && values > 0;
    int64_t both = known ? mixed.shape[2] - heads * values : 0;
    groups = known ? both / 2 / width : 0;
    std::vector<int64_t> own{heads}, gates{slots, tokens, 2 * heads};
    bool fit = groups > 0 && both == 2 * groups * width && heads % groups == 0 &&
               state.shape[0] == slots && ba.shape == gates && rate.shape == own &&
               bias.shape == own && are_of(begins, slots) && (!counted || n.is({slots}));
    REQUIRE(fit, op, mixed.text() + ", " + ba.text() + " with " + state.text());
    each = heads / groups;
  }
  int64_t row() const { return mixed.shape[2]; }
  // Returns the number of a slot's tokens that change its state.
  int64_t count(int64_t slot) const {
    if (!n.memory) return tokens;
    return std::max<int64_t>(0, min(tokens, n.data<int64_t>()[slot]));
  }

  // Computes normalised keys, normalised queries if `asks`, decays from a, and shares from b.
  void prepare(const Kernels& k, Call& call, bool asks) {
    int64_t rows = slots * tokens, size = groups * width;
    if (asks) queries = scratch<float>(rows, size);
    keys = scratch<float>(rows, size);
    decays = scratch<float>(rows, heads), shares = scratch<float>(rows, heads);
    float count = static_cast<float>(width), epsilon = 1e-6f / count;
    std::vector<float> one(width, 1.0f / std::sqrt(count)), other(width, 1.0f / count);
    run_tasks(call, rows, product(rows, 8 * size + 128 * heads), [&](int64_t m) {
      const float* q = mixed.data<float>() + m * row();
      for (int64_t g = 0; g < groups; g++) {
        int64_t at = m * size + g * width;
        if (asks) k.norm(q + g * width, other.data(), width, epsilon, &queries[at]);
        k.norm(q + size + g * width, one.data(), width, epsilon, &keys[at]);
      }
      const float* b = ba.data<float>() + m * 2 * heads;
      for (int64_t h = 0; h < heads; h++) {
        float x = b[heads + h] + bias.data<float>()[h];
        decays[m * heads + h] = mtp::decay(rate.data<float>()[h], x);
        shares[m * heads + h] = mtp::share(b[h]);
      }
    });
  }

  // Computes outputs [B, T, H, V] and the state after the tokens; either may be null.
  void run(const Kernels& k, Call& call, float* outputs, float* after) const {
    int64_t blocks = ceil_div(values, COLUMNS);
    int64_t work = product(slots * tokens, heads, width, values, 4);
    run_tasks(call, product(slots, heads, blocks), work, [&](int64_t i) {
      int64_t slot = i / blocks / heads, head = i / blocks % heads, first = i % blocks * COLUMNS;
      block(k, slot, head, first, min(COLUMNS, values - first), outputs, after);
    });
  }

 private:
  void block(const Kernels& k, int64_t slot, int64_t head, int64_t first, int64_t some,
             float* outputs, float* after) const {
    int64_t count = this->count(slot), row = slot * tokens, at = (slot * heads + head) * width;
    bool zero = begins.memory && begins.data<uint8_t>()[slot], full = some == COLUMNS;
    const float* from = state.data<float>() + at * values + first;
    float* to = after ? after + at * values + first : nullptr;
    auto own = scratch<float>(2 * count + width, COLUMNS);
    float *out = &own[count * COLUMNS], *copy = out + count * COLUMNS;
    if (zero)
      std::fill_n(copy, width * COLUMNS, 0.0f);
    else if (!full || !count)
      gather(from, values, width, some, copy);
    bool there = full && !zero && count;  // the state is read without a copy
    int64_t size = groups * width, key = row * size + head / each * width;
    gather(mixed.data<float>() + row * this->row() + 2 * size + head * values + first, this->row(),
           count, some, own.get());
    mtp::Delta d{};
    d.queries = queries ? &queries[key] : nullptr, d.keys = &keys[key], d.values = own.get();
    d.decays = &decays[row * heads + head], d.shares = &shares[row * heads + head];
    d.tokens = count, d.stride = size, d.heads = heads, d.width = width, d.out = out;
    d.state = there ? from : copy, d.reads = there ? values : COLUMNS;
    d.after = !to || full ? to : copy, d.writes = full ? values : COLUMNS, d.between = copy;
    if (count) k.delta(d);
    if (outputs)
      scatter(out, count, some, heads * values, outputs + (row * heads + head) * values + first);
    if (to && (!full || !count)) scatter(copy, width, some, values, to);
  }
  // Copies rows of `some` numbers, `stride` apart, to adjacent rows of COLUMNS, padded with zeros.
  static void gather(const float* from, int64_t stride, int64_t rows, int64_t some, float* to) {
    for (int64_t i = 0; i < rows; i++) {
      std::memcpy(to + i * COLUMNS, from + i * stride, some * sizeof(float));
      std::fill_n(to + i * COLUMNS + some, COLUMNS - some, 0.0f);
    }
  }
  static void scatter(const float* from, int64_t rows, int64_t some, int64_t stride, float* to) {
    for (int64_t i = 0; i < rows; i++)
      std::memcpy(to + i * stride, from + i * COLUMNS, some * sizeof(float));
  }
};

// The outputs of all tokens -> [B, T, H, V], and if requested the state after them.
struct DeltaRule : FloatOperator {
  static constexpr const char* name = "DeltaRule";
  static constexpr Operand inputs[] = {FLOAT, FLOAT, FLOAT, FLOAT, FLOAT, maybe(BOOL)};
  static constexpr Operand results[] = {FLOAT, maybe(FLOAT)};
  using FloatOperator::FloatOperator;
  bool keeps = from.flag("keeps");  // whether the second result exists

  void compute(Call& call) const override {
    DeltaJob job(name, call, false);
    float* y = call.output({job.slots, job.tokens, job.heads, job.values});
    float* after = keeps ? call.output(job.state.shape, 1) : nullptr;
    job.prepare(k, call, true);
    job.run(k, call, y, after);
  }
};

// The state [B, H, K, V] after the first n [B] tokens; n = 0 leaves it unchanged.
struct DeltaAdvance : FloatOperator {
  static constexpr const char* name = "DeltaAdvance";
  static constexpr Operand inputs[] = {FLOAT, FLOAT, FLOAT, FLOAT, FLOAT, INT64, maybe(BOOL)};

  using FloatOperator::FloatOperator;

  void compute(Call& call) const override {
    DeltaJob job(name, call, true);
    float* after = call.output(job.state.shape);
    job.prepare(k, call, false);
    job.run(k, call, nullptr, after);
  }
};

const Registered<CausalConv, LastInputs, DeltaRule, DeltaAdvance> registered;

}  // namespace
