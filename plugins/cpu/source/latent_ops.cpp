// Latent attention's operators besides plain products.
#include <tuple>

#include "attention_ops.h"
#include "cache_rows.h"
#include "registry.h"
#include "weights.h"

namespace {

// a [B, T, Q + latent + R] -> query input [B, T, Q], normed if there is a norm [Q]; cache rows
// [B, 1, T, latent + R]: the normed latent, then the rotated key. If there is a cache
// [B, 1, S, latent + R], it is the third result, with these rows written from start [B] on. It is
// updated in place if input and output are bound to the same memory. whole: the norm is of latent
// and key; ring: as with GroupedRows.
template <class C>
struct LatentRows : FloatOperator {
  static constexpr const char* name = name_of<C>("LatentRows", "LatentRowsBf16", "LatentRowsInt8");
  static constexpr Operand inputs[] = {FLOAT, maybe(FLOAT),   FLOAT,       FLOAT,
                                       FLOAT, maybe(TYPE<C>), maybe(INT64)};
  static constexpr Operand results[] = {FLOAT, FLOAT, maybe(TYPE<C>)};
  using FloatOperator::FloatOperator;
  float epsilon = from.real("epsilon");
  bool interleaved = from.flag("interleaved");
  bool whole = from.value_or<int64_t>("whole", 0), ring = from.value_or<int64_t>("ring", 0);

  void compute(Call& call) const {
    Tensor a = call.input(0), q_weight = call.input(1, true), weight = call.input(2);
    REQUIRE(a.rank() == 3 && weight.rank() == 1, name, a.text() + ", norm " + weight.text());
    int64_t slots = a.shape[0], tokens = a.shape[1], rows = slots * tokens;
    Angles angles(name, call.input(3), call.input(4), slots, tokens);
    int64_t rotary = 2 * angles.half, normed = weight.shape[0];
    int64_t latent = whole ? normed - rotary : normed, width = latent + rotary;
    int64_t queries = a.shape[2] - width;
    REQUIRE(queries >= 0 && latent >= 0 && (!q_weight.memory || q_weight.is({queries})), name,
            a.text() + ", norms " + weight.text() + ", " + q_weight.text());
    float* q = call.output({slots, tokens, queries});
    float* fresh = call.output({slots, 1, tokens, width}, 1);
    run_tasks(call, rows, product(8, rows, a.shape[2]), [&](int64_t m) {
      const float* row = a.data<float>() + m * a.shape[2];
      if (!q_weight.memory) std::copy_n(row, queries, q + m * queries);
      if (q_weight.memory) k.norm(row, q_weight.data<float>(), queries, epsilon, q + m * queries);
      float* own = fresh + m * width;
      k.norm(row + queries, weight.data<float>(), normed, epsilon, own);
      const float* key = whole ? own + latent : row + queries + latent;
      angles.rotate_row(m, key, interleaved, own + latent);
    });
    Tensor cache = call.input(5, true);
    if (cache.memory)
      write_rows<C>(name, call, cache, call.input(6), fresh, {slots, tokens, width},
                    {{latent, rotary}, 1}, ring);
  }
};

// Latent attention with its per-head projections: q [B, T, H * n + H * R] has all heads' values
// without position, then all heads' rotary values. w_uk projects a head's n values to `latent`;
// w_uv projects the result of Attention -> [B, T, H * N]. The last operand is Attention's `chosen`.
struct LatentAttention : FloatOperator {
  static constexpr const char* name = "LatentAttention";
  static constexpr Operand inputs[] = {FLOAT,          ANY,   maybe(FLOAT16), ANY,
                                       maybe(FLOAT16), FLOAT, FLOAT,          ANY,
                                       FLOAT,          INT64, INT64,          maybe(INT64)};
  using FloatOperator::FloatOperator;
  AttentionOp attention{k, from};
  int64_t latent = from.integer("latent"), outputs = from.integer("N");
  bool interleaved = from.flag("interleaved");

  void compute(Call& call) const {
    Tensor q = call.input(0);
    Weight w_uk = weight_of(name, call.input(1), call.input(2, true), 1, latent);
    Weight w_uv = weight_of(name, call.input(3), call.input(4, true), 1, outputs);
    auto sizes = [](const auto& w) -> Matrices { return w; };
    Matrices uk = std::visit(sizes, w_uk), uv = std::visit(sizes, w_uv);
    REQUIRE(q.rank() == 3 && uk.matrices == uv.matrices && uv.inputs == latent, name,
            "queries " + q.text() + " of " + std::to_string(uk.matrices) + " heads");
    int64_t slots = q.shape[0], tokens = q.shape[1], heads = uk.matrices, rows = slots * tokens;
    Angles angles(name, call.input(5), call.input(6), slots, tokens);
    int64_t rotary = 2 * angles.half, width = latent + rotary;
    int64_t nope = product(heads, uk.inputs);
    REQUIRE(q.shape[2] == product(heads, uk.inputs + rotary), name,
            "queries " + q.text() + " of " + std::to_string(heads) + " heads");
    Tensor cache = call.input(7), fresh = call.input(8);
    Tensor base = call.input(9), first = call.input(10);
    float* y = call.output({slots, tokens, product(heads, outputs)});

    Tensor queries{{slots, heads, tokens, width}, nullptr, FLOAT};
    auto memory = scratch<float>(heads, rows, width);
    queries.memory = memory.get();
    int64_t pieces = ceil_div(tokens, ROWS);
    // Multiplies each head's vectors by its matrix. `vectors` returns where a token's vector is and
    // where its product goes: `row` is its index in arrays ordered by tokens, `place` in arrays
    // ordered by heads.
    auto by_head = [&](const Weight& weight, int64_t work, auto&& vectors) {
      run_tasks(call, product(slots, heads, pieces), work, [&](int64_t t) {
        int64_t slot = t / pieces / heads, head = t / pieces % heads, begin = t % pieces * ROWS;
        int64_t some = min(ROWS, tokens - begin);
        const float* from[ROWS];
        float* to[ROWS];
        for (int64_t i = 0; i < some; i++) {
          int64_t row = slot * tokens + begin + i,
                  place = (slot * heads + head) * tokens + begin + i;
          std::tie(from[i], to[i]) = vectors(head, row, place);
        }
        project(k, weight, head, some, from, to);
      });
    };
    by_head(w_uk, product(rows, nope, latent), [&](int64_t head, int64_t row, int64_t place) {
      const float* own = q.data<float>() + row * q.shape[2];
      float* to = &memory[place * width];
      angles.rotate_row(row, own + nope + head * rotary, interleaved, to + latent);
      return std::pair(own + head * uk.inputs, to);
    });
    auto mixed = scratch<float>(heads, rows, latent);
    Tensor chosen = call.input(11, true);
    attention.attend(call, queries, cache, fresh, base, first, chosen, mixed.get());
    by_head(w_uv, product(rows, heads, latent, outputs),
            [&](int64_t head, int64_t row, int64_t place) {
              return std::pair(&mixed[place * latent], y + (row * heads + head) * outputs);
            });
  }
};

const Registered<AttentionOp, LatentRows<float>, LatentRows<mtp::Bf16>, LatentRows<int8_t>,
                 LatentAttention>
    registered;

}  // namespace
