// Products with fp32 weights. Packed ones are [.., panels, K, 32], with the last panel padded.
#pragma once
#include "integer_ops.h"

namespace {

using mtp::FloatPanels;

constexpr int64_t WIDE = 4;  // panels in a task, about as many as a single row uses at once

// fp32 matrices of `outputs` outputs; [.., K, N] in older engines, which do not name `outputs`.
struct FloatWeight {
  const float* values;
  int64_t matrices, inputs, outputs;
  bool packed;

  FloatWeight(const char* op, const Tensor& w, size_t outer, int64_t named) {
    packed = named != 0;
    NEED(w.rank() == outer + (packed ? 3 : 2), op, "weight is " + w.text());
    values = w.data<float>();
    matrices = w.count(0, outer);
    inputs = w.shape[w.rank() - 2];
    outputs = packed ? named : w.last();
    NEED(!packed || (outputs > 0 && w.last() == PANEL && w.shape[outer] == panels()), op,
         std::to_string(outputs) + " outputs in " + w.text() + ", which are no panels of 32");
  }
  int64_t panels() const { return up(outputs, PANEL); }
  // Returns a matrix from one of its panels on.
  FloatPanels from(int64_t matrix, int64_t panel) const {
    if (!packed)
      return {values + matrix * inputs * outputs + panel * PANEL, inputs, PANEL, outputs};
    return {values + (matrix * panels() + panel) * inputs * PANEL, inputs, inputs * PANEL, PANEL};
  }
};

// Distribution of panels over tasks, evenly.
struct Shares {
  int64_t panels, count, step;

  explicit Shares(int64_t panels)
      : panels(panels), count(up(panels, WIDE)), step(up(panels, std::max<int64_t>(count, 1))) {}
  int64_t first(int64_t share) const { return min(panels, share * step); }
  // Returns the number of outputs in a share of `outputs` outputs.
  int64_t columns(int64_t share, int64_t outputs) const {
    return min(outputs, first(share + 1) * PANEL) - min(outputs, first(share) * PANEL);
  }
};

// Returns the rows x [rows, size]; if `around` has a norm, normed and in `own`.
const float* normed(const Kernels& k, Call& call, const Around& around, const Tensor& x,
                    int64_t rows, std::unique_ptr<float[]>& own) {
  if (!around.norm.memory) return x.data<float>();
  int64_t size = x.last();
  own = scratch<float>(rows, size);
  tasks(call, rows, product(4, rows, size),
        [&](int64_t m) { around.row(k, x.data<float>() + m * size, size, &own[m * size]); });
  return own.get();
}

// x [.., K] times a weight -> [.., N]; or x [B, H, T, K] times a weight for each of H heads
// -> [B, H, T, N]; with optional norm and sum (Around).
struct FloatProduct : Usual {
  static constexpr const char* name = "FloatProduct";
  static constexpr ort::Type inputs[] = {ort::FLOAT, ort::FLOAT, ort::FLOAT, ort::FLOAT};
  static constexpr unsigned optional = 1 << 2 | 1 << 3;
  const Kernels& k;
  int64_t outputs;  // of a packed weight; 0 if the weight is not packed
  float epsilon;

  FloatProduct(const Kernels& k, const Attributes& from)
      : k(k), outputs(from.value_or<int64_t>("N", 0)), epsilon(from.value_or("epsilon", 0.0f)) {}

  void compute(Call& call) const {
    Tensor x = call.input(0), given = call.input(1);
    bool heads = given.rank() == (outputs ? 4 : 3);
    FloatWeight w(name, given, heads, outputs);
    bool fits = heads ? x.rank() == 4 && x.shape[1] == w.matrices : x.rank() > 0;
    NEED(fits && x.last() == w.inputs, name, x.text() + " times " + given.text());
    std::vector<int64_t> shape = x.shape;
    shape.back() = w.outputs;
    Around around(name, call, 2, epsilon, x, shape);
    float* y = call.output(shape);
    std::unique_ptr<float[]> own;
    const float* in = normed(k, call, around, x, x.count(0, x.rank() - 1), own);
    int64_t slots = heads ? x.shape[0] : 1;
    int64_t rows = heads ? x.shape[2] : x.count(0, x.rank() - 1);
    int64_t pieces = up(rows, ROWS), matrices = product(slots, w.matrices);
    Shares shares(w.panels());
    int64_t work = product(matrices, rows, w.inputs, w.outputs);
    tasks(call, product(matrices, shares.count, pieces), work, [&](int64_t t) {
      int64_t piece = t % pieces, share = t / pieces % shares.count;
      int64_t matrix = t / pieces / shares.count, first = piece * ROWS;
      int64_t some = min(ROWS, rows - first), panel = shares.first(share);
      const float* from[ROWS];
      float* to[ROWS];
      for (int64_t i = 0; i < some; i++) {
        int64_t row = matrix * rows + first + i;
        from[i] = in + row * w.inputs;
        to[i] = y + row * w.outputs + panel * PANEL;
      }
      int64_t columns = shares.columns(share, w.outputs);
      k.floats(w.from(matrix % w.matrices, panel), columns, some, from, to);
      for (int64_t i = 0; i < some; i++) around.add(to[i] - y, columns, y);
    });
  }
};

// silu(x @ gates) * (x @ ups): x [.., K], a packed weight of N outputs, gates first -> [.., N / 2];
// with an optional norm of x.
struct GatedFloatProduct : Usual {
  static constexpr const char* name = "GatedFloatProduct";
  static constexpr ort::Type inputs[] = {ort::FLOAT, ort::FLOAT, ort::FLOAT};
  static constexpr unsigned optional = 1 << 2;
  const Kernels& k;
  int64_t outputs;
  float epsilon;

  GatedFloatProduct(const Kernels& k, const Attributes& from)
      : k(k), outputs(from.integer("N")), epsilon(from.value_or("epsilon", 0.0f)) {}

  void compute(Call& call) const {
    Tensor x = call.input(0);
    NEED(outputs > 0 && outputs % (2 * PANEL) == 0, name, std::to_string(outputs) + " outputs");
    FloatWeight w(name, call.input(1), 0, outputs);
    NEED(x.rank() > 0 && x.last() == w.inputs, name,
         "rows " + x.text() + " times " + std::to_string(w.inputs) + " inputs");
    int64_t rows = x.count(0, x.rank() - 1), inner = outputs / 2;
    std::vector<int64_t> shape = x.shape;
    shape.back() = inner;
    Around around(name, call, 2, epsilon, x, shape);
    float* y = call.output(shape);
    std::unique_ptr<float[]> own;
    const float* in = normed(k, call, around, x, rows, own);
    Shares shares(inner / PANEL);
    int64_t pieces = up(rows, ROWS);
    tasks(call, product(shares.count, pieces), product(rows, w.inputs, outputs), [&](int64_t t) {
      int64_t share = t / pieces, first = t % pieces * ROWS, some = min(ROWS, rows - first);
      int64_t panel = shares.first(share), columns = shares.columns(share, inner);
      alignas(64) float ups[ROWS][WIDE * PANEL];
      const float* from[ROWS];
      float *gate[ROWS], *up[ROWS];
      for (int64_t i = 0; i < some; i++) {
        from[i] = in + (first + i) * w.inputs;
        gate[i] = y + (first + i) * inner + panel * PANEL;
        up[i] = ups[i];
      }
      k.floats(w.from(0, panel), columns, some, from, gate);
      k.floats(w.from(0, inner / PANEL + panel), columns, some, from, up);
      for (int64_t i = 0; i < some; i++) k.gated(gate[i], ups[i], columns);
    });
  }
};

}  // namespace
