// Rows that many tokens are compressed to.
#include "cache_rows.h"
#include "registry.h"

namespace {

inline float widened(float x) { return x; }
inline float widened(mtp::Bf16 x) { return mtp::wide(x); }
inline void round_to(float x, float* y) { *y = x; }
inline void round_to(float x, mtp::Bf16* y) { *y = mtp::narrow(x); }

// As defined in `plugins/compressed_rows/op.py`: a [B, T, C], compressed [B, 1, S, width], opened
// [B, 1, S', C], start [B], bias [r, C / 2], norm [D], key norm [I] or none, cos and sin
// [B, n, R / 2] -> both caches, which are updated in place if input and output are bound to the
// same memory.
template <class C>
struct CompressedRows : FloatOperator {
  static constexpr const char* name = name_of<C>("CompressedRows", "CompressedRowsBf16", "");
  static constexpr Operand inputs[] = {FLOAT, TYPE<C>,      TYPE<C>, INT64, FLOAT,
                                       FLOAT, maybe(FLOAT), FLOAT,   FLOAT};
  static constexpr Operand results[] = {TYPE<C>, TYPE<C>};
  using FloatOperator::FloatOperator;
  int64_t group = from.integer("group");
  float epsilon = from.real("epsilon");

  void compute(Call& call) const {
    Tensor a = call.input(0), held = call.input(1), open = call.input(2), start = call.input(3);
    Tensor bias = call.input(4), cos = call.input(7);
    std::vector<Tensor> norms{call.input(5)};
    if (Tensor more = call.input(6, true); more.memory) norms.push_back(more);
    int64_t windows = static_cast<int64_t>(norms.size()), size = 0, least = MOST;
    for (const Tensor& norm : norms) {
      REQUIRE(norm.rank() == 1, name, "norm " + norm.text());
      size += norm.shape[0], least = min(least, norm.shape[0]);
    }
    REQUIRE(a.rank() == 3 && held.rank() == 4 && open.rank() == 4 && bias.rank() == 2 &&
                cos.rank() == 3,
            name, a.text() + " into " + held.text() + " and " + open.text());
    int64_t slots = a.shape[0], tokens = a.shape[1], width = a.shape[2], ratio = bias.shape[0];
    int64_t rows = held.shape[2], unit = held.shape[3], ring = open.shape[2];
    Angles angles(name, cos, call.input(8), slots, cos.shape[1]);
    REQUIRE(width == 2 * windows * size && bias.last() == width / 2 && 2 * angles.half <= least &&
                group > 0 && group <= ratio,
            name, a.text() + " with bias " + bias.text() + " and angles " + cos.text());
    REQUIRE(held.is({slots, 1, rows, unit}) && size <= product(group, unit) &&
                open.is({slots, 1, ring, width}) && tokens <= ring && start.is({slots}),
            name, a.text() + " into " + held.text() + " and " + open.text());
    C* kept = call.output<C>(held.shape);
    C* opened = call.output<C>(open.shape, 1);
    if (kept != held.memory) std::memcpy(kept, held.memory, held.count() * sizeof(C));
    if (opened != open.memory) std::memcpy(opened, open.memory, open.count() * sizeof(C));
    struct Row {
      int64_t slot, number, angle;
    };
    std::vector<Row> made;
    for (int64_t slot = 0; slot < slots; slot++) {
      int64_t at = start.data<int64_t>()[slot];
      if (at < 0) continue;
      REQUIRE(at <= rows - tokens && (at + tokens) / ratio - at / ratio <= cos.shape[1], name,
              std::to_string(tokens) + " tokens from " + std::to_string(at) + " on in " +
                  held.text() + " with angles " + cos.text());
      for (int64_t n = at / ratio; n < (at + tokens) / ratio; n++)
        made.push_back({slot, n, slot * cos.shape[1] + n - at / ratio});
    }
    run_tasks(call, slots * tokens, a.count(), [&](int64_t m) {
      int64_t slot = m / tokens, at = start.data<int64_t>()[slot];
      if (at < 0) return;
      C* to = opened + (slot * ring + (at + m % tokens) % ring) * width;
      for (int64_t i = 0; i < width; i++) round_to(a.data<float>()[m * width + i], to + i);
    });
    int64_t count = static_cast<int64_t>(made.size());
    run_tasks(call, count, product(count, ratio, windows, width, 8), [&](int64_t i) {
      const Row& row = made[i];
      auto whole = scratch<float>(group, unit);
      std::fill_n(whole.get(), group * unit, 0.0f);
      const C* own = opened + row.slot * ring * width;
      int64_t at = 0, column = 0;
      for (const Tensor& norm : norms) {
        int64_t own_size = norm.shape[0], fixed = own_size - 2 * angles.half;
        float* part = &whole[at];
        mix_tokens(own, ring, width, windows, bias, row.number, column, own_size, part);
        k.norm(part, norm.data<float>(), own_size, epsilon, part);
        angles.rotate_row(row.angle, part + fixed, true, part + fixed);
        at += own_size, column += windows * own_size;
      }
      C* to = kept + (row.slot * rows + (row.number + 1) * ratio - group) * unit;
      for (int64_t j = 0; j < group * unit; j++) round_to(whole[j], to + j);
    });
  }

 private:
  // Sums the tokens' values, weighted by a softmax of their gates for each of `size` channels.
  // column: where the channels of the first window begin.
  void mix_tokens(const C* ring, int64_t rows, int64_t width, int64_t windows, const Tensor& bias,
                  int64_t number, int64_t column, int64_t size, float* y) const {
    int64_t ratio = bias.shape[0], all = windows * ratio;
    auto gates = scratch<float>(all, size);
    auto tops = scratch<float>(2, size);
    float *top = tops.get(), *total = top + size;
    std::fill_n(top, size, -INFINITY);
    int64_t first = number ? 0 : all - ratio;  // before the first token there is no window
    auto read = [&](int64_t token) {
      int64_t position = (number + 1 - windows) * ratio + token;
      return ring + position % rows * width + column + token / ratio * size;
    };
    for (int64_t t = first; t < all; t++) {
      const C* own = read(t) + width / 2;
      const float* added = bias.data<float>() + t % ratio * (width / 2) + column + t / ratio * size;
      for (int64_t c = 0; c < size; c++) {
        float gate = widened(own[c]) + added[c];
        gates[t * size + c] = gate;
        top[c] = gate > top[c] ? gate : top[c];
      }
    }
    std::fill_n(y, size, 0.0f), std::fill_n(total, size, 0.0f);
    for (int64_t t = first; t < all; t++) {
      float* weights = &gates[t * size];
      const C* values = read(t);
      for (int64_t c = 0; c < size; c++) weights[c] -= top[c];
      k.weigh(weights, size, 0.0f, 1.0f, weights);
      for (int64_t c = 0; c < size; c++) {
        total[c] += weights[c];
        y[c] += weights[c] * widened(values[c]);
      }
    }
    for (int64_t c = 0; c < size; c++) y[c] /= total[c];
  }
};

const Registered<CompressedRows<float>, CompressedRows<mtp::Bf16>> registered;

}  // namespace
