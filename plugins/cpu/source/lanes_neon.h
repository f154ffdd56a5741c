// 16 lanes in four registers of NEON, with the dot product of ARMv8.2.
#pragma once
#include <arm_neon.h>

#include <cstdint>
#include <cstring>

#include "kernels.h"

namespace {

constexpr int WIDE = 1;
constexpr int TILE_ROWS = 3;  // registers: 12 sums in int32, 12 in fp32, 8 for a line's two halves
constexpr int TILE_KEYS = 6;
constexpr int FLOAT_ROWS = 6;
constexpr int FLOAT_VECTORS = 1;
constexpr int LONE_VECTORS = 4;

struct Floats {
  float32x4_t v[4];
};
struct Ints {
  int32x4_t v[4];
};
struct Bytes {
  uint8x16_t v[4];
};

template <class R = Floats, class F>
inline R each(F&& four) {
  return {four(0), four(1), four(2), four(3)};
}

inline Floats same(float x) {
  return each([&](int) { return vdupq_n_f32(x); });
}
inline Floats load(const float* p) {
  return each([&](int i) { return vld1q_f32(p + 4 * i); });
}
inline Floats load_some(const float* p, int64_t count) {
  float lanes[16] = {};
  std::memcpy(lanes, p, count * sizeof(float));
  return load(lanes);
}
inline void store(float* p, Floats x) {
  for (int i = 0; i < 4; i++) vst1q_f32(p + 4 * i, x.v[i]);
}
inline Floats add(Floats x, Floats y) {
  return each([&](int i) { return vaddq_f32(x.v[i], y.v[i]); });
}
inline Floats sub(Floats x, Floats y) {
  return each([&](int i) { return vsubq_f32(x.v[i], y.v[i]); });
}
inline Floats mul(Floats x, Floats y) {
  return each([&](int i) { return vmulq_f32(x.v[i], y.v[i]); });
}
inline Floats div(Floats x, Floats y) {
  return each([&](int i) { return vdivq_f32(x.v[i], y.v[i]); });
}
inline Floats fma(Floats x, Floats y, Floats z) {
  return each([&](int i) { return vfmaq_f32(z.v[i], x.v[i], y.v[i]); });
}
// max and min return the second operand if one is a NaN or both are zeros: as x86, unlike FMAX.
inline Floats max(Floats x, Floats y) {
  return each([&](int i) { return vbslq_f32(vcgtq_f32(x.v[i], y.v[i]), x.v[i], y.v[i]); });
}
inline Floats min(Floats x, Floats y) {
  return each([&](int i) { return vbslq_f32(vcltq_f32(x.v[i], y.v[i]), x.v[i], y.v[i]); });
}
inline Floats absolute(Floats x) {
  return each([&](int i) { return vabsq_f32(x.v[i]); });
}
inline Floats where_less(Floats x, Floats y, Floats yes, Floats no) {
  return each([&](int i) { return vbslq_f32(vcltq_f32(x.v[i], y.v[i]), yes.v[i], no.v[i]); });
}
inline float largest(Floats x) {
  return vmaxnmvq_f32(vmaxnmq_f32(vmaxnmq_f32(x.v[0], x.v[1]), vmaxnmq_f32(x.v[2], x.v[3])));
}

inline Floats to_floats(Ints x) {
  return each([&](int i) { return vcvtq_f32_s32(x.v[i]); });
}
inline Ints to_ints(Floats x) {  // callers only pass numbers that fit int32
  return each<Ints>([&](int i) { return vcvtnq_s32_f32(x.v[i]); });
}
inline Floats power_of_two(Ints x) {
  return each([&](int i) {
    return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(x.v[i], vdupq_n_s32(127)), 23));
  });
}
inline int32_t total(Ints x, Ints y) {
  int32x4_t low = vaddq_s32(vaddq_s32(x.v[0], x.v[1]), vaddq_s32(x.v[2], x.v[3]));
  int32x4_t high = vaddq_s32(vaddq_s32(y.v[0], y.v[1]), vaddq_s32(y.v[2], y.v[3]));
  return vaddvq_s32(vaddq_s32(low, high));
}
inline int32_t pair_sums(Ints, Ints) { return 0; }
inline void store_bytes(int8_t* p, Ints x) {  // the values fit bytes, so nothing is cut off
  int16x8_t low = vcombine_s16(vmovn_s32(x.v[0]), vmovn_s32(x.v[1]));
  int16x8_t high = vcombine_s16(vmovn_s32(x.v[2]), vmovn_s32(x.v[3]));
  vst1q_s8(p, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
}

inline Bytes load_bytes(const uint8_t* p) {
  return each<Bytes>([&](int i) { return vld1q_u8(p + 16 * i); });
}
inline Bytes low_halves(Bytes x) {
  return each<Bytes>([&](int i) { return vandq_u8(x.v[i], vdupq_n_u8(15)); });
}
inline Bytes high_halves(Bytes x) {
  return each<Bytes>([&](int i) { return vshrq_n_u8(x.v[i], 4); });
}
inline Bytes look_up(const uint8_t* table, Bytes places) {
  const uint8x16_t all = vld1q_u8(table);
  return each<Bytes>([&](int i) { return vqtbl1q_u8(all, places.v[i]); });
}
// Scales 2^(e - 127): the smallest one is subnormal.
inline Floats load_powers(const uint8_t* p) {
  return each([&](int i) {
    int32_t four;
    std::memcpy(&four, p + 4 * i, 4);
    uint16x8_t wide = vmovl_u8(vreinterpret_u8_s32(vdup_n_s32(four)));
    uint32x4_t bits = vshlq_n_u32(vmovl_u16(vget_low_u16(wide)), 23);
    return vreinterpretq_f32_u32(vmaxq_u32(bits, vdupq_n_u32(1 << 22)));
  });
}
inline Floats load_halves(const uint16_t* p) {
  return each([&](int i) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i))); });
}
inline Floats load_signed(const int8_t* p) {
  return each([&](int i) {
    int32_t four;
    std::memcpy(&four, p + 4 * i, 4);
    int16x8_t wide = vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(four)));
    return vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide)));
  });
}

