// Latent attention's operators besides plain products.
#pragma once
#include "attention_ops.h"
#include "cache_rows.h"
#include "float_ops.h"

namespace {

// a [B, T, Q + latent + R] -> query input [B, T, Q], normed if there is a norm [Q]; cache rows
// [B, 1, T, latent + R]: the normed latent, then the rotated key. If there is a cache
// [B, 1, S, latent + R], it is the third result, with these rows from row start [B] on; it is
// updated in place if input and output are bound to the same memory.
template <class C>
struct LatentRows : Usual {
  static constexpr const char* name = name_of<C>("LatentRows", "LatentRowsBf16");
  static constexpr ort::Type inputs[] = {ort::FLOAT, ort::FLOAT,   ort::FLOAT, ort::FLOAT,
                                         ort::FLOAT, ort::TYPE<C>, ort::INT64};
  static constexpr ort::Type results[] = {ort::FLOAT, ort::FLOAT, ort::TYPE<C>};
  static constexpr unsigned optional = 1 << 4 | 1 << 5 | 1 << 6, optional_results = 1 << 2;
  const Kernels& k;
  float epsilon;
  bool interleaved;

  LatentRows(const Kernels& k, const Attributes& from)
      : k(k), epsilon(from.real("epsilon")), interleaved(from.integer("interleaved") != 0) {}

  void compute(Call& call) const {
    Tensor a = call.input(0), weight = call.input(1);
    Tensor q_weight = call.input(4, true);
    NEED(a.rank() == 3 && weight.rank() == 1, name, a.text() + ", norm " + weight.text());
    int64_t slots = a.shape[0], tokens = a.shape[1], rows = slots * tokens;
    Angles angles(name, call.input(2), call.input(3), slots, tokens);
    int64_t latent = weight.shape[0], rotary = 2 * angles.half, width = latent + rotary;
    int64_t queries = a.shape[2] - width;
    NEED(queries >= 0 && (!q_weight.memory || q_weight.shape == std::vector<int64_t>{queries}),
         name, a.text() + ", norms " + weight.text() + ", " + q_weight.text());
    float* q = call.output({slots, tokens, queries});
    float* fresh = call.output({slots, 1, tokens, width}, 1);
    tasks(call, rows, product(8, rows, a.shape[2]), [&](int64_t m) {
      const float* row = a.data<float>() + m * a.shape[2];
      if (q_weight.memory)
        k.norm(row, q_weight.data<float>(), queries, epsilon, q + m * queries);
      else
        std::memcpy(q + m * queries, row, queries * sizeof(float));
      float* own = fresh + m * width;
      k.norm(row + queries, weight.data<float>(), latent, epsilon, own);
      angles.rotate_row(m, row + queries + latent, interleaved, own + latent);
    });
    Tensor cache = call.input(5, true);
    if (cache.memory)
      write_rows<C>(name, call, cache, call.input(6), fresh, {slots, tokens, width});
  }
};

// A packed matrix for each head: fp32 [H, panels, K, 32], or integers with scales.
struct Heads {
  std::unique_ptr<FloatWeight> floats;
  std::unique_ptr<Weight> integers;
  int64_t count, inputs, outputs;

  Heads(const char* op, const Tensor& values, const Tensor& scales, int64_t outputs)
      : outputs(outputs) {
    if (values.type == ort::FLOAT) {
      NEED(!scales.memory, op, "scales of fp32");
      floats = std::make_unique<FloatWeight>(op, values, 1, outputs);
      count = floats->matrices, inputs = floats->inputs;
    } else {
      NEED(values.type == ort::UINT8 && scales.memory, op, "no packed weight");
      integers = std::make_unique<Weight>(op, values, scales, 4, outputs);
      count = integers->matrices, inputs = integers->inputs();
    }
  }
  // Multiplies up to ROWS rows by a head's matrix.
  void multiply(const Kernels& k, int64_t head, int64_t rows, const float* const* from,
                float* const* to) const {
    if (floats) return k.floats(floats->from(head, 0), outputs, rows, from, to);
    int64_t blocks = integers->blocks;
    auto memory = scratch<InputBlock>(rows, blocks);
    const InputBlock* in[ROWS];
    float* out[ROWS];
    for (int64_t i = 0; i < rows; i++) {
      k.quantise(from[i], blocks, &memory[i * blocks]);
      in[i] = &memory[i * blocks];
    }
    for (int64_t p = 0; p < integers->panels; p++) {
      for (int64_t i = 0; i < rows; i++) out[i] = to[i] + p * PANEL;
      ::multiply(k, *integers, integers->panel(head, p), min(PANEL, outputs - p * PANEL), rows, in,
                 out);
    }
  }
};

// Latent attention with its per-head projections: q [B, T, H * n + H * R] has all heads' values
// without position, then all heads' rotary values. w_uk projects a head's n values to `latent`;
// w_uv projects the result of Attention -> [B, T, H * N]. The last operand is Attention's `chosen`.
struct LatentAttention : Usual {
  static constexpr const char* name = "LatentAttention";
  static constexpr ort::Type inputs[] = {ort::FLOAT, ort::ANY,     ort::ANY,     ort::FLOAT,
                                         ort::FLOAT, ort::ANY,     ort::FLOAT,   ort::INT64,
                                         ort::INT64, ort::FLOAT16, ort::FLOAT16, ort::INT64};
  static constexpr unsigned optional = 1 << 9 | 1 << 10 | 1 << 11;
  const Kernels& k;
  Attention attention;
  int64_t latent, outputs;
  bool interleaved;

