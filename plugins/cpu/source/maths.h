// Elementary functions over 16 lanes and reductions of rows; the same operations in every set.
#pragma once
#include <cmath>

#include "kernels.h"

namespace {

using mtp::LANES;

// The logarithm of FLOOR in plugins/mla_attention/op.py, so that no weight is a subnormal number.
constexpr float LOG_FLOOR = -73.682724f;

// exp(x) for x clamped to [-87, 88]: 2^n * p(r), with Cephes' polynomial for expf. exp(0) is 1. A
// NaN stays a NaN, because max and min then return their second operand.
inline Floats exp(Floats x) {
  x = min(same(88.0f), max(same(-87.0f), x));
  Ints n = to_ints(mul(x, same(1.44269504f)));
  Floats rounded = to_floats(n);
  Floats r = fma(rounded, same(-0.693359375f), x);
  r = fma(rounded, same(2.12194440e-4f), r);
  Floats p = same(1.9875691500e-4f);
  p = fma(p, r, same(1.3981999507e-3f));
  p = fma(p, r, same(8.3334519073e-3f));
  p = fma(p, r, same(4.1665795894e-2f));
  p = fma(p, r, same(1.6666665459e-1f));
  p = fma(p, r, same(5.0000001201e-1f));
  p = fma(p, mul(r, r), add(r, same(1.0f)));
  return mul(p, power_of_two(n));
}

inline Floats silu(Floats x) { return div(x, add(same(1.0f), exp(sub(same(0.0f), x)))); }

// x * (1 + tanh(z)) / 2 with z = sqrt(2 / pi) * (x + 0.044715 x^3), which is x * sigmoid(2 z).
inline Floats gelu(Floats x) {
  Floats z = fma(mul(mul(x, x), x), same(0.044715f), x);
  return div(x, add(same(1.0f), exp(mul(z, same(-1.5957691216f)))));
}

// Sums 16 lanes by adding halves.
inline float tree(Floats x) {
  float lanes[LANES];
  store(lanes, x);
  for (int width = 8; width > 0; width /= 2)
    for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
  return lanes[0];
}

void gated(float* gate, const float* up, int64_t count) {
  for (int64_t i = 0; i < count; i += LANES)
    store(gate + i, mul(silu(load(gate + i)), load(up + i)));
}

void gated_gelu(float* gate, const float* up, int64_t count) {
  for (int64_t i = 0; i < count; i += LANES)
    store(gate + i, mul(gelu(load(gate + i)), load(up + i)));
}

// Lane i sums squares i, i + 16, ..; the speed is limited by reading the row.
float squares(const float* x, int64_t count) {
  Floats total = same(0.0f);
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) total = fma(load(x + i), load(x + i), total);
  if (i < count) {
    Floats last = load_some(x + i, count - i);
    total = fma(last, last, total);
  }
  return tree(total);
}

void norm(const float* x, const float* weight, int64_t count, float epsilon, float* out) {
  float mean = squares(x, count) / static_cast<float>(count);
  Floats factor = div(same(1.0f), same(__builtin_sqrtf(mean + epsilon)));
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES)
    store(out + i, mul(mul(load(x + i), factor), load(weight + i)));
  if (i < count) {
    float lanes[LANES];
    Floats last = mul(load_some(x + i, count - i), factor);
    store(lanes, mul(last, load_some(weight + i, count - i)));
    std::memcpy(out + i, lanes, (count - i) * sizeof(float));
  }
}

void mix(const float* const* rows, const float* weights, int64_t terms, int64_t count, float* out) {
  for (int64_t i = 0; i < count; i += LANES) {
    int64_t some = count - i < LANES ? count - i : LANES;
    float lanes[LANES];
    Floats total = same(0.0f);
    for (int64_t t = 0; t < terms; t++) {
      const float* row = rows[t] + i;
      total = fma(same(weights[t]), some == LANES ? load(row) : load_some(row, some), total);
    }
    store(some == LANES ? out + i : lanes, total);
    if (some < LANES) std::memcpy(out + i, lanes, some * sizeof(float));
  }
}

