// Operators with fp32 weights. Packed ones are [.., panels, K, 32], the last panel filled up.
// A part of ops.cpp, whose helpers it uses.
#pragma once

namespace {

using mtp::FloatPanels;

constexpr int64_t ROWS = 48;                // of a task, at most
constexpr int64_t MOST = int64_t{1} << 40;  // a size without memory, so that no product overflows
constexpr int64_t WIDE = 4;  // panels of a task, about: what a lone row is multiplied by at once

// fp32 matrices of `outputs` outputs; [.., K, N] in engines of before, which name no outputs.
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
  // A matrix from one of its panels on.
  FloatPanels from(int64_t matrix, int64_t panel) const {
    if (!packed)
      return {values + matrix * inputs * outputs + panel * PANEL, inputs, PANEL, outputs};
    return {values + (matrix * panels() + panel) * inputs * PANEL, inputs, inputs * PANEL, PANEL};
  }
};

// Panels shared out over tasks, alike.
struct Shares {
  int64_t panels, count, step;

  explicit Shares(int64_t panels)
      : panels(panels), count(up(panels, WIDE)), step(up(panels, std::max<int64_t>(count, 1))) {}
  int64_t first(int64_t share) const { return min(panels, share * step); }
  // Outputs of a share, where there are so many in all.
  int64_t columns(int64_t share, int64_t outputs) const {
    return min(outputs, first(share + 1) * PANEL) - min(outputs, first(share) * PANEL);
  }
};

// Rows x [rows, size], normed if `around` has a norm: then they lie in `own`.
const float* normed(const Kernels& k, ort::Context* context, const Around& around, const Tensor& x,
                    int64_t rows, std::unique_ptr<float[]>& own) {
  if (!around.norm.memory) return x.data<float>();
  int64_t size = x.last();
  own = scratch<float>(rows * size);
  tasks(context, rows, 4 * rows * size,
        [&](int64_t m) { around.row(k, x.data<float>() + m * size, size, &own[m * size]); });
  return own.get();
}

// x [.., K] times a weight -> [.., N]; or x [B, H, T, K] times one for each of H -> [B, H, T, N];
// with what may stand around it.
struct FloatProduct : Usual {
  static constexpr const char* name = "FloatProduct";
  static constexpr ort::Type inputs[] = {ort::FLOAT, ort::FLOAT, ort::FLOAT, ort::FLOAT};
  static constexpr unsigned optional = 1 << 2 | 1 << 3;
  const Kernels& k;
  int64_t outputs;  // of a packed weight; else 0
  float epsilon;

  FloatProduct(const Kernels& k, const ort::Info* info)
      : k(k),
        outputs(ort::attribute_or(info, "N", 0)),
        epsilon(ort::float_attribute_or(info, "epsilon", 0.0f)) {}

