// Products with fp32 or integer weights, and an embedding.
#include "registry.h"
#include "weights.h"

namespace {

// x [.., K] times a weight -> [.., N]; or x [B, H, T, K] times a weight for each of H heads
// -> [B, H, T, N]; with optional norm and sum (NormAndAdd). groups: x [.., groups * K], of which
// each group of outputs takes a part.
struct Product : FloatOperator {
  static constexpr const char* name = "Product";
  static constexpr Operand inputs[] = {FLOAT, ANY, maybe(FLOAT16), maybe(FLOAT), maybe(FLOAT)};
  using FloatOperator::FloatOperator;
  int64_t outputs = from.value_or<int64_t>("N", 0);  // of a packed weight; 0 if it is not packed
  int64_t groups = from.value_or<int64_t>("groups", 1);
  float epsilon = from.value_or("epsilon", 0.0f);

  void compute(Call& call) const {
    Tensor x = call.input(0), values = call.input(1);
    bool heads = values.rank() == (outputs ? 4 : 3);
    Weight weight = weight_of(name, values, call.input(2, true), heads, outputs);
    std::visit(
        [&](const auto& w) {
          groups == 1 ? multiply(call, x, w, heads) : multiply_groups(call, x, w);
        },
        weight);
  }

 private:
  // Multiplies whole panels; those at the border of two groups are multiplied in both.
  template <class W>
  void multiply_groups(Call& call, const Tensor& x, const W& w) const {
    REQUIRE(x.rank() > 0 && groups > 0 && w.matrices == 1 && w.outputs % groups == 0 &&
                x.last() == product(groups, w.inputs),
            name,
            "rows " + x.text() + " times " + std::to_string(groups) + " groups of " +
                std::to_string(w.inputs) + " inputs");
    REQUIRE(!call.input(3, true).memory && !call.input(4, true).memory, name,
            "groups with a norm or a sum");
    float* y = call.output(x.with_last(w.outputs));
    int64_t rows = x.rows(), each = w.outputs / groups, pieces = ceil_div(rows, ROWS);
    int64_t most = min(ceil_div(each, PANEL) + 1, w.panels);  // panels of a group
    int64_t wide = W::share(most), shares = ceil_div(most, wide);
    Inputs<W> inputs(k, call, w, x.data<float>(), product(rows, groups));
    run_tasks(call, product(groups, shares, pieces), W::work(rows, product(w.inputs, w.outputs)),
              [&](int64_t t) {
                int64_t group = t / pieces / shares, first = t % pieces * ROWS;
                int64_t some = min(ROWS, rows - first), begin = group * each, end = begin + each;
                int64_t panel = begin / PANEL + t / pieces % shares * wide, column = panel * PANEL;
                int64_t last = min(ceil_div(end, PANEL), panel + wide) * PANEL;
                if (last <= column) return;
                alignas(64) float own[ROWS][WIDE * PANEL];
                const typename W::Input* in[ROWS] = {};
                float* out[ROWS] = {};
                for (int64_t i = 0; i < some; i++)
                  in[i] = inputs[(first + i) * groups + group], out[i] = own[i];
                w.multiply(k, 0, panel, min(last, w.outputs) - column, some, in, out);
                begin = std::max(begin, column), end = min(end, last);
                for (int64_t i = 0; i < some; i++)
                  std::copy_n(own[i] + begin - column, end - begin,
                              y + (first + i) * w.outputs + begin);
              });
  }

  template <class W>
  void multiply(Call& call, const Tensor& x, const W& w, bool heads) const {
    bool fits = heads ? x.rank() == 4 && x.shape[1] == w.matrices : x.rank() > 0;
    REQUIRE(fits && x.last() == w.inputs, name,
            "rows " + x.text() + " times " + std::to_string(w.inputs) + " inputs");
    std::vector<int64_t> shape = x.with_last(w.outputs);
    NormAndAdd around(name, call, 3, epsilon, x, shape);
    float* y = call.output(shape);
    int64_t all = x.rows(), rows = heads ? x.shape[2] : all;
    int64_t matrices = heads ? product(x.shape[0], w.matrices) : 1;
    Inputs<W> inputs(k, call, w, x.data<float>(), all, &around);
    by_tiles(call, inputs, matrices, rows, w.outputs, W::work(all, product(w.inputs, w.outputs)), y,
             [&](int64_t matrix, int64_t panel, int64_t columns, int64_t some, auto in, auto out) {
               w.multiply(k, matrix % w.matrices, panel, columns, some, in, out);
               for (int64_t i = 0; i < some; i++) around.add(out[i] - y, columns, y);
             });
  }
};

// silu(x @ gates) * (x @ ups), or with gelu; both are clamped if there is a limit: x [.., K], a
// packed weight of N outputs, gates first
// -> [.., N / 2]; with an optional norm of x.
struct GatedProduct : FloatOperator {
  static constexpr const char* name = "GatedProduct";
  static constexpr Operand inputs[] = {FLOAT, ANY, maybe(FLOAT16), maybe(FLOAT)};
  using FloatOperator::FloatOperator;
  int64_t outputs = from.integer("N");
  float epsilon = from.value_or("epsilon", 0.0f);
  decltype(k.gated) gated = from.value_or<int64_t>("gelu", 0) ? k.gated_gelu : k.gated;
  float limit = from.value_or("limit", 0.0f);

