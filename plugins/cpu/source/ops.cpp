// The operators, domain `mtpbuild`: they check their operands, cut the work into tasks and leave
// the arithmetic to the kernels of the machine's instruction set.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "half.h"
#include "kernels.h"
#include "ort.h"
#include "trigonometry.h"

const void* const* ort::api = nullptr;

namespace {

using mtp::BLOCK;
using mtp::InputBlock;
using mtp::Kernels;
using mtp::LANES;
using mtp::Panel;
using mtp::PANEL;
using ort::Bad;
using ort::Tensor;
using std::min;

constexpr int64_t SMALL = 1 << 18;   // fp32 multiplications that are not worth a second thread
constexpr int64_t INTEGERS = 4;      // integer multiplications that take as long as one, or as
                                     // many rows as take no longer than to read the weight
constexpr int64_t CACHED = 1 << 19;  // bytes of rounded rows that stay in a core's own cache

// A macro, so that the text is made where it is thrown alone.
#define NEED(holds, op, ...)                                                                    \
  do {                                                                                          \
    if (!(holds)) throw Bad(std::string("mtpbuild ") + (op) + ": " + std::string(__VA_ARGS__)); \
  } while (false)

int64_t up(int64_t a, int64_t b) { return a / b + (a % b > 0 ? 1 : 0); }  // never overflows

// Memory that is not cleared first.
template <class T>
std::unique_ptr<T[]> scratch(int64_t count) {
  return std::unique_ptr<T[]>(new T[static_cast<size_t>(std::max<int64_t>(count, 1))]);
}

// Tasks, on the session's threads if they are large enough together.
template <class F>
void tasks(ort::Context* context, int64_t count, int64_t multiplications, const F& task) {
  if (multiplications < SMALL)
    for (int64_t i = 0; i < count; i++) task(i);
  else
    ort::parallel(context, count, task);
}

// What rows times an integer weight of so many numbers count for.
int64_t integers(int64_t rows, int64_t numbers) {
  return std::max(rows, INTEGERS) * numbers / INTEGERS;
}

// An integer weight as an operator is given it: values [.., panels, blocks, bytes] and scales
// [.., panels, blocks, 32] fp16, for so many matrices of `outputs` outputs.
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
    NEED(outputs > 0 && panels == up(outputs, PANEL), op,
         std::to_string(outputs) + " outputs in " + std::to_string(panels) + " panels of 32");
  }
  Panel panel(int64_t matrix, int64_t number) const {
    int64_t first = (matrix * panels + number) * blocks;
    return {values + first * 128 * bits, scales + first * PANEL, blocks};
  }
  int64_t inputs() const { return blocks * BLOCK; }
};

// Rows times a panel; `columns` of its 32 outputs go to each of `out`.
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

// What may stand around a product x [.., K] -> y, and is optional: the weight [K] of the norm that
// x goes through first, the operand `place`; and what is added to y, the operand behind it.
struct Around {
  Tensor norm, sum;
  float epsilon;

  Around(const char* op, ort::Context* context, size_t place, float epsilon, const Tensor& x,
         const std::vector<int64_t>& y)
      : norm(ort::input(context, place, true)),
        sum(ort::input(context, place + 1, true)),
        epsilon(epsilon) {
    NEED(!norm.memory || norm.shape == std::vector<int64_t>{x.last()}, op,
         "rows " + x.text() + ", norm " + norm.text());
    NEED(!sum.memory || sum.shape == y, op, "the sum with " + sum.text());
  }
  // A row as the product takes it; if it is normed, it lies in `own`.
  const float* row(const Kernels& k, const float* x, int64_t size, float* own) const {
    if (!norm.memory) return x;
    k.norm(x, norm.data<float>(), size, epsilon, own);
    return own;
  }
  // Add to `count` numbers of the result, whose first one is y[place].
  void add(int64_t place, int64_t count, float* y) const {
    if (!sum.memory) return;
    for (int64_t i = 0; i < count; i++) y[place + i] += sum.data<float>()[place + i];
  }
};