  LatentAttention(const Kernels& k, const Attributes& from)
      : k(k),
        attention(k, from),
        latent(from.integer("latent")),
        outputs(from.integer("N")),
        interleaved(from.integer("interleaved") != 0) {}

  void compute(Call& call) const {
    Tensor q = call.input(0);
    Heads uk(name, call.input(1), call.input(9, true), latent);
    Heads uv(name, call.input(2), call.input(10, true), outputs);
    NEED(q.rank() == 3 && uk.count == uv.count && uv.inputs == latent, name,
         "queries " + q.text() + " of " + std::to_string(uk.count) + " heads");
    int64_t slots = q.shape[0], tokens = q.shape[1], heads = uk.count, rows = slots * tokens;
    Angles angles(name, call.input(3), call.input(4), slots, tokens);
    int64_t rotary = 2 * angles.half, width = latent + rotary;
    int64_t nope = product(heads, uk.inputs);
    NEED(q.shape[2] == product(heads, uk.inputs + rotary), name,
         "queries " + q.text() + " of " + std::to_string(heads) + " heads");
    Tensor cache = call.input(5), fresh = call.input(6);
    Tensor base = call.input(7), first = call.input(8);
    float* y = call.output({slots, tokens, product(heads, outputs)});

    Tensor queries{{slots, heads, tokens, width}, nullptr, ort::FLOAT};
    auto memory = scratch<float>(heads, rows, width);
    queries.memory = memory.get();
    int64_t pieces = up(tokens, ROWS);
    // A task is up to ROWS tokens of a head, from `place` on in arrays ordered by heads, and from
    // `row` on in arrays ordered by tokens.
    auto by_head = [&](int64_t work, auto&& task) {
      tasks(call, product(slots, heads, pieces), work, [&](int64_t t) {
        int64_t slot = t / pieces / heads, head = t / pieces % heads, begin = t % pieces * ROWS;
        int64_t some = min(ROWS, tokens - begin);
        task(head, some, slot * tokens + begin, (slot * heads + head) * tokens + begin);
      });
    };
    by_head(product(rows, nope, latent),
            [&](int64_t head, int64_t some, int64_t row, int64_t place) {
              const float* from[ROWS];
              float* to[ROWS];
              for (int64_t i = 0; i < some; i++) {
                const float* own = q.data<float>() + (row + i) * q.shape[2];
                from[i] = own + head * uk.inputs;
                to[i] = &memory[(place + i) * width];
                angles.rotate_row(row + i, own + nope + head * rotary, interleaved, to[i] + latent);
              }
              uk.multiply(k, head, some, from, to);
            });
    auto mixed = scratch<float>(heads, rows, latent);
    Tensor chosen = call.input(11, true);
    attention.attend(call, queries, cache, fresh, base, first, chosen, mixed.get());
    by_head(product(rows, heads, latent, outputs),
            [&](int64_t head, int64_t some, int64_t row, int64_t place) {
              const float* from[ROWS];
              float* to[ROWS];
              for (int64_t i = 0; i < some; i++) {
                from[i] = &mixed[(place + i) * latent];
                to[i] = y + ((row + i) * heads + head) * outputs;
              }
              uv.multiply(k, head, some, from, to);
            });
  }
};

}  // namespace