void sigmoid(const float* x, int64_t count, float* out) {
  for (int64_t i = 0; i < count; i += LANES) {
    int64_t some = count - i < LANES ? count - i : LANES;
    float lanes[LANES];
    Floats e = exp(sub(same(0.0f), load_some(x + i, some)));
    store(lanes, div(same(1.0f), add(same(1.0f), e)));
    std::memcpy(out + i, lanes, some * sizeof(float));
  }
}

// cap * tanh(x / cap), as tanh(z) = 1 - 2 / (exp(2 z) + 1)
void soft_cap(const float* x, int64_t count, float cap, float* out) {
  for (int64_t i = 0; i < count; i += LANES) {
    int64_t some = count - i < LANES ? count - i : LANES;
    float lanes[LANES];
    Floats e = exp(mul(load_some(x + i, some), same(2.0f / cap)));
    Floats share = div(same(2.0f), add(e, same(1.0f)));
    store(lanes, mul(sub(same(1.0f), share), same(cap)));
    std::memcpy(out + i, lanes, some * sizeof(float));
  }
}

void weigh(const float* x, int64_t count, float top, float temperature, float* out) {
  // exp() clamps, so its least value stands for 0. It is too small to change a weight above 1e-30.
  Floats most = same(top), divisor = same(temperature), least = exp(same(-87.0f));
  for (int64_t i = 0; i < count; i += LANES) {
    int64_t some = count - i < LANES ? count - i : LANES;
    float lanes[LANES];
    Floats e = exp(div(sub(load_some(x + i, some), most), divisor));
    store(lanes, sub(e, least));
    std::memcpy(out + i, lanes, some * sizeof(float));
  }
}

// Finds the largest number of each stretch of a row, then its index in one stretch. Lane i sums
// exponentials i, i + 16, ..; an exponential is at least 1e-32. If there is a NaN, the first is the
// result.
mtp::Best best(const float* x, int64_t count, bool sum) {
  constexpr int64_t STRETCH = 512;
  constexpr float LEAST = -INFINITY;
  mtp::Best found{LEAST, LEAST, 0.0f, 0};
  Floats zeros = same(0.0f);
  int64_t place = 0;
  for (int64_t at = 0; at < count; at += STRETCH) {
    int64_t end = at + STRETCH < count ? at + STRETCH : count, i = at;
    Floats tops = same(LEAST);
    for (; i + LANES <= end; i += LANES) {
      Floats some = load(x + i);
      tops = max(some, tops);  // ignores NaNs
      zeros = fma(some, same(0.0f), zeros);
    }
    float top = largest(tops);
    for (; i < end; i++) {
      top = x[i] > top ? x[i] : top;
      zeros = fma(same(x[i]), same(0.0f), zeros);
    }
    float other = found.top;
    if (top > found.top) {
      found.top = top;
      place = at;
    } else {
      other = top;
    }
    found.second = other > found.second ? other : found.second;
  }
  if (tree(zeros) != 0.0f)
    for (int64_t i = 0; i < count; i++)
      if (x[i] != x[i]) return {NAN, NAN, NAN, i};
  int64_t end = place + STRETCH < count ? place + STRETCH : count;
  for (found.id = place; found.id + 1 < end && x[found.id] != found.top;) found.id++;
  for (int64_t i = place; i < end; i++)
    if (i != found.id && x[i] > found.second) found.second = x[i];
  // Which of the zeros of either sign is found depends on the set, so they become +0.
  found.top += 0.0f, found.second += 0.0f;
  if (!sum) return found;
  Floats sums = same(0.0f), top = same(found.top), floor = same(LOG_FLOOR);
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) sums = add(sums, exp(max(floor, sub(load(x + i), top))));
  found.total = tree(sums);
  for (; i < count; i++) {
    float lanes[LANES];
    store(lanes, exp(max(floor, same(x[i] - found.top))));
    found.total += lanes[0];
  }
  return found;
}

}  // namespace