std::unique_ptr<InputBlock[]> rounded(const Kernels& k, ort::Context* context, const float* x,
                                      int64_t rows, int64_t blocks,
                                      const Around* around = nullptr) {
  auto blocks_of = scratch<InputBlock>(rows * blocks);
  int64_t size = blocks * BLOCK;
  tasks(context, rows, rows * size * 4, [&](int64_t m) {
    bool normed = around && around->norm.memory;
    auto own = scratch<float>(normed ? size : 0);
    const float* row = x + m * size;
    k.quantise(normed ? around->row(k, row, size, own.get()) : row, blocks, &blocks_of[m * blocks]);
  });
  return blocks_of;
}

// What operators are unless they say otherwise.
struct Usual {
  static constexpr ort::Type results[] = {ort::FLOAT};
  static constexpr unsigned optional = 0, optional_results = 0;  // a bit for each operand or result
};

// x [.., K] times an integer weight -> [.., outputs]; with what may stand around it.
struct Product : Usual {
  static constexpr const char* name = "Product";
  static constexpr ort::Type inputs[] = {ort::FLOAT, ort::UINT8, ort::FLOAT16, ort::FLOAT,
                                         ort::FLOAT};
  static constexpr unsigned optional = 1 << 3 | 1 << 4;
  const Kernels& k;
  int64_t outputs;
  float epsilon;

  Product(const Kernels& k, const ort::Info* info)
      : k(k),
        outputs(attribute(info, "N")),
        epsilon(ort::float_attribute_or(info, "epsilon", 0.0f)) {}