  void compute(Call& call) const {
    Tensor x = call.input(0);
    REQUIRE(outputs > 0 && outputs % (2 * PANEL) == 0, name, std::to_string(outputs) + " outputs");
    Weight weight = weight_of(name, call.input(1), call.input(2, true), 0, outputs);
    std::visit([&](const auto& w) { multiply(call, x, w); }, weight);
  }

 private:
  template <class W>
  void multiply(Call& call, const Tensor& x, const W& w) const {
    REQUIRE(x.rank() > 0 && x.last() == w.inputs, name,
            "rows " + x.text() + " times " + std::to_string(w.inputs) + " inputs");
    int64_t rows = x.rows(), inner = outputs / 2;
    std::vector<int64_t> shape = x.with_last(inner);
    NormAndAdd around(name, call, 3, epsilon, x, shape);
    float* y = call.output(shape);
    Inputs<W> inputs(k, call, w, x.data<float>(), rows, &around);
    by_tiles(call, inputs, 1, rows, inner, W::work(rows, product(w.inputs, outputs)), y,
             [&](int64_t, int64_t panel, int64_t columns, int64_t some, auto in, auto gates) {
               alignas(64) float ups[ROWS][WIDE * PANEL];
               float* out[ROWS] = {};
               for (int64_t i = 0; i < some; i++) out[i] = ups[i];
               w.multiply(k, 0, panel, columns, some, in, gates);
               w.multiply(k, 0, inner / PANEL + panel, columns, some, in, out);
               for (int64_t i = 0; i < some; i++) {
                 clamp_gates(gates[i], ups[i], columns, limit);
                 gated(gates[i], ups[i], columns);
               }
             });
  }
};

// Rows of an embedding: tokens [..] and a table [V, K], or integers [V, K / 32, 32 or 16] with
// scales [V, K / 32] -> [.., K]; or a packed weight of N = V outputs.
struct Embedding : FloatOperator {
  static constexpr const char* name = "Embedding";
  static constexpr Operand inputs[] = {INT64, ANY, maybe(FLOAT16)};
  using FloatOperator::FloatOperator;
  int64_t packed = from.value_or<int64_t>("N", 0);

  void compute(Call& call) const {
    Tensor table = call.input(1), scales = call.input(2, true);
    if (packed) {
      Weight weight = weight_of(name, table, scales, 0, packed);
      return std::visit(
          [&](const auto& w) {
            look_up(call, packed, w.inputs, [&](int64_t id, float* y) { w.read(name, id, y); });
          },
          weight);
    }
    bool floats = table.type == FLOAT;
    bool fits = floats ? table.rank() == 2 && !scales.memory
                       : table.type == UINT8 && table.rank() == 3 &&
                             (table.last() == BLOCK || table.last() == BLOCK / 2) &&
                             scales.is({table.shape[0], table.shape[1]});
    REQUIRE(fits, name, "values " + table.text() + " and scales " + scales.text());
    int64_t width = floats ? table.last() : product(table.shape[1], BLOCK);
    bool nibbles = table.last() < BLOCK;
    look_up(call, table.shape[0], width, [&](int64_t id, float* y) {
      if (floats) std::copy_n(table.data<float>() + id * width, width, y);
      for (int64_t i = id * width; !floats && i < (id + 1) * width; i++) {
        int value =
            nibbles ? table.data<uint8_t>()[i / 2] >> (i % 2 * 4) & 15 : table.data<uint8_t>()[i];
        float scale = mtp::half(scales.data<uint16_t>()[i / BLOCK]);
        *y++ = static_cast<float>(value - (nibbles ? 8 : 128)) * scale;
      }
    });
  }

 private:
  template <class F>
  static void look_up(Call& call, int64_t vocabulary, int64_t width, const F& read) {
    Tensor tokens = call.input(0);
    std::vector<int64_t> shape = tokens.shape;
    shape.push_back(width);
    float* y = call.output(shape);
    for (int64_t m = 0; m < tokens.count(); m++, y += width) {
      int64_t id = tokens.data<int64_t>()[m];
      REQUIRE(id >= 0 && id < vocabulary, name,
              "no token " + std::to_string(id) + " of " + std::to_string(vocabulary));
      read(id, y);
    }
  }
};

const Registered<Product, GatedProduct, Embedding> registered;

}  // namespace