// The dot product takes signed bytes: 4-bit weights fit them, 8-bit weights are converted.
template <int ZERO>
inline Ints first_sum(const mtp::InputBlock& x) {
  return each<Ints>([&](int) { return vdupq_n_s32(ZERO == 128 ? 0 : -ZERO * x.sum); });
}
template <int ZERO>
inline Ints last_sum(const Ints& sum) {
  return sum;
}
template <int ZERO>
inline Ints dot4(Ints sum, Bytes w, const int8_t* four) {
  int32_t bits;
  std::memcpy(&bits, four, 4);
  const int8x16_t x = vreinterpretq_s8_s32(vdupq_n_s32(bits));
  return each<Ints>([&](int i) {
    uint8x16_t own = ZERO == 128 ? veorq_u8(w.v[i], vdupq_n_u8(128)) : w.v[i];
    return vdotq_s32(sum.v[i], vreinterpretq_s8_u8(own), x);
  });
}

// Writes the eight words of each of eight rows of 32 bytes to columns of words 128 bytes apart; the
// bytes become unsigned, with zero at 128.
inline void store_columns(const int8_t* const* rows, int64_t at, uint8_t* to) {
  for (int n = 0; n < 8; n++)
    for (int g = 0; g < 8; g++) {
      uint32_t four;
      std::memcpy(&four, rows[n] + at + 4 * g, 4);
      four ^= 0x80808080;
      std::memcpy(to + 128 * g + 4 * n, &four, 4);
    }
}

inline Ints dot4_signed(Ints sum, Bytes w, const int8_t* four) {
  int32_t bits;
  std::memcpy(&bits, four, 4);
  const int8x16_t x = vreinterpretq_s8_s32(vdupq_n_s32(bits));
  return each<Ints>([&](int i) { return vdotq_s32(sum.v[i], vreinterpretq_s8_u8(w.v[i]), x); });
}
inline void store_block(int8_t* p, Ints x, Ints y) {
  store_bytes(p, x);
  store_bytes(p + 16, y);
}

// Interleaves four rows of 32 bytes: byte d of row i goes to byte 4 d + i.
inline void store_interleaved(const int8_t* const* rows, int64_t at, uint8_t* to) {
  for (int d = 0; d < 32; d++)
    for (int i = 0; i < 4; i++) to[4 * d + i] = static_cast<uint8_t>(rows[i][at + d]);
}

// dot4<128> and its start for inputs within -64 .. 64.
inline Ints first_small(const mtp::InputBlock& x) { return first_sum<128>(x); }
inline Ints dot4_small(Ints sum, Bytes w, const int8_t* four) { return dot4<128>(sum, w, four); }

}  // namespace