  void compute(ort::Context* context) const {
    Tensor x = ort::input(context, 0);
    Weight w(name, ort::input(context, 1), ort::input(context, 2), 3, outputs);
    NEED(x.rank() > 0 && x.last() == w.inputs(), name,
         "rows " + x.text() + " times " + std::to_string(w.inputs()) + " inputs");
    int64_t rows = x.count(0, x.rank() - 1);
    std::vector<int64_t> shape = x.shape;
    shape.back() = outputs;
    Around around(name, context, 3, epsilon, x, shape);
    float* y = ort::output(context, shape);
    auto blocks = rounded(k, context, x.data<float>(), rows, w.blocks, &around);
    // A task takes some panels, and of many rows as many at a time as stay in its core's cache.
    int64_t step = std::max<int64_t>(1, min<int64_t>(8, w.panels / 16));
    int64_t most = std::max<int64_t>(48, CACHED / (w.blocks * int64_t{sizeof(InputBlock)}));
    tasks(context, up(w.panels, step), integers(rows, w.inputs() * outputs), [&](int64_t t) {
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

// silu(x @ gates) * (x @ ups): x [.., K], a weight of N outputs, gates first -> [.., N / 2]; x may
// be normed first.
struct GatedProduct : Usual {
  static constexpr const char* name = "GatedProduct";
  static constexpr ort::Type inputs[] = {ort::FLOAT, ort::UINT8, ort::FLOAT16, ort::FLOAT};
  static constexpr unsigned optional = 1 << 3;
  const Kernels& k;
  int64_t outputs;
  float epsilon;

  GatedProduct(const Kernels& k, const ort::Info* info)
      : k(k),
        outputs(attribute(info, "N")),
        epsilon(ort::float_attribute_or(info, "epsilon", 0.0f)) {}

  void compute(ort::Context* context) const {
    Tensor x = ort::input(context, 0);
    Weight w(name, ort::input(context, 1), ort::input(context, 2), 3, outputs);
    NEED(x.rank() > 0 && x.last() == w.inputs() && outputs % (2 * PANEL) == 0, name,
         "rows " + x.text() + " times " + std::to_string(w.inputs()) + " inputs, " +
             std::to_string(outputs) + " outputs");
    int64_t rows = x.count(0, x.rank() - 1), inner = outputs / 2, panels = w.panels / 2;
    std::vector<int64_t> shape = x.shape;
    shape.back() = inner;
    Around around(name, context, 3, epsilon, x, shape);
    float* y = ort::output(context, shape);
    auto blocks = rounded(k, context, x.data<float>(), rows, w.blocks, &around);
    int64_t step = std::max<int64_t>(1, min<int64_t>(4, panels / 16));
    tasks(context, up(panels, step), integers(rows, w.inputs() * outputs), [&](int64_t t) {
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

// The rows of a pass by the experts that they go through. x [.., E] comes with ids and weights
// [.., k]: a token is k rows, its result the weighted sum of theirs in that order, and an id of -1
// adds nothing. In engines of before ids are [N], and there are no weights.
struct Routed {
  static constexpr int64_t SOME = 48;  // rows of a run, at most
  struct Run {
    int64_t expert, first, count;
  };
  std::vector<int64_t> ids;   // of each row
  std::vector<int64_t> rows;  // of the first expert in use, of the next one, and so on
  std::vector<Run> runs;
  int64_t each, tokens;  // rows of a token
  Tensor weights;

  Routed(const char* op, const Tensor& x, const Tensor& chosen, const Tensor& weights,
         int64_t experts)
      : each(weights.memory ? chosen.last() : 1), weights(weights) {
    bool one = !weights.memory && x.rank() == 2;
    std::vector<int64_t> outer(x.shape.begin(), x.shape.end() - (x.rank() > 0));
    if (!one) outer.push_back(each);
    bool fit = x.rank() > 0 && chosen.shape == outer && each > 0 &&
               (one || weights.shape == chosen.shape) &&
               (chosen.type == ort::INT64 || chosen.type == ort::INT32);
    NEED(fit, op, "rows " + x.text() + " with experts " + chosen.text());
    tokens = x.count(0, x.rank() - 1);
    ids.resize(tokens * each);
    for (size_t m = 0; m < ids.size(); m++)
      ids[m] = chosen.type == ort::INT64 ? chosen.data<int64_t>()[m] : chosen.data<int32_t>()[m];
    order(op, experts);
  }
  int64_t count() const { return static_cast<int64_t>(ids.size()); }
  // How many rows `run` counts, and where the token of its row i begins in x.
  int64_t token(const Run& run, int64_t i) const { return rows[run.first + i] / each; }

  // y [tokens, width] = weighted sums of what the experts made of the rows + sum, if there is one.
  void finish(ort::Context* context, const float* made, const Tensor& sum, int64_t width,
              float* y) const {
    tasks(context, tokens, count() * width, [&](int64_t m) {
      float* to = y + m * width;
      std::fill_n(to, width, 0.0f);
      for (int64_t row = m * each; row < (m + 1) * each; row++) {
        if (ids[row] < 0) continue;
        float weight = weights.data<float>()[row];
        for (int64_t c = 0; c < width; c++) to[c] += made[row * width + c] * weight;
      }
      for (int64_t c = 0; sum.memory && c < width; c++) to[c] += sum.data<float>()[m * width + c];
    });
  }

 private:
  void order(const char* op, int64_t experts) {
    std::vector<int64_t> ends(experts + 1);
    int64_t least = weights.memory ? -1 : 0;
    for (int64_t id : ids) {
      NEED(id >= least && id < experts, op,
           "no expert " + std::to_string(id) + " of " + std::to_string(experts));
      if (id >= 0) ends[id + 1]++;
    }
    for (int64_t e = 0; e < experts; e++) {
      ends[e + 1] += ends[e];
      for (int64_t first = ends[e]; first < ends[e + 1]; first += SOME)
        runs.push_back({e, first, min(SOME, ends[e + 1] - first)});
    }
    rows.resize(ends[experts]);
    for (int64_t m = 0; m < count(); m++)
      if (ids[m] >= 0) rows[ends[ids[m]]++] = m;
  }
};

// Rows through experts: down(silu(gate(x)) * up(x)), see Routed; + sum [.., E], if there is one.
//
// Panels of gates and ups take turns. An expert's weights are read once for all of its rows.
struct Experts : Usual {
  static constexpr const char* name = "Experts";
  static constexpr ort::Type inputs[] = {ort::FLOAT, ort::ANY,     ort::UINT8, ort::FLOAT16,
                                         ort::UINT8, ort::FLOAT16, ort::FLOAT, ort::FLOAT};
  static constexpr unsigned optional = 1 << 6 | 1 << 7;
  static constexpr int64_t SOME = Routed::SOME;
  const Kernels& k;

  Experts(const Kernels& k, const ort::Info*) : k(k) {}

  void compute(ort::Context* context) const {
    Tensor x = ort::input(context, 0), downs = ort::input(context, 4);
    Tensor sum = ort::input(context, 7, true);
    int64_t width = x.last();
    int64_t inner = downs.rank() == 4 ? min(downs.shape[2], INT64_MAX / 64) * BLOCK : 0;
    Weight both(name, ort::input(context, 2), ort::input(context, 3), 4, 2 * inner);
    Weight down(name, downs, ort::input(context, 5), 4, width);
    NEED(both.inputs() == width && both.matrices == down.matrices && both.panels % 2 == 0, name,
         "gates and ups do not fit " + downs.text());
    Routed routed(name, x, ort::input(context, 1), ort::input(context, 6, true), down.matrices);
    NEED(!sum.memory || (routed.weights.memory && sum.shape == x.shape), name,
         "the sum with " + sum.text());
    float* y = ort::output(context, x.shape);
    auto in = rounded(k, context, x.data<float>(), routed.tokens, both.blocks);
    int64_t rows = routed.count(), panels = inner / PANEL;
    int64_t runs = static_cast<int64_t>(routed.runs.size());
    auto hidden = scratch<InputBlock>(rows * down.blocks);
    tasks(context, runs * panels, rows * 2 * inner * width / INTEGERS, [&](int64_t t) {
      gate_and_up(both, routed, routed.runs[t / panels], t % panels, in.get(), hidden.get(),
                  down.blocks);
    });
    auto made = scratch<float>(routed.weights.memory ? rows * width : 0);
    float* results = routed.weights.memory ? made.get() : y;
    tasks(context, runs * down.panels, rows * inner * width / INTEGERS, [&](int64_t t) {
      const Routed::Run& run = routed.runs[t / down.panels];
      int64_t p = t % down.panels, columns = min(PANEL, width - p * PANEL);
      const InputBlock* from[SOME];
      float* to[SOME];
      for (int64_t i = 0; i < run.count; i++) {
        int64_t row = routed.rows[run.first + i];
        from[i] = &hidden[row * down.blocks];
        to[i] = results + row * width + p * PANEL;
      }
      multiply(k, down, down.panel(run.expert, p), columns, run.count, from, to);
    });
    if (routed.weights.memory) routed.finish(context, results, sum, width, y);
  }

 private:
  void gate_and_up(const Weight& both, const Routed& routed, const Routed::Run& run, int64_t p,
                   const InputBlock* in, InputBlock* hidden, int64_t blocks) const {
    alignas(64) float gates[SOME][PANEL], ups[SOME][PANEL];
    const InputBlock* from[SOME];
    float *gate[SOME], *up[SOME];
    for (int64_t i = 0; i < run.count; i++) {
      from[i] = in + routed.token(run, i) * both.blocks;
      gate[i] = gates[i];
      up[i] = ups[i];
    }
    multiply(k, both, both.panel(run.expert, 2 * p), PANEL, run.count, from, gate);
    multiply(k, both, both.panel(run.expert, 2 * p + 1), PANEL, run.count, from, up);
    for (int64_t i = 0; i < run.count; i++) {
      k.gated(gates[i], ups[i], PANEL);
      k.quantise(gates[i], 1, hidden + routed.rows[run.first + i] * blocks + p);
    }
  }
};

// Rows of an int8 embedding: tokens [..], values [V, K / 32, 32], scales [V, K / 32] -> [.., K].
struct Embedding : Usual {
  static constexpr const char* name = "Embedding";
  static constexpr ort::Type inputs[] = {ort::INT64, ort::UINT8, ort::FLOAT16};

  Embedding(const Kernels&, const ort::Info*) {}

  void compute(ort::Context* context) const {
    Tensor tokens = ort::input(context, 0), values = ort::input(context, 1);
    Tensor scales = ort::input(context, 2);
    bool fit = values.rank() == 3 && values.last() == BLOCK && scales.rank() == 2 &&
               std::equal(scales.shape.begin(), scales.shape.end(), values.shape.begin());
    NEED(fit, name, "values " + values.text() + " and scales " + scales.text());
    int64_t vocabulary = values.shape[0], blocks = values.shape[1];
    std::vector<int64_t> shape = tokens.shape;
    shape.push_back(blocks * BLOCK);
    float* y = ort::output(context, shape);
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

// x [.., N] / rms(x) * weight [N]
struct Norm : Usual {
  static constexpr const char* name = "Norm";
  static constexpr ort::Type inputs[] = {ort::FLOAT, ort::FLOAT};
  const Kernels& k;
  float epsilon;

  Norm(const Kernels& k, const ort::Info* info)
      : k(k), epsilon(ort::float_attribute(info, "epsilon")) {}

  void compute(ort::Context* context) const {
    Tensor x = ort::input(context, 0), w = ort::input(context, 1);
    NEED(w.rank() == 1 && x.rank() > 0 && x.last() == w.shape[0], name, x.text() + ", " + w.text());
    int64_t rows = x.count(0, x.rank() - 1), size = x.last();
    float* y = ort::output(context, x.shape);
    tasks(context, rows, 4 * rows * size, [&](int64_t m) {
      k.norm(x.data<float>() + m * size, w.data<float>(), size, epsilon, y + m * size);
    });
  }
};

// Cosines of x, or sines: of the angles that queries and keys are rotated by.
template <bool COSINE>
struct Circle : Usual {
  static constexpr const char* name = COSINE ? "Cos" : "Sin";
  static constexpr ort::Type inputs[] = {ort::FLOAT};

  Circle(const Kernels&, const ort::Info*) {}

  void compute(ort::Context* context) const {
    Tensor x = ort::input(context, 0);
    float* y = ort::output(context, x.shape);
    for (int64_t i = 0; i < x.count(0, x.rank()); i++) {
      float sine, cosine;
      mtp::sine_and_cosine(x.data<float>()[i], &sine, &cosine);
      y[i] = COSINE ? cosine : sine;
    }
  }
};

// q [B, H, T, C], cache [B, 1, S, R], fresh [B, 1, F, R], base [B], first [B] -> [B, H, T, latent].
//
// Query t sees the cache's rows before base and the fresh rows up to first + t, whose positions
// begin at base. `written`: the fresh rows lie in the cache from base on. A row has a key of C
// numbers for each of `groups` heads, then or among them, from number `values` on, `latent` values
// for each. H / groups query heads beside each other share one.
struct Attention : Usual {
  static constexpr const char* name = "Attention";
  static constexpr ort::Type inputs[] = {ort::FLOAT, ort::FLOAT, ort::FLOAT, ort::INT64,
                                         ort::INT64};
  const Kernels& k;
  float scale;
  int64_t groups, values, latent;
  bool written;

  Attention(const Kernels& k, const ort::Info* info)
      : k(k),
        scale(ort::float_attribute(info, "scale")),
        groups(attribute(info, "groups")),
        values(attribute(info, "values")),
        latent(attribute(info, "latent")),
        written(attribute(info, "written") != 0) {}

  void compute(ort::Context* context) const {
    Tensor q = ort::input(context, 0), cache = ort::input(context, 1);
    Tensor fresh = ort::input(context, 2), base = ort::input(context, 3);
    Tensor first = ort::input(context, 4);
    checked(q, cache, fresh);
    float* y = ort::output(context, {q.shape[0], q.shape[1], q.shape[2], latent});
    attend(context, q, cache, fresh, base, first, y);
  }

  // The same for operands that another operator has; y [B, H, T, latent].
  void attend(ort::Context* context, const Tensor& q, const Tensor& cache, const Tensor& fresh,
              const Tensor& base, const Tensor& first, float* y) const {
    Job job = checked(q, cache, fresh);
    std::vector<int64_t> slots{job.slots};
    NEED(base.shape == slots && first.shape == slots, name, "no place for each slot");
    job.y = y;
    std::vector<Lanes> lanes;
    int64_t most = 0, sixteens = up(job.queries(), LANES);
    for (int64_t i = 0; i < job.slots * groups * sixteens; i++) {
      lanes.push_back(look(job, i, base.data<int64_t>(), first.data<int64_t>()));
      most = std::max(most, lanes.back().end);
    }
    int64_t width = job.width + latent;
    run(context, job, lanes, job.slots * job.heads * job.tokens * most * width);
  }

 private:
  struct Job {
    int64_t slots, heads, tokens, width, stride, rows, fresh_rows, per_group;
    const float *q, *cache, *fresh;
    float* y;
    // Of a slot and a group: query i is token i / per_group.
    int64_t queries() const { return per_group * tokens; }
    int64_t place(int64_t slot, int64_t group, int64_t query) const {
      int64_t head = group * per_group + query % per_group;
      return (slot * heads + head) * tokens + query / per_group;
    }
  };
  // 16 queries of a slot and a group.
  struct Lanes {
    int64_t slot, group, first, base, end;
    int32_t seen[LANES];
  };

  Job checked(const Tensor& q, const Tensor& cache, const Tensor& fresh) const {
    NEED(q.rank() == 4 && cache.rank() == 4 && fresh.rank() == 4, name, "operands have 4 axes");
    Job job{};
    job.slots = q.shape[0], job.heads = q.shape[1], job.tokens = q.shape[2];
    job.width = q.shape[3], job.stride = cache.shape[3];
    job.rows = cache.shape[2], job.fresh_rows = fresh.shape[2];
    auto fit = [&](const Tensor& rows) {
      return rows.shape[0] == job.slots && rows.shape[1] == 1 && rows.shape[3] == job.stride;
    };
    int64_t most = job.stride;  // so that no product below overflows
    bool inside = groups > 0 && groups <= most && latent > 0 && latent <= most && values >= 0 &&
                  values <= most && job.width <= most && job.heads % groups == 0 &&
                  groups * job.width <= most && values + groups * latent <= most;
    NEED(fit(cache) && fit(fresh) && inside, name,
         "queries " + q.text() + " over " + cache.text() + " and " + fresh.text());
    NEED(job.rows <= INT32_MAX && job.fresh_rows <= INT32_MAX, name, "too many rows");
    job.per_group = job.heads / groups;
    job.q = q.data<float>(), job.cache = cache.data<float>(), job.fresh = fresh.data<float>();
    return job;
  }

  // Where 16 queries look. A slot that idles may point anywhere: it is kept inside.
  Lanes look(const Job& job, int64_t number, const int64_t* base, const int64_t* first) const {
    int64_t sixteens = up(job.queries(), LANES), group = number / sixteens;
    Lanes lanes{group / groups, group % groups, number % sixteens * LANES, 0, 0, {}};
    int64_t from = std::max<int64_t>(0, min(base[lanes.slot], job.rows));
    lanes.base = written ? job.rows : from;
    int64_t limit = written ? job.rows : min<int64_t>(from + job.fresh_rows, INT32_MAX);
    int64_t offset = std::max<int64_t>(0, min(first[lanes.slot], limit));
    for (int64_t i = 0; i < LANES && lanes.first + i < job.queries(); i++) {
      int64_t seen = min(limit, from + offset + (lanes.first + i) / job.per_group + 1);
      lanes.seen[i] = static_cast<int32_t>(seen);
      lanes.end = std::max(lanes.end, seen);
    }
    return lanes;
  }

  // Few lanes share out their splits too, many do them one behind the other; sums are the same.
  void run(ort::Context* context, const Job& job, const std::vector<Lanes>& lanes,
           int64_t work) const {
    int64_t count = static_cast<int64_t>(lanes.size()), splits = 1;
    for (const Lanes& each : lanes) splits = std::max(splits, up(each.end, mtp::SPLIT));
    int64_t size = (2 + latent) * LANES;
    if (count >= 16 || splits == 1) {
      tasks(context, count, work, [&](int64_t i) {
        auto parts = scratch<float>(2 * size);
        attend_all(job, lanes[i], partial(&parts[0]), partial(&parts[size]));
        finish(job, lanes[i], partial(&parts[0]));
      });
      return;
    }
    auto parts = scratch<float>(count * splits * size);
    tasks(context, count * splits, work, [&](int64_t t) {
      if (t % splits == 0 || t % splits * mtp::SPLIT < lanes[t / splits].end)
        attend(job, lanes[t / splits], t % splits, partial(&parts[t * size]));
    });
    tasks(context, count, count * splits * latent * LANES, [&](int64_t i) {
      mtp::Partial into = partial(&parts[i * splits * size]);
      for (int64_t n = 1; n * mtp::SPLIT < lanes[i].end; n++)
        k.fold(into, partial(&parts[(i * splits + n) * size]), latent);
      finish(job, lanes[i], into);
    });
  }

  static mtp::Partial partial(float* memory) {
    return {memory, memory + LANES, memory + 2 * LANES};
  }

  void attend_all(const Job& job, const Lanes& lanes, mtp::Partial into, mtp::Partial next) const {
    attend(job, lanes, 0, into);
    for (int64_t n = 1; n * mtp::SPLIT < lanes.end; n++) {
      attend(job, lanes, n, next);
      k.fold(into, next, latent);
    }
  }

  void attend(const Job& job, const Lanes& lanes, int64_t split, const mtp::Partial& out) const {
    auto queries = scratch<float>(job.width * LANES);
    for (int64_t i = 0; i < LANES; i++) {
      bool there = lanes.first + i < job.queries();
      int64_t place = there ? job.place(lanes.slot, lanes.group, lanes.first + i) : 0;
      const float* row = job.q + place * job.width;
      for (int64_t c = 0; c < job.width; c++)
        queries[c * LANES + i] = there ? row[c] * scale : 0.0f;
    }
    int64_t begin = split * mtp::SPLIT, end = min(lanes.end, begin + mtp::SPLIT);
    bool meet = begin < lanes.base && lanes.base < end;
    auto copy = scratch<float>(meet ? mtp::CHUNK * job.stride : 0);
    mtp::Attention a{queries.get(),
                     lanes.seen,
                     job.cache + lanes.slot * job.rows * job.stride,
                     job.fresh + lanes.slot * job.fresh_rows * job.stride,
                     lanes.base,
                     job.stride,
                     lanes.group * job.width,
                     job.width,
                     values + lanes.group * latent,
                     latent};
    k.attend(a, begin, end, copy.get(), out);
  }

  void finish(const Job& job, const Lanes& lanes, const mtp::Partial& done) const {
    for (int64_t i = 0; i < LANES && lanes.first + i < job.queries(); i++) {
      float* row = job.y + job.place(lanes.slot, lanes.group, lanes.first + i) * latent;
      float total = done.total[i], factor = total > 0.0f ? 1.0f / total : 0.0f;
      for (int64_t d = 0; d < latent; d++) row[d] = done.mixed[d * LANES + i] * factor;
    }
  }
};

}  // namespace

#include "float_ops.h"
//
#include "latent_ops.h"

namespace {

// ---- what onnxruntime is told -------------------------------------------------------------------

// The instruction set of new sessions: the best, or what MTPBUILD_CPU_ISA names.
const Kernels& chosen() {
  std::vector<const Kernels*> sets{&mtp::kPlain};
#if defined(__x86_64__)
  __builtin_cpu_init();
  bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
              __builtin_cpu_supports("f16c");
  if (avx2) sets.push_back(&mtp::kAvx2);
  if (avx2 && __builtin_cpu_supports("x86-64-v4") && __builtin_cpu_supports("avx512vnni"))
    sets.push_back(&mtp::kAvx512);
#endif
  const char* asked = std::getenv("MTPBUILD_CPU_ISA");
  if (!asked || !*asked) return *sets.back();
  std::string known;
  for (const Kernels* set : sets) {
    if (std::strcmp(set->name, asked) == 0) return *set;
    known += std::string(known.empty() ? "" : ", ") + set->name;
  }
  throw Bad(std::string("MTPBUILD_CPU_ISA is ") + asked + "; this machine has " + known);
}

// Runs what may throw; onnxruntime is C.
template <class F>
ort::Status* guarded(const F& body) noexcept {
  try {
    body();
    return nullptr;
  } catch (const std::exception& error) {
    return ort::failed(error.what());
  }
}

template <class Op>
ort::CustomOp declared() {
  using ort::Context;
  using ort::CustomOp;
  CustomOp op{};
  op.version = ort::OP;
  op.name = [](const CustomOp*) { return Op::name; };
  op.provider = [](const CustomOp*) -> const char* { return nullptr; };
  op.input_type = [](const CustomOp*, size_t i) -> int { return Op::inputs[i]; };
  op.input_count = [](const CustomOp*) { return std::size(Op::inputs); };
  op.output_type = [](const CustomOp*, size_t i) -> int { return Op::results[i]; };
  op.output_count = [](const CustomOp*) -> size_t { return std::size(Op::results); };
  op.destroy = [](void* kernel) { delete static_cast<Op*>(kernel); };
  op.input_kind = [](const CustomOp*, size_t i) -> int { return Op::optional >> i & 1; };
  op.output_kind = [](const CustomOp*, size_t i) -> int { return Op::optional_results >> i & 1; };
  op.input_memory = [](const CustomOp*, size_t) { return 0; };
  op.create_v2 = [](const CustomOp*, const void*, const ort::Info* info, void** kernel) {
    return guarded([&] { *kernel = new Op(chosen(), info); });
  };
  op.compute_v2 = [](void* kernel, Context* context) {
    return guarded([&] { static_cast<const Op*>(kernel)->compute(context); });
  };
  return op;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) ort::Status* RegisterCustomOps(
    ort::SessionOptions* options, const ort::ApiBase* base) {
  ort::api = base->get_api(ort::API);
  if (!ort::api) {
    ort::api = base->get_api(1);
    return ort::failed(std::string("mtpbuild's kernels need onnxruntime 1.17, this is ") +
                       base->version());
  }
  return guarded([&] {
    static const ort::CustomOp ops[] = {
        declared<Product>(),      declared<GatedProduct>(),  declared<FloatProduct>(),
        declared<Experts>(),      declared<Norm>(),          declared<Attention>(),
        declared<Circle<true>>(), declared<Circle<false>>(), declared<GatedFloatProduct>(),
        declared<FloatExperts>(), declared<LatentRows>(),    declared<LatentAttention>(),
        declared<Route>(),        declared<Accept>(),        declared<Embedding>(),
        declared<LogSoftmax>()};
    static ort::Domain* domain = [] {
      ort::Domain* made = nullptr;
      ort::check(ort::call<ort::Status*>(ort::CREATE_DOMAIN, "mtpbuild", &made));
      for (const ort::CustomOp& op : ops)
        ort::check(ort::call<ort::Status*>(ort::DOMAIN_ADD, made, &op));
      return made;
    }();
    ort::check(ort::call<ort::Status*>(ort::ADD_DOMAIN, options, domain));
  });
}
