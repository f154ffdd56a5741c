// Attention over cached rows, with LANES queries in the lanes: each cached number is read once for
// all queries.
//
// Positions are always split at multiples of CHUNK and SPLIT. Within a split the softmax is
// rescaled chunk by chunk; splits are folded in ascending order. A score is a chain of fma over a
// row's numbers, a mixed value is one over the rows, both in ascending order. Positions that a lane
// does not see are left out, so a lane's result depends only on its own query and the rows that it
// sees. An infinite or NaN score makes the result NaN.
#pragma once
#include "kernels.h"
#include "maths.h"

namespace {

constexpr float LOWEST = -3.0e38f;  // the maximum of no scores; finite, as it is subtracted

template <int KEYS>
void scores(const mtp::Attention& a, const float* rows, float* out) {
  Floats sums[KEYS];
  for (int r = 0; r < KEYS; r++) sums[r] = same(0.0f);
  for (int64_t k = 0; k < a.width; k++) {
    Floats q = load(a.queries + LANES * k);
#pragma GCC unroll 16
    for (int r = 0; r < KEYS; r++) sums[r] = fma(q, same(rows[r * a.stride + k]), sums[r]);
  }
  for (int r = 0; r < KEYS; r++) store(out + LANES * r, sums[r]);
}

// Scores rows r .. count - 1, fewer at once at the end.
template <int KEYS>
void score_rows(const mtp::Attention& a, const float* rows, int64_t r, int64_t count, float* out) {
  for (; r + KEYS <= count; r += KEYS) scores<KEYS>(a, rows + r * a.stride, out + LANES * r);
  if constexpr (KEYS > 1) score_rows<KEYS / 2>(a, rows, r, count, out);
}

// The rows of a chunk that each lane sees. A lane that sees any position sees all those from
// `begin` to `common`.
struct Seen {
  int64_t count, begin, common;
  Floats visible, hidden;

