// Weights of products, in fp32 or in integers, and the norms and sums around products.
#pragma once
#include <variant>

#include "fetch.h"
#include "op.h"

namespace {

using mtp::FloatPanels;

constexpr int64_t WIDE = 4;  // most panels in a task, about as many as one fp32 row uses at once
constexpr int64_t INTEGERS = 4;  // integer multiplications in the time of an fp32 one; also the
                                 // number of rows up to which reading the weight limits speed

// The sizes of a weight: one or more matrices of `outputs` outputs in panels of 32.
struct Matrices {
  int64_t matrices, inputs, outputs, panels;
};

// Optional work around a product x [.., K] -> y. Operand `place` is the weight [K] of an RMSNorm of
// x before the product. The operand after it is added to y; it has y's shape, or one number for
// each output.
struct NormAndAdd {
  Tensor norm, sum;
  float epsilon;
  int64_t width;
  bool bias;

  NormAndAdd(const char* op, Call& call, size_t place, float epsilon, const Tensor& x,
             const std::vector<int64_t>& y)
      : norm(call.input(place, true)), sum(call.input(place + 1, true)), epsilon(epsilon) {
    REQUIRE(!norm.memory || norm.is({x.last()}), op, "rows " + x.text() + ", norm " + norm.text());
    bias = sum.is({y.back()});
    width = y.back();
    REQUIRE(!sum.memory || bias || sum.shape == y, op, "the sum with " + sum.text());
  }
  // Adds the operand to `count` numbers of the result, from y[place] on.
  void add(int64_t place, int64_t count, float* y) const {
    if (!sum.memory) return;
    const float* added = sum.data<float>() + (bias ? place % width : place);
    for (int64_t i = 0; i < count; i++) y[place + i] += added[i];
  }
};

// fp32 matrices [.., panels, K, 32]; or [.., K, N], not packed, if the operator names no outputs.
struct FloatWeight : Matrices {
  using Input = float;                    // rows are multiplied as they are
  static constexpr int64_t UNIT = PANEL;  // Inputs that hold 32 numbers
  const float* values;
  bool packed;

  FloatWeight(const char* op, const Tensor& w, size_t outer, int64_t named)
      : values(w.data<float>()), packed(named != 0) {
    REQUIRE(w.rank() == outer + (packed ? 3 : 2), op, "weight is " + w.text());
    matrices = w.count(0, outer);
    inputs = w.shape[w.rank() - 2];
    outputs = packed ? named : w.last();
    panels = ceil_div(outputs, PANEL);
    REQUIRE(!packed || (outputs > 0 && w.last() == PANEL && w.shape[outer] == panels), op,
            std::to_string(outputs) + " outputs in " + w.text() + ", which are no panels of 32");
  }
  int64_t size() const { return inputs; }  // of a row, in Inputs
  static int64_t share(int64_t) { return WIDE; }
  static int64_t work(int64_t rows, int64_t numbers) { return product(rows, numbers); }
  static const float* as_given(const float* x) { return x; }
  static void convert(const Kernels&, const float* x, int64_t count, float* to) {
    std::copy_n(x, count, to);
  }
  // Multiplies up to ROWS rows by `columns` outputs of a matrix, from one of its panels on.
  void multiply(const Kernels& k, int64_t matrix, int64_t panel, int64_t columns, int64_t rows,
                const float* const* in, float* const* out) const {
    FloatPanels from{values + (matrix * panels + panel) * inputs * PANEL, inputs, inputs * PANEL,
                     PANEL};
    if (!packed)
      from = {values + matrix * inputs * outputs + panel * PANEL, inputs, PANEL, outputs};
    k.floats(from, columns, rows, in, out);
  }
  void fetch(int64_t matrix) const {
    int64_t each = packed ? panels * inputs * PANEL : inputs * outputs;
    mtp::fetch(values + matrix * each, static_cast<size_t>(each) * sizeof(float));
  }
  // Reads the weights of an output of a single packed matrix.
  void read(const char*, int64_t output, float* y) const {
    const float* from = values + (output / PANEL * inputs) * PANEL + output % PANEL;
    for (int64_t i = 0; i < inputs; i++) y[i] = from[i * PANEL];
  }
};

// Integers [.., panels, blocks, 128 * bits] with fp16 scales [.., panels, blocks, 32], or
// ZEROED, SHIFTED or POWERS (Panel). The last panels of an int4 matrix may be int8: each has the
// bytes of two, as the number of scales tells.
struct IntegerWeight : Matrices {
  using Input = InputBlock;           // rows are rounded to int8 in blocks
  static constexpr int64_t UNIT = 1;  // Inputs that hold 32 numbers
  const uint8_t* values;
  const uint16_t* scales;
  int64_t wide;                 // of a block's scales
  int64_t blocks, bits, fours;  // fours: panels before those that are int8 in an int4 matrix