  void compute(ort::Context* context) const {
    Tensor x = ort::input(context, 0), given = ort::input(context, 1);
    bool heads = given.rank() == (outputs ? 4 : 3);
    FloatWeight w(name, given, heads, outputs);
    bool fits = heads ? x.rank() == 4 && x.shape[1] == w.matrices : x.rank() > 0;
    NEED(fits && x.last() == w.inputs, name, x.text() + " times " + given.text());
    std::vector<int64_t> shape = x.shape;
    shape.back() = w.outputs;
    Around around(name, context, 2, epsilon, x, shape);
    float* y = ort::output(context, shape);
    std::unique_ptr<float[]> own;
    const float* in = normed(k, context, around, x, x.count(0, x.rank() - 1), own);
    int64_t slots = heads ? x.shape[0] : 1;
    int64_t rows = heads ? x.shape[2] : x.count(0, x.rank() - 1);
    int64_t pieces = up(rows, ROWS), matrices = slots * w.matrices;
    Shares shares(w.panels());
    int64_t work = matrices * rows * w.inputs * w.outputs;
    tasks(context, matrices * shares.count * pieces, work, [&](int64_t t) {
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
// x may be normed first.
struct GatedFloatProduct : Usual {
  static constexpr const char* name = "GatedFloatProduct";
  static constexpr ort::Type inputs[] = {ort::FLOAT, ort::FLOAT, ort::FLOAT};
  static constexpr unsigned optional = 1 << 2;
  const Kernels& k;
  int64_t outputs;
  float epsilon;

  GatedFloatProduct(const Kernels& k, const ort::Info* info)
      : k(k),
        outputs(ort::attribute(info, "N")),
        epsilon(ort::float_attribute_or(info, "epsilon", 0.0f)) {}

  void compute(ort::Context* context) const {
    Tensor x = ort::input(context, 0);
    NEED(outputs > 0 && outputs % (2 * PANEL) == 0, name, std::to_string(outputs) + " outputs");
    FloatWeight w(name, ort::input(context, 1), 0, outputs);
    NEED(x.rank() > 0 && x.last() == w.inputs, name,
         "rows " + x.text() + " times " + std::to_string(w.inputs) + " inputs");
    int64_t rows = x.count(0, x.rank() - 1), inner = outputs / 2;
    std::vector<int64_t> shape = x.shape;
    shape.back() = inner;
    Around around(name, context, 2, epsilon, x, shape);
    float* y = ort::output(context, shape);
    std::unique_ptr<float[]> own;
    const float* in = normed(k, context, around, x, rows, own);
    Shares shares(inner / PANEL);
    int64_t pieces = up(rows, ROWS);
    tasks(context, shares.count * pieces, rows * w.inputs * outputs, [&](int64_t t) {
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

// Rows through experts: down(silu(gate(x)) * up(x)), see Routed; + sum [.., E], if there is one.
//
// gates and ups [X, 2 P, E, 32], panels of them in turn; downs [X, panels, I, 32], where P panels
// hold I outputs. An expert's weights are read once for all of its rows.
struct FloatExperts : Usual {
  static constexpr const char* name = "FloatExperts";
  static constexpr ort::Type inputs[] = {ort::FLOAT, ort::ANY,   ort::FLOAT,
                                         ort::FLOAT, ort::FLOAT, ort::FLOAT};
  static constexpr unsigned optional = 1 << 4 | 1 << 5;
  const Kernels& k;

  FloatExperts(const Kernels& k, const ort::Info*) : k(k) {}

  void compute(ort::Context* context) const {
    Tensor x = ort::input(context, 0), ups = ort::input(context, 2), downs = ort::input(context, 3);
    Tensor sum = ort::input(context, 5, true);
    int64_t width = x.last(), inner = downs.rank() == 4 ? downs.shape[2] : 0;
    int64_t panels = up(inner, PANEL);
    NEED(panels > 0 && inner <= MOST, name, "downs are " + downs.text());
    FloatWeight both(name, ups, 1, 2 * panels * PANEL), down(name, downs, 1, width);
    NEED(both.inputs == width && both.matrices == down.matrices, name,
         "gates and ups " + ups.text() + " do not fit " + downs.text());
    Routed routed(name, x, ort::input(context, 1), ort::input(context, 4, true), down.matrices);
    NEED(!sum.memory || (routed.weights.memory && sum.shape == x.shape), name,
         "the sum with " + sum.text());
    float* y = ort::output(context, x.shape);
    int64_t rows = routed.count(), runs = static_cast<int64_t>(routed.runs.size());
    auto hidden = scratch<float>(rows * panels * PANEL);
    Shares inners(panels), outers(down.panels());
    tasks(context, runs * inners.count, rows * 2 * inner * width, [&](int64_t t) {
      const Routed::Run& run = routed.runs[t / inners.count];
      int64_t share = t % inners.count, panel = inners.first(share);
      int64_t columns = inners.columns(share, panels * PANEL);
      alignas(64) float all[ROWS][2 * WIDE * PANEL];
      const float* from[ROWS];
      float* to[ROWS];
      for (int64_t i = 0; i < run.count; i++) {
        from[i] = x.data<float>() + routed.token(run, i) * width;
        to[i] = all[i];
      }
      k.floats(both.from(run.expert, 2 * panel), 2 * columns, run.count, from, to);
      for (int64_t i = 0; i < run.count; i++) {
        float* own = &hidden[(routed.rows[run.first + i] * panels + panel) * PANEL];
        for (int64_t n = 0; n < columns; n += PANEL) {
          std::memcpy(own + n, all[i] + 2 * n, PANEL * sizeof(float));
          k.gated(own + n, all[i] + 2 * n + PANEL, PANEL);
        }
      }
    });
    auto made = scratch<float>(routed.weights.memory ? rows * width : 0);
    float* results = routed.weights.memory ? made.get() : y;
    tasks(context, runs * outers.count, rows * inner * width, [&](int64_t t) {
      const Routed::Run& run = routed.runs[t / outers.count];
      int64_t share = t % outers.count, panel = outers.first(share);
      const float* from[ROWS];
      float* to[ROWS];
      for (int64_t i = 0; i < run.count; i++) {
        int64_t row = routed.rows[run.first + i];
        from[i] = &hidden[row * panels * PANEL];
        to[i] = results + row * width + panel * PANEL;
      }
      int64_t columns = outers.columns(share, width);
      k.floats(down.from(run.expert, panel), columns, run.count, from, to);
    });
    if (routed.weights.memory) routed.finish(context, results, sum, width, y);
  }
};

}  // namespace