  Seen(const mtp::Attention& a, int64_t at, int64_t count) : count(count), begin(0), common(count) {
    float ends[LANES], starts[LANES];
    for (int i = 0; i < LANES; i++) {
      int64_t end = a.seen[i] - at, start = a.from[i] - at;
      if (a.seen[i] > 0 && end < common) common = end > 0 ? end : 0;
      if (a.seen[i] > 0 && start > begin) begin = start < count ? start : count;
      ends[i] = static_cast<float>(end), starts[i] = static_cast<float>(start);
    }
    visible = load(ends), hidden = load(starts);
    common = common > begin ? common : begin;
  }
  // Returns `value` in the lanes that see row r, and `other` in the rest.
  Floats where(int64_t r, Floats value, Floats other) const {
    Floats place = same(static_cast<float>(r)), upper = where_less(place, visible, value, other);
    return begin > 0 ? where_less(place, hidden, other, upper) : upper;
  }
};

// mixed[d] = mixed[d] * factor + sum of weights[r] * rows[r][d]
template <int VALUES>
void mix(const float* weights, Floats factor, const float* rows, int64_t stride, const Seen& seen,
         float* mixed) {
  Floats sums[VALUES];
  for (int d = 0; d < VALUES; d++) sums[d] = mul(load(mixed + LANES * d), factor);
  auto mix_masked = [&](int64_t r) {  // as 0 * NaN is NaN in lanes that don't see the row
    Floats p = load(weights + LANES * r);
    for (int d = 0; d < VALUES; d++)
      sums[d] = seen.where(r, fma(p, same(rows[r * stride + d]), sums[d]), sums[d]);
  };
  int64_t r = 0;
  for (; r < seen.begin; r++) mix_masked(r);
  for (; r < seen.common; r++) {
    Floats p = load(weights + LANES * r);
#pragma GCC unroll 16
    for (int d = 0; d < VALUES; d++) sums[d] = fma(p, same(rows[r * stride + d]), sums[d]);
  }
  for (; r < seen.count; r++) mix_masked(r);
  for (int d = 0; d < VALUES; d++) store(mixed + LANES * d, sums[d]);
}

// Mixes values d .. latent - 1, fewer at once at the end.
template <int VALUES>
void mix_values(const mtp::Attention& a, const float* weights, Floats factor, const float* rows,
                int64_t d, const Seen& seen, float* mixed) {
  for (; d + VALUES <= a.latent; d += VALUES)
    mix<VALUES>(weights, factor, rows + d, a.stride, seen, mixed + LANES * d);
  if constexpr (VALUES > 1) mix_values<VALUES / 2>(a, weights, factor, rows, d, seen, mixed);
}

// Returns a pointer to a chunk's rows, which are adjacent: in the cache, in the fresh rows, or in
// `copy` if the chunk has rows of both or the cache is bfloat16. The cache has whole chunks, unless
// it has all positions.
inline const float* chunk_rows(const mtp::Attention& a, int64_t at, int64_t end, float* copy) {
  if (at >= a.base) return a.fresh + (at - a.base) * a.stride;
  int64_t place = at % a.ring * a.stride;
  if (end <= a.base && a.cache) return a.cache + place;
  int64_t border = end < a.base ? end : a.base, old = (border - at) * a.stride;
  if (a.cache) std::memcpy(copy, a.cache + place, old * sizeof(float));
  for (int64_t i = 0; !a.cache && i < old; i++) copy[i] = mtp::wide(a.halves[place + i]);
  if (end > border) std::memcpy(copy + old, a.fresh, (end - border) * a.stride * sizeof(float));
  return copy;
}

// Turns a chunk's scores into weights; returns the factor for the sums of earlier chunks.
inline Floats weigh(float* chunk, const Seen& seen, const mtp::Partial& out) {
  Floats before = load(out.largest), top = before, lowest = same(LOWEST);
  for (int64_t r = 0; r < seen.count; r++)
    top = max(top, seen.where(r, load(chunk + LANES * r), lowest));
  Floats sum = same(0.0f);
  for (int64_t r = 0; r < seen.count; r++) {
    Floats score = load(chunk + LANES * r), weight = exp(max(same(LOG_FLOOR), sub(score, top)));
    weight = fma(score, same(0.0f), weight);  // NaN unless the score is finite
    weight = seen.where(r, weight, same(0.0f));
    sum = add(sum, weight);
    store(chunk + LANES * r, weight);
  }
  Floats factor = exp(max(same(LOG_FLOOR), sub(before, top)));
  store(out.largest, top);
  store(out.total, fma(load(out.total), factor, sum));
  return factor;
}

void attend(const mtp::Attention& a, int64_t begin, int64_t end, float* copy,
            const mtp::Partial& out) {
  alignas(64) float chunk[mtp::CHUNK * LANES];
  store(out.largest, same(LOWEST));
  store(out.total, same(0.0f));
  std::memset(out.mixed, 0, a.latent * LANES * sizeof(float));
  for (int64_t at = begin, last; at < end; at = last) {
    int64_t next = (at / mtp::CHUNK + 1) * mtp::CHUNK, count = (next < end ? next : end) - at;
    last = at + count;
    const float* rows = chunk_rows(a, at, last, copy);
    const float *keys = rows + a.keys, *values = rows + a.values;
    score_rows<TILE_KEYS>(a, keys, 0, count, chunk);
    Seen seen(a, at, count);
    Floats factor = weigh(chunk, seen, out);
    mix_values<TILE_KEYS>(a, chunk, factor, values, 0, seen, out.mixed);
  }
}

void fold(const mtp::Partial& into, const mtp::Partial& later, int64_t latent) {
  Floats one = load(into.largest), other = load(later.largest), top = max(one, other);
  Floats keep = exp(max(same(LOG_FLOOR), sub(one, top))),
         take = exp(max(same(LOG_FLOOR), sub(other, top)));
  store(into.largest, top);
  store(into.total, fma(load(later.total), take, mul(load(into.total), keep)));
  for (int64_t d = 0; d < latent; d++) {
    Floats kept = mul(load(into.mixed + LANES * d), keep);
    store(into.mixed + LANES * d, fma(load(later.mixed + LANES * d), take, kept));
  }
}

}  // namespace
