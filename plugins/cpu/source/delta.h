// The delta rule for some columns of a head, and the convolution before it.
#pragma once
#include "maths.h"

namespace {

// Vectors of columns that are computed together; each has three totals.
#if defined(__AVX512F__)
constexpr int TOGETHER = mtp::COLUMNS / LANES;
#else
constexpr int TOGETHER = 2;
#endif
static_assert(mtp::COLUMNS % (LANES * TOGETHER) == 0);

// Runs token t for some columns: updates the state, reads it by the token's query into `out`, and
// reads it by the next token's key into `retrieved`. Each number read is one total, to which keys
// add in order. A token loads and stores each number of the state once, which limits its speed: the
// state of 64 columns fills a first-level cache.
template <bool KEEPS, bool ASKS, bool GOES_ON>
void delta_token(const mtp::Delta& d, int64_t t, const float* from, int64_t reads, float* to,
                 int64_t writes, Floats* retrieved, float* out) {
  const float *k = d.keys + t * d.stride, *q = ASKS ? d.queries + t * d.stride : nullptr;
  const float* next = GOES_ON ? k + d.stride : nullptr;
  Floats decay = same(d.decays[t * d.heads]), mixed[TOGETHER], found[TOGETHER];
  Floats later = same(GOES_ON ? d.decays[(t + 1) * d.heads] : 0.0f);
  for (int c = 0; c < TOGETHER; c++) mixed[c] = found[c] = same(0.0f);
  for (int64_t i = 0; i < d.width; i++) {
    Floats key = same(k[i]), query = same(ASKS ? q[i] : 0.0f);
    Floats next_key = same(GOES_ON ? next[i] : 0.0f);
    for (int c = 0; c < TOGETHER; c++) {
      Floats own = fma(key, retrieved[c], mul(load(from + i * reads + LANES * c), decay));
      if (KEEPS) store(to + i * writes + LANES * c, own);
      if (ASKS) mixed[c] = fma(query, own, mixed[c]);
      if (GOES_ON) found[c] = fma(next_key, mul(own, later), found[c]);
    }
  }
  for (int c = 0; c < TOGETHER; c++) {
    if (ASKS) store(out + LANES * c, mixed[c]);
    retrieved[c] = found[c];
  }
}

template <bool ASKS>
void delta_columns(const mtp::Delta& d, int64_t first) {
  Floats retrieved[TOGETHER], decay = same(d.decays[0]);
  for (int c = 0; c < TOGETHER; c++) retrieved[c] = same(0.0f);
  const float* from = d.state + first;
  int64_t reads = d.reads;
  for (int64_t i = 0; i < d.width; i++)
    for (int c = 0; c < TOGETHER; c++)
      retrieved[c] =
          fma(same(d.keys[i]), mul(load(from + i * reads + LANES * c), decay), retrieved[c]);
  for (int64_t t = 0; t < d.tokens; t++) {
    Floats share = same(d.shares[t * d.heads]);
    const float* v = d.values + t * mtp::COLUMNS + first;
    for (int c = 0; c < TOGETHER; c++)
      retrieved[c] = mul(share, sub(load(v + LANES * c), retrieved[c]));
    float *out = d.out + t * mtp::COLUMNS + first, *own = d.between + first;
    if (t + 1 < d.tokens)
      delta_token<true, ASKS, true>(d, t, from, reads, own, mtp::COLUMNS, retrieved, out);
    else if (d.after)
      delta_token<true, ASKS, false>(d, t, from, reads, d.after + first, d.writes, retrieved, out);
    else
      delta_token<false, ASKS, false>(d, t, from, reads, nullptr, 0, retrieved, out);
    from = own, reads = mtp::COLUMNS;
  }
}

void delta(const mtp::Delta& d) {
  for (int64_t first = 0; first < mtp::COLUMNS; first += LANES * TOGETHER)
    d.queries ? delta_columns<true>(d, first) : delta_columns<false>(d, first);
}

// Computes silu(sum over j of weight[j] * rows[j]), added in the order of j.
void convolve(const float* const* rows, const float* weight, int64_t taps, int64_t channels,
              float* out) {
  for (int64_t i = 0; i < channels; i += LANES) {
    int64_t some = channels - i < LANES ? channels - i : LANES;
    Floats sum = same(0.0f);
    for (int64_t j = 0; j < taps; j++) {
      const float* w = weight + j * channels + i;
      sum = some == LANES ? fma(load(rows[j] + i), load(w), sum)
                          : fma(load_some(rows[j] + i, some), load_some(w, some), sum);
    }
    float lanes[LANES];
    store(lanes, silu(sum));
    std::memcpy(out + i, lanes, some * sizeof(float));
  }
}

}  // namespace
