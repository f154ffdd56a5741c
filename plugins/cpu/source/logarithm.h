// The natural logarithm of fp32 numbers, computed in fp64 with additions, multiplications and one
// division only, so that it is the same on every machine. Right to fp32's last digit.
#pragma once
#include <cmath>

namespace mtp {

// x is 2^e * m with m in [0.707, 1.414), and log(m) is 2 artanh(s) with s = (m - 1) / (m + 1).
inline float logarithm(float x) {
  if (!(x > 0.0f)) return x - INFINITY;  // NaN for a NaN
  int e;
  double m = std::frexp(static_cast<double>(x), &e);
  if (m < 0.70710678118654752) m *= 2.0, e--;
  double s = (m - 1.0) / (m + 1.0), z = s * s, sum = 0.0;
  for (int i = 15; i > 0; i -= 2) sum = sum * z + 1.0 / i;
  return static_cast<float>(2.0 * s * sum + e * 0.69314718055994531);
}

}  // namespace mtp
