// Sine and cosine of fp32 numbers, computed in fp64 with additions and multiplications only, so
// that they are the same on every machine. Up to 2^20 at most fp32's last digit is wrong.
#pragma once
#include <cmath>
#include <cstdint>

namespace mtp {

// Computes sin(x) and cos(x): reduces x to r in [-pi/4, pi/4] by multiples of pi/2, then uses
// FDLIBM's polynomials.
inline void sine_and_cosine(float given, float* sine, float* cosine) {
  constexpr double TWO_OVER_PI = 6.36619772367581382433e-01;
  constexpr double HIGH = 1.57079632673412561417e+00, LOW = 6.07710050650619224932e-11;
  double x = given, rounded = std::floor(x * TWO_OVER_PI + 0.5);
  double r = (x - rounded * HIGH) - rounded * LOW, z = r * r;
  double s = -2.50507602534068634195e-08 + z * 1.58969099521155010221e-10;
  s = -1.98412698298579493134e-04 + z * (2.75573137070700676789e-06 + z * s);
  s = r + r * z * (-1.66666666666666324348e-01 + z * (8.33333333332248946124e-03 + z * s));
  double c = 2.08757232129817482790e-09 - z * 1.13596475577881948265e-11;
  c = 2.48015872894767294178e-05 + z * (-2.75573143513906633035e-07 + z * c);
  c = 4.16666666666666019037e-02 + z * (-1.38888888888741095749e-03 + z * c);
  c = 1.0 - 0.5 * z + z * z * c;
  // The quadrant; for an x beyond int64 it has no significant digits, so any will do.
  int64_t quarter = std::fabs(rounded) < 9e18 ? static_cast<int64_t>(rounded) & 3 : 0;
  double turned[4] = {s, c, -s, -c};
  *sine = static_cast<float>(turned[quarter]);
  *cosine = static_cast<float>(turned[(quarter + 1) & 3]);
}

}  // namespace mtp
