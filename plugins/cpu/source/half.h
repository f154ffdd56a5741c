// Conversion of fp16 and bfloat16 in plain C++.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

namespace mtp {

// The upper half of an fp32 number.
struct Bf16 {
  uint16_t bits;
};

static inline float wide(Bf16 x) {
  uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float y;
  std::memcpy(&y, &bits, sizeof y);
  return y;
}

// Rounds to nearest, ties to even; a NaN stays a NaN.
static inline Bf16 narrow(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  if (x != x) return {0x7FC0};
  return {static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16)};
}

// Converts an fp16 number, given by its bits, to fp32.
static inline float half(uint16_t bits) {
  uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16, rest = bits & 0x7fff;
  float value;
  if (rest >= 0x0400) {  // normal; infinite and NaN have the largest exponent in either type
    uint32_t wide = sign | ((rest << 13) + (rest >= 0x7c00 ? 0x70000000 : 0x38000000));
    std::memcpy(&value, &wide, 4);
    return value;
  }
  value = std::ldexp(static_cast<float>(rest), -24);
  return sign ? -value : value;
}

// Returns 2^(e - 127), which is subnormal for 0 and infinite for 255.
static inline float power(uint8_t e) {
  uint32_t bits = e ? static_cast<uint32_t>(e) << 23 : 1u << 22;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Rounds a number that is not negative to fp16, to nearest, ties to even. One that does not fit, or
// a NaN, becomes NaN.
static inline uint16_t to_half(float x) {
  if (!(x < 65520.0f)) return 0x7E00;
  if (x < 6.103515625e-5f) return static_cast<uint16_t>(std::lrint(std::ldexp(x, 24)));
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return static_cast<uint16_t>((bits + 0xFFF + (bits >> 13 & 1) - 0x38000000) >> 13);
}

}  // namespace mtp
