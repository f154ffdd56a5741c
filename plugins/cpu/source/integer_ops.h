// Products with integer weights, and an int8 embedding.
#pragma once
#include "half.h"
#include "op.h"

namespace {

constexpr int64_t INTEGERS = 4;      // integer multiplications in the time of an fp32 one; also the
                                     // rows up to which reading the weight takes longest
constexpr int64_t CACHED = 1 << 19;  // bytes of quantised rows that stay in a core's own cache

// Returns the work of a product with an integer weight, in fp32 multiplications.
int64_t integers(int64_t rows, int64_t numbers) {
  return product(std::max(rows, INTEGERS), numbers) / INTEGERS;
}

// An integer weight from an operator's operands: values [.., panels, blocks, bytes] and scales
// [.., panels, blocks, 32] fp16, for one or more matrices of `outputs` outputs.
struct Weight {
  const uint8_t* values;
  const uint16_t* scales;
  int64_t matrices, panels, blocks, bits;

  Weight(const char* op, const Tensor& v, const Tensor& s, size_t rank, int64_t outputs) {
    NEED(v.rank() == rank && s.rank() == rank, op, "weight is " + v.text() + ", " + s.text());
    bits = v.last() / 128;
    bool alike = std::equal(v.shape.begin(), v.shape.end() - 1, s.shape.begin());
    NEED(alike && s.last() == PANEL && (bits == 4 || bits == 8) && v.last() == 128 * bits, op,
         "no packed weight has values " + v.text() + " and scales " + s.text());
    values = v.data<uint8_t>();
    scales = s.data<uint16_t>();
    panels = v.shape[rank - 3];
    blocks = v.shape[rank - 2];
    matrices = v.count(0, rank - 3);
    NEED(outputs > 0 && panels == up(outputs, PANEL) && blocks > 0, op,
         std::to_string(outputs) + " outputs in " + std::to_string(panels) + " panels of 32, " +
             std::to_string(blocks) + " blocks of inputs");
  }
  Panel panel(int64_t matrix, int64_t number) const {
    int64_t first = (matrix * panels + number) * blocks;
    return {values + first * 128 * bits, scales + first * PANEL, blocks};
  }
  int64_t inputs() const { return blocks * BLOCK; }
};

// Multiplies rows by a panel; the first `columns` of its 32 outputs go to each of `out`.
void multiply(const Kernels& k, const Weight& w, const Panel& panel, int64_t columns, int64_t rows,
              const InputBlock* const* in, float* const* out) {
  auto whole = w.bits == 4 ? k.panel4 : k.panel8;
  if (columns == PANEL) return whole(panel, rows, in, out);
  constexpr int64_t SOME = 16;
  alignas(64) float buffer[SOME][PANEL];
  float* to[SOME];
  for (int64_t i = 0; i < SOME; i++) to[i] = buffer[i];
  for (int64_t m = 0; m < rows; m += SOME) {
    int64_t some = min(SOME, rows - m);
    whole(panel, some, in + m, to);
    for (int64_t i = 0; i < some; i++) std::memcpy(out[m + i], to[i], columns * sizeof(float));
  }
}

// Optional work around a product x [.., K] -> y. Operand `place` is the weight [K] of an RMSNorm of
// x before the product. The operand after it is added to y; it has y's shape, or one number for
// each output.
struct Around {
  Tensor norm, sum;
  float epsilon;
  int64_t width;
  bool bias;