  IntegerWeight(const char* op, const Tensor& v, const Tensor& s, size_t outer, int64_t named)
      : values(v.data<uint8_t>()),
        scales(s.data<uint16_t>()),
        wide(s.last()),
        bits(v.last() / 128) {
    REQUIRE(v.rank() == outer + 3 && s.rank() == outer + 3, op,
            "weight is " + v.text() + ", " + s.text());
    panels = s.shape[outer];
    int64_t eights = v.shape[outer] - panels;
    fours = panels - eights;
    bool mixed = bits == 4 && outer == 0 && eights > 0 && fours >= 0;
    bool alike = std::equal(v.shape.begin(), v.shape.begin() + outer, s.shape.begin()) &&
                 v.shape[outer + 1] == s.shape[outer + 1] && (eights == 0 || mixed);
    bool scaled = wide == PANEL || wide == mtp::ZEROED || wide == mtp::SHIFTED ||
                  (wide == mtp::POWERS && bits == 4 && eights == 0);
    REQUIRE(alike && scaled && (bits == 4 || bits == 8) && v.last() == 128 * bits, op,
            "no packed weight has values " + v.text() + " and scales " + s.text());
    blocks = v.shape[outer + 1];
    matrices = v.count(0, outer);
    inputs = blocks * BLOCK;
    outputs = named;
    REQUIRE(outputs > 0 && panels == ceil_div(outputs, PANEL) && blocks > 0, op,
            std::to_string(outputs) + " outputs in " + std::to_string(panels) + " panels of 32, " +
                std::to_string(blocks) + " blocks of inputs");
  }
  int64_t size() const { return blocks; }
  static int64_t share(int64_t panels) { return std::max<int64_t>(1, min(WIDE, panels / 16)); }
  static int64_t work(int64_t rows, int64_t numbers) {
    return product(std::max(rows, INTEGERS), numbers) / INTEGERS;
  }
  static const InputBlock* as_given(const float*) { return nullptr; }
  static void convert(const Kernels& k, const float* x, int64_t count, InputBlock* to) {
    k.quantise(x, count / BLOCK, 1.0f, 127.0f, to);
  }
  void multiply(const Kernels& k, int64_t matrix, int64_t panel, int64_t columns, int64_t rows,
                const InputBlock* const* in, float* const* out) const {
    alignas(64) float last[ROWS][PANEL];
    float* to[ROWS];
    for (int64_t n = 0; n < columns; n += PANEL, panel++) {
      int64_t first = (matrix * panels + panel) * blocks, some = min(PANEL, columns - n);
      for (int64_t i = 0; i < rows; i++) to[i] = some == PANEL ? out[i] + n : last[i];
      bool eight = bits == 8 || panel >= fours;
      int64_t place = first + std::max<int64_t>(0, panel - fours) * blocks;
      mtp::Panel all{values + place * 128 * bits, scales + first * wide, blocks, wide};
      (eight ? k.panel8 : k.panel4)(all, rows, in, to);
      for (int64_t i = 0; some < PANEL && i < rows; i++) std::copy_n(last[i], some, out[i] + n);
    }
  }
  // A matrix among several has one format.
  void fetch(int64_t matrix) const {
    auto each = static_cast<size_t>(panels * blocks);
    mtp::fetch(values + matrix * each * 128 * bits, each * 128 * bits);
    mtp::fetch(scales + matrix * each * wide, each * wide * sizeof(uint16_t));
  }
  // The same as FloatWeight's. A line of 64 bytes has four inputs of 16 outputs.
  void read(const char* op, int64_t output, float* y) const {
    REQUIRE(bits == 8 || fours == panels, op, "rows of a weight in two formats");
    int64_t lane = output % PANEL, panel = output / PANEL * blocks;
    for (int64_t i = 0; i < inputs; i++) {
      int64_t block = panel + i / BLOCK, four = i % BLOCK / 4 * bits / 8;
      int64_t place = (four * 2 + lane / 16) * 64 + lane % 16 * 4 + i % 4;
      int value = values[block * 128 * bits + place];
      if (bits == 4) value = i % 8 < 4 ? value & 15 : value >> 4;
      const uint16_t* own = scales + block * wide;
      if (wide == mtp::POWERS) {
        float twice = static_cast<float>(mtp::E2M1[value] - mtp::E2M1_ZERO);
        y[i] = twice * 0.5f * mtp::power(reinterpret_cast<const uint8_t*>(own)[lane]);
        continue;
      }
      float scale = mtp::half(own[lane]);
      if (wide == mtp::SHIFTED) {
        y[i] = static_cast<float>(value) * scale + mtp::half(own[PANEL + lane]);
        continue;
      }
      value -= bits == 8 ? 128 : 8;
      if (wide == mtp::ZEROED) value -= reinterpret_cast<const int8_t*>(own + PANEL)[lane];
      y[i] = static_cast<float>(value) * scale;
    }
  }
};

using Weight = std::variant<FloatWeight, IntegerWeight>;

// Returns the weight of operands `values` and `scales`, with `outer` axes before a matrix's axes.
inline Weight weight_of(const char* op, const Tensor& values, const Tensor& scales, size_t outer,
                        int64_t outputs) {
  if (values.type == ort::FLOAT) {
    REQUIRE(!scales.memory, op, "scales of fp32");
    return FloatWeight(op, values, outer, outputs);
  }
  REQUIRE(values.type == ort::UINT8 && scales.memory, op, "no packed weight");
  return IntegerWeight(op, values, scales, outer, outputs);
}

// The rows of a product, normed and in the form that the weight is multiplied by.
template <class W>
struct Inputs {
  using Input = typename W::Input;
  int64_t size;
  std::unique_ptr<Input[]> own;
  const Input* rows;

