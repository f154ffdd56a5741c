// exp, and the decay and share of a delta rule, computed in fp64 with additions, multiplications
// and divisions only, so that they are the same on every machine.
#pragma once
#include <cmath>

namespace mtp {

// x is n ln 2 + r with r in [-0.347, 0.347], and exp(r) is its series.
inline double exponential(double x) {
  x = x < -700.0 ? -700.0 : x > 700.0 ? 700.0 : x;
  double n = std::floor(x * 1.4426950408889634 + 0.5);
  double r = (x - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10, sum = 1.0;
  for (int i = 13; i > 0; i--) sum = 1.0 + sum * r / i;
  return std::ldexp(sum, n == n ? static_cast<int>(n) : 0);
}

// log(1 + exp(x)) is max(x, 0) + 2 artanh(s), with e = exp(-|x|) and s = e / (2 + e).
inline double softplus(double x) {
  double e = exponential(-std::fabs(x)), s = e / (2.0 + e), z = s * s, sum = 0.0;
  for (int i = 19; i > 0; i -= 2) sum = sum * z + 1.0 / i;
  return (x > 0.0 ? x : 0.0) + 2.0 * s * sum;
}

inline float decay(float rate, float x) {
  return static_cast<float>(exponential(-static_cast<double>(rate) * softplus(x)));
}

inline float share(float x) { return static_cast<float>(1.0 / (1.0 + exponential(-x))); }

}  // namespace mtp
