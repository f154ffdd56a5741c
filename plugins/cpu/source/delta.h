// The delta rule of some columns of a head, and the convolution in front of it.
#pragma once
#include "maths.h"

namespace {

constexpr int COLUMNS = mtp::COLUMNS / 16;

// Token by token; every number has one total, to which keys add in their order.
void delta(const mtp::Delta& d, float* state) {
  for (int64_t t = 0; t < d.tokens; t++) {
    const float *q = d.queries ? d.queries + t * d.stride : nullptr, *k = d.keys + t * d.stride;
    Floats decay = same(d.decays[t * d.heads]), share = same(d.shares[t * d.heads]);
    Floats held[COLUMNS], mixed[COLUMNS];
    for (int c = 0; c < COLUMNS; c++) held[c] = mixed[c] = same(0.0f);
    for (int64_t i = 0; i < d.width; i++) {
      float* row = state + i * mtp::COLUMNS;
      Floats key = same(k[i]);
      for (int c = 0; c < COLUMNS; c++) {
        Floats own = mul(load(row + 16 * c), decay);
        store(row + 16 * c, own);
        held[c] = fma(key, own, held[c]);
      }
    }
    const float* v = d.values + t * mtp::COLUMNS;
    for (int c = 0; c < COLUMNS; c++) held[c] = mul(share, sub(load(v + 16 * c), held[c]));
    for (int64_t i = 0; i < d.width; i++) {
      float* row = state + i * mtp::COLUMNS;
      Floats key = same(k[i]), query = same(q ? q[i] : 0.0f);
      for (int c = 0; c < COLUMNS; c++) {
        Floats own = fma(key, held[c], load(row + 16 * c));
        store(row + 16 * c, own);
        if (q) mixed[c] = fma(query, own, mixed[c]);
      }
    }
    if (!q) continue;
    for (int c = 0; c < COLUMNS; c++) store(d.out + t * mtp::COLUMNS + 16 * c, mixed[c]);
  }
}

// silu(sum over j of weight[j] * rows[j]), added in the order of j.
void convolve(const float* const* rows, const float* weight, int64_t taps, int64_t channels,
              float* out) {
  for (int64_t i = 0; i < channels; i += 16) {
    int64_t some = channels - i < 16 ? channels - i : 16;
    Floats sum = same(0.0f);
    for (int64_t j = 0; j < taps; j++) {
      const float* w = weight + j * channels + i;
      sum = some == 16 ? fma(load(rows[j] + i), load(w), sum)
                       : fma(load_some(rows[j] + i, some), load_some(w, some), sum);
    }
    float lanes[16];
    store(lanes, silu(sum));
    std::memcpy(out + i, lanes, some * sizeof(float));
  }
}

}  // namespace