  Around(const char* op, Call& call, size_t place, float epsilon, const Tensor& x,
         const std::vector<int64_t>& y)
      : norm(call.input(place, true)), sum(call.input(place + 1, true)), epsilon(epsilon) {
    NEED(!norm.memory || norm.shape == std::vector<int64_t>{x.last()}, op,
         "rows " + x.text() + ", norm " + norm.text());
    bias = sum.shape == std::vector<int64_t>{y.back()};
    width = y.back();
    NEED(!sum.memory || bias || sum.shape == y, op, "the sum with " + sum.text());
  }
  // Returns the input row of the product, which is written to `own` if there is a norm.
  const float* row(const Kernels& k, const float* x, int64_t size, float* own) const {
    if (!norm.memory) return x;
    k.norm(x, norm.data<float>(), size, epsilon, own);
    return own;
  }
  // Adds the operand to `count` numbers of the result, from y[place] on.
  void add(int64_t place, int64_t count, float* y) const {
    if (!sum.memory) return;
    const float* added = sum.data<float>() + (bias ? place % width : place);
    for (int64_t i = 0; i < count; i++) y[place + i] += added[i];
  }
};

std::unique_ptr<InputBlock[]> rounded(const Kernels& k, Call& call, const float* x, int64_t rows,
                                      int64_t blocks, const Around* around = nullptr) {
  auto blocks_of = scratch<InputBlock>(rows, blocks);
  int64_t size = blocks * BLOCK;
  tasks(call, rows, product(rows, size, 4), [&](int64_t m) {
    bool normed = around && around->norm.memory;
    auto own = scratch<float>(normed ? size : 0);
    const float* row = x + m * size;
    k.quantise(normed ? around->row(k, row, size, own.get()) : row, blocks, &blocks_of[m * blocks]);
  });
  return blocks_of;
}
// x [.., K] times an integer weight -> [.., outputs], with optional norm and sum (Around).
struct Product : Usual {
  static constexpr const char* name = "Product";
  static constexpr ort::Type inputs[] = {ort::FLOAT, ort::UINT8, ort::FLOAT16, ort::FLOAT,
                                         ort::FLOAT};
  static constexpr unsigned optional = 1 << 3 | 1 << 4;
  const Kernels& k;
  int64_t outputs;
  float epsilon;

  Product(const Kernels& k, const Attributes& from)
      : k(k), outputs(from.integer("N")), epsilon(from.value_or("epsilon", 0.0f)) {}

  void compute(Call& call) const {
    Tensor x = call.input(0);
    Weight w(name, call.input(1), call.input(2), 3, outputs);
    NEED(x.rank() > 0 && x.last() == w.inputs(), name,
         "rows " + x.text() + " times " + std::to_string(w.inputs()) + " inputs");
    int64_t rows = x.count(0, x.rank() - 1);
    std::vector<int64_t> shape = x.shape;
    shape.back() = outputs;
    Around around(name, call, 3, epsilon, x, shape);
    float* y = call.output(shape);
    auto blocks = rounded(k, call, x.data<float>(), rows, w.blocks, &around);
    // A task takes some panels, and at a time as many rows as stay in its core's cache.
    int64_t step = std::max<int64_t>(1, min<int64_t>(8, w.panels / 16));
    int64_t most = std::max<int64_t>(48, CACHED / (w.blocks * int64_t{sizeof(InputBlock)}));
    tasks(call, up(w.panels, step), integers(rows, product(w.inputs(), outputs)), [&](int64_t t) {
      auto in = scratch<const InputBlock*>(min(rows, most));
      auto out = scratch<float*>(min(rows, most));
      for (int64_t first = 0; first < rows; first += most) {
        int64_t some = min(most, rows - first);
        for (int64_t i = 0; i < some; i++) in[i] = &blocks[(first + i) * w.blocks];
        for (int64_t p = t * step; p < min(w.panels, (t + 1) * step); p++) {
          int64_t columns = min(PANEL, outputs - p * PANEL);
          for (int64_t i = 0; i < some; i++) out[i] = y + (first + i) * outputs + p * PANEL;
          multiply(k, w, w.panel(0, p), columns, some, in.get(), out.get());
          for (int64_t i = 0; i < some; i++) around.add(out[i] - y, columns, y);
        }
      }
    });
  }
};

// silu(x @ gates) * (x @ ups): x [.., K], a weight of N outputs, gates first -> [.., N / 2]; with
// an optional norm of x.
struct GatedProduct : Usual {
  static constexpr const char* name = "GatedProduct";
  static constexpr ort::Type inputs[] = {ort::FLOAT, ort::UINT8, ort::FLOAT16, ort::FLOAT};
  static constexpr unsigned optional = 1 << 3;
  const Kernels& k;
  int64_t outputs;
  float epsilon;

