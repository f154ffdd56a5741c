// The part of grouped-query attention between its projections and the attention itself.
#include "cache_rows.h"
#include "registry.h"

namespace {

// As defined in `plugins/grouped_rows/op.py`: a [B, T, H * D + others + 2 * G * D] of queries,
// other values, keys and values -> queries and others [B, T, H * D + others], cache rows
// [B, 1, T, 2 * G * D]. The heads of queries and keys are normed, if there are norms [D], then
// their first values are rotated. norms_values: values are normed, without a weight. shares_values:
// `a` has none; they are the keys as they come. If there is a cache [B, 1, S, 2 * G * D], it is the
// third result, with the rows written from start [B] on; ring: after its last row it begins anew,
// and a slot whose start is negative writes nothing.
template <class C>
struct GroupedRows : FloatOperator {
  static constexpr const char* name =
      name_of<C>("GroupedRows", "GroupedRowsBf16", "GroupedRowsInt8");
  static constexpr Operand inputs[] = {FLOAT, maybe(FLOAT),   maybe(FLOAT), FLOAT,
                                       FLOAT, maybe(TYPE<C>), maybe(INT64)};
  static constexpr Operand results[] = {FLOAT, FLOAT, maybe(TYPE<C>)};
  using FloatOperator::FloatOperator;
  int64_t heads = from.integer("heads"), groups = from.integer("groups");
  int64_t width = from.integer("width");
  float epsilon = from.real("epsilon");
  bool plus_one = from.flag("plus_one");  // a norm multiplies by 1 + weight
  bool norms_values = from.value_or<int64_t>("norms_values", 0);
  bool shares_values = from.value_or<int64_t>("shares_values", 0);
  bool ring = from.value_or<int64_t>("ring", 0);

  void compute(Call& call) const {
    Tensor a = call.input(0);
    REQUIRE(a.rank() == 3 && heads >= 0 && groups >= 0 && width > 0 &&
                product(heads, width) <= a.shape[2] - product(parts(), groups, width),
            name, std::to_string(heads) + " heads of " + std::to_string(width) + " in " + a.text());
    int64_t slots = a.shape[0], tokens = a.shape[1], all = a.shape[2], rows = slots * tokens;
    int64_t keys = groups * width, queries = all - parts() * keys;
    Angles angles(name, call.input(3), call.input(4), slots, tokens);
    REQUIRE(2 * angles.half <= width, name, "angles " + angles.cos.text() + " of a head's numbers");
    std::vector<float> q_norm = weight(call.input(1, true)), k_norm = weight(call.input(2, true));
    std::vector<float> ones(norms_values ? width : 0, 1.0f);
    float* q = call.output({slots, tokens, queries});
    float* fresh = call.output({slots, 1, tokens, 2 * keys}, 1);
    run_tasks(call, rows, product(8, rows, all), [&](int64_t m) {
      const float* row = a.data<float>() + m * all;
      float *own = q + m * queries, *rest = fresh + m * 2 * keys;
      for (int64_t h = 0; h < heads; h++) head(row + h * width, q_norm, angles, m, own + h * width);
      std::copy(row + heads * width, row + queries, own + heads * width);
      for (int64_t g = 0; g < groups; g++)
        head(row + queries + g * width, k_norm, angles, m, rest + g * width);
      const float* values = row + all - keys;  // the keys, if they are shared
      for (int64_t g = 0; g < groups && norms_values; g++)
        k.norm(values + g * width, ones.data(), width, epsilon, rest + keys + g * width);
      if (!norms_values) std::copy(values, values + keys, rest + keys);
    });
    Tensor cache = call.input(5, true);
    if (cache.memory)
      write_rows<C>(name, call, cache, call.input(6), fresh, {slots, tokens, 2 * keys},
                    {{width}, 2 * groups}, ring);
  }

 private:
  int64_t parts() const { return shares_values ? 1 : 2; }  // of keys, and values

  std::vector<float> weight(const Tensor& norm) const {
    if (!norm.memory) return {};
    REQUIRE(norm.is({width}), name, "norm " + norm.text());
    std::vector<float> all(norm.data<float>(), norm.data<float>() + width);
    for (float& each : all) each += plus_one ? 1.0f : 0.0f;
    return all;
  }

  void head(const float* x, const std::vector<float>& norm, const Angles& angles, int64_t row,
            float* y) const {
    auto normed = scratch<float>(norm.empty() ? 0 : width);
    if (!norm.empty()) k.norm(x, norm.data(), width, epsilon, normed.get());
    if (!norm.empty()) x = normed.get();
    angles.rotate_row(row, x, false, y);
    std::copy(x + 2 * angles.half, x + width, y + 2 * angles.half);
  }
};

const Registered<GroupedRows<float>, GroupedRows<mtp::Bf16>, GroupedRows<int8_t>> registered;

}  // namespace