  Inputs(const Kernels& k, Call& call, const W& w, const float* x, int64_t count,
         const NormAndAdd* around = nullptr)
      : size(w.size()) {
    const float* norm = around && around->norm.memory ? around->norm.data<float>() : nullptr;
    rows = norm ? nullptr : W::as_given(x);
    if (rows) return;
    own = scratch<Input>(count, size);
    rows = own.get();
    run_tasks(call, count, product(count, w.inputs, 4), [&](int64_t m) {
      const float* row = x + m * w.inputs;
      auto normed = scratch<float>(norm ? w.inputs : 0);
      if (norm) k.norm(row, norm, w.inputs, around->epsilon, normed.get());
      W::convert(k, norm ? normed.get() : row, w.inputs, &own[m * size]);
    });
  }
  const Input* operator[](int64_t row) const { return rows + row * size; }
};

// Distribution of a matrix's panels over tasks, evenly.
struct Shares {
  int64_t outputs, panels, count, step;

  Shares(int64_t outputs, int64_t wide)
      : outputs(outputs),
        panels(ceil_div(outputs, PANEL)),
        count(ceil_div(panels, wide)),
        step(ceil_div(panels, std::max<int64_t>(count, 1))) {}
  int64_t first(int64_t share) const { return min(panels, share * step); }
  int64_t columns(int64_t share) const {
    return min(outputs, first(share + 1) * PANEL) - min(outputs, first(share) * PANEL);
  }
};

// Computes y [matrices, rows, outputs], products of `rows` rows by matrices, in pieces: runs
// tile(matrix, panel, columns, some, in, out) for up to ROWS rows and the panels of a task.
template <class W, class F>
void by_tiles(Call& call, const Inputs<W>& inputs, int64_t matrices, int64_t rows, int64_t outputs,
              int64_t work, float* y, const F& tile) {
  // On one thread, make as few tasks as possible.
  Shares shares(outputs, work < SMALL ? WIDE : W::share(ceil_div(outputs, PANEL)));
  int64_t pieces = ceil_div(rows, ROWS);
  run_tasks(call, product(matrices, shares.count, pieces), work, [&](int64_t t) {
    int64_t share = t / pieces % shares.count, matrix = t / pieces / shares.count;
    int64_t first = t % pieces * ROWS, some = min(ROWS, rows - first), panel = shares.first(share);
    const typename W::Input* in[ROWS];
    float* out[ROWS];
    for (int64_t i = 0; i < some; i++) {
      in[i] = inputs[matrix * rows + first + i];
      out[i] = y + (matrix * rows + first + i) * outputs + panel * PANEL;
    }
    tile(matrix, panel, shares.columns(share), some, in, out);
  });
}

// Multiplies up to ROWS rows of floats by a matrix.
inline void project(const Kernels& k, const Weight& weight, int64_t matrix, int64_t rows,
                    const float* const* x, float* const* y) {
  std::visit(
      [&](const auto& w) {
        using Input = typename std::decay_t<decltype(w)>::Input;
        if constexpr (std::is_same_v<Input, float>)
          return w.multiply(k, matrix, 0, w.outputs, rows, x, y);
        auto own = scratch<Input>(rows, w.size());
        const Input* in[ROWS];
        for (int64_t i = 0; i < rows; i++) {
          in[i] = &own[i * w.size()];
          w.convert(k, x[i], w.inputs, &own[i * w.size()]);
        }
        w.multiply(k, matrix, 0, w.outputs, rows, in, y);
      },
      weight);
}

}  // namespace
