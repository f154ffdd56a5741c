// Elementary functions over 16 lanes, and a row's reduction; the same operations in every set.
#pragma once
#include "kernels.h"

namespace {

// exp(x) for x in [-87, 88], to which x is clamped: 2^n * p(r), by Cephes' polynomial for expf.
// exp(0) is 1.
inline Floats exp(Floats x) {
  x = min(max(x, same(-87.0f)), same(88.0f));
  Ints n = to_ints(mul(x, same(1.44269504f)));
  Floats whole = to_floats(n);
  Floats r = fma(whole, same(-0.693359375f), x);
  r = fma(whole, same(2.12194440e-4f), r);
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

// The sum of 16 lanes: halves are added, down to one.
inline float tree(Floats x) {
  float lanes[16];
  store(lanes, x);
  for (int width = 8; width > 0; width /= 2)
    for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
  return lanes[0];
}

void gated(float* gate, const float* up, int64_t count) {
  for (int64_t i = 0; i < count; i += 16) store(gate + i, mul(silu(load(gate + i)), load(up + i)));
}

// Lane i sums squares i, i + 16, ..; bound by the row's bytes.
void norm(const float* x, const float* weight, int64_t count, float epsilon, float* out) {
  Floats squares = same(0.0f);
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) squares = fma(load(x + i), load(x + i), squares);
  if (i < count) {
    Floats last = load_some(x + i, count - i);
    squares = fma(last, last, squares);
  }
  float mean = tree(squares) / static_cast<float>(count);
  Floats factor = div(same(1.0f), same(__builtin_sqrtf(mean + epsilon)));
  for (i = 0; i + 16 <= count; i += 16)
    store(out + i, mul(mul(load(x + i), factor), load(weight + i)));
  if (i < count) {
    float lanes[16];
    Floats last = mul(load_some(x + i, count - i), factor);
    store(lanes, mul(last, load_some(weight + i, count - i)));
    std::memcpy(out + i, lanes, (count - i) * sizeof(float));
  }
}

}  // namespace