  GatedProduct(const Kernels& k, const Attributes& from)
      : k(k), outputs(from.integer("N")), epsilon(from.value_or("epsilon", 0.0f)) {}

  void compute(Call& call) const {
    Tensor x = call.input(0);
    Weight w(name, call.input(1), call.input(2), 3, outputs);
    NEED(x.rank() > 0 && x.last() == w.inputs() && outputs % (2 * PANEL) == 0, name,
         "rows " + x.text() + " times " + std::to_string(w.inputs()) + " inputs, " +
             std::to_string(outputs) + " outputs");
    int64_t rows = x.count(0, x.rank() - 1), inner = outputs / 2, panels = w.panels / 2;
    std::vector<int64_t> shape = x.shape;
    shape.back() = inner;
    Around around(name, call, 3, epsilon, x, shape);
    float* y = call.output(shape);
    auto blocks = rounded(k, call, x.data<float>(), rows, w.blocks, &around);
    int64_t step = std::max<int64_t>(1, min<int64_t>(4, panels / 16));
    tasks(call, up(panels, step), integers(rows, product(w.inputs(), outputs)), [&](int64_t t) {
      for (int64_t first = 0; first < rows; first += SOME)
        for (int64_t p = t * step; p < min(panels, (t + 1) * step); p++)
          panel(w, p, panels, min(SOME, rows - first), &blocks[first * w.blocks],
                y + first * inner + p * PANEL);
    });
  }

 private:
  static constexpr int64_t SOME = 48;

  void panel(const Weight& w, int64_t p, int64_t panels, int64_t rows, const InputBlock* blocks,
             float* y) const {
    alignas(64) float ups[SOME][PANEL];
    const InputBlock* in[SOME];
    float *gate[SOME], *up[SOME];
    for (int64_t i = 0; i < rows; i++) {
      in[i] = blocks + i * w.blocks;
      gate[i] = y + i * panels * PANEL;
      up[i] = ups[i];
    }
    multiply(k, w, w.panel(0, p), PANEL, rows, in, gate);
    multiply(k, w, w.panel(0, panels + p), PANEL, rows, in, up);
    for (int64_t i = 0; i < rows; i++) k.gated(gate[i], up[i], PANEL);
  }
};

// Rows of an int8 embedding: tokens [..], values [V, K / 32, 32], scales [V, K / 32] -> [.., K].
struct Embedding : Usual {
  static constexpr const char* name = "Embedding";
  static constexpr ort::Type inputs[] = {ort::INT64, ort::UINT8, ort::FLOAT16};

  Embedding(const Kernels&, const Attributes&) {}

  void compute(Call& call) const {
    Tensor tokens = call.input(0), values = call.input(1);
    Tensor scales = call.input(2);
    bool fit = values.rank() == 3 && values.last() == BLOCK && scales.rank() == 2 &&
               std::equal(scales.shape.begin(), scales.shape.end(), values.shape.begin());
    NEED(fit, name, "values " + values.text() + " and scales " + scales.text());
    int64_t vocabulary = values.shape[0], blocks = values.shape[1];
    std::vector<int64_t> shape = tokens.shape;
    shape.push_back(blocks * BLOCK);
    float* y = call.output(shape);
    for (int64_t m = 0; m < tokens.count(0, tokens.rank()); m++) {
      int64_t id = tokens.data<int64_t>()[m];
      NEED(id >= 0 && id < vocabulary, name,
           "no token " + std::to_string(id) + " of " + std::to_string(vocabulary));
      for (int64_t b = id * blocks; b < (id + 1) * blocks; b++) {
        float scale = mtp::half(scales.data<uint16_t>()[b]);
        for (int64_t i = 0; i < BLOCK; i++)
          *y++ = static_cast<float>(values.data<uint8_t>()[b * BLOCK + i] - 128) * scale;
      }
    }
  }
};

}  // namespace
