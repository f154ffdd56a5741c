// 16 lanes in one register of AVX-512, with VNNI.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "kernels.h"
#include "layout_x86.h"

namespace {

constexpr int WIDE = 2;
constexpr int TILE_ROWS = 6;  // registers: 12 sums in int32, 12 in fp32, 8 for the rest
constexpr int TILE_KEYS = 12;
constexpr int FLOAT_ROWS = 6;
constexpr int FLOAT_VECTORS = 4;
constexpr int LONE_VECTORS = 8;

struct Floats {
  __m512 v;
};
struct Ints {
  __m512i v;
};
struct Bytes {
  __m512i v;
};

inline Floats same(float x) { return {_mm512_set1_ps(x)}; }
inline Floats load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline Floats load_some(const float* p, int64_t count) {
  return {_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1), p)};
}
inline void store(float* p, Floats x) { _mm512_storeu_ps(p, x.v); }
inline Floats add(Floats x, Floats y) { return {_mm512_add_ps(x.v, y.v)}; }
inline Floats sub(Floats x, Floats y) { return {_mm512_sub_ps(x.v, y.v)}; }
inline Floats mul(Floats x, Floats y) { return {_mm512_mul_ps(x.v, y.v)}; }
inline Floats div(Floats x, Floats y) { return {_mm512_div_ps(x.v, y.v)}; }
inline Floats fma(Floats x, Floats y, Floats z) { return {_mm512_fmadd_ps(x.v, y.v, z.v)}; }
inline Floats max(Floats x, Floats y) { return {_mm512_max_ps(x.v, y.v)}; }
inline Floats min(Floats x, Floats y) { return {_mm512_min_ps(x.v, y.v)}; }
inline Floats absolute(Floats x) { return {_mm512_abs_ps(x.v)}; }
inline Floats where_less(Floats x, Floats y, Floats yes, Floats no) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(x.v, y.v, _CMP_LT_OQ), no.v, yes.v)};
}
inline float largest(Floats x) { return _mm512_reduce_max_ps(x.v); }

inline Floats to_floats(Ints x) { return {_mm512_cvtepi32_ps(x.v)}; }
inline Ints to_ints(Floats x) { return {_mm512_cvtps_epi32(x.v)}; }
inline Floats power_of_two(Ints x) {
  const __m512i biased = _mm512_add_epi32(x.v, _mm512_set1_epi32(127));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(biased, 23))};
}
// Not _mm512_reduce_add_epi32: NaNs make sums overflow, which is undefined for C's integers.
inline int32_t total(Ints x, Ints y) {
  __m512i all = _mm512_add_epi32(x.v, y.v);
  __m256i eight = _mm256_add_epi32(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
  __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
}
inline int32_t pair_sums(Ints, Ints) { return 0; }
inline void store_bytes(int8_t* p, Ints x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(x.v));
}

inline Bytes load_bytes(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
inline Bytes low_halves(Bytes x) { return {_mm512_and_si512(x.v, _mm512_set1_epi8(15))}; }
inline Bytes high_halves(Bytes x) { return low_halves({_mm512_srli_epi16(x.v, 4)}); }
inline Bytes look_up(const uint8_t* table, Bytes places) {
  __m128i all = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return {_mm512_shuffle_epi8(_mm512_broadcast_i32x4(all), places.v)};
}
// Scales 2^(e - 127): the smallest one is subnormal.
inline Floats load_powers(const uint8_t* p) {
  __m512i e = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  __m512i bits = _mm512_max_epu32(_mm512_slli_epi32(e, 23), _mm512_set1_epi32(1 << 22));
  return {_mm512_castsi512_ps(bits)};
}
inline Floats load_halves(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline Floats load_signed(const int8_t* p) {
  return to_floats({_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))});
}

template <int ZERO>
inline Ints first_sum(const mtp::InputBlock& x) {
  return {_mm512_set1_epi32(-ZERO * x.sum)};
}
template <int ZERO>
inline Ints last_sum(Ints sum) {
  return sum;
}
template <int ZERO>
inline Ints dot4(Ints sum, Bytes w, const int8_t* four) {
  int32_t bits;
  std::memcpy(&bits, four, 4);
  return {_mm512_dpbusd_epi32(sum.v, w.v, _mm512_set1_epi32(bits))};
}

inline Ints dot4_signed(Ints sum, Bytes w, const int8_t* four) {
  int32_t bits;
  std::memcpy(&bits, four, 4);
  return {_mm512_dpbusd_epi32(sum.v, _mm512_set1_epi32(bits), w.v)};
}
inline void store_block(int8_t* p, Ints x, Ints y) {
  store_bytes(p, x);
  store_bytes(p + 16, y);
}

// dot4<128> and its start for inputs within -64 .. 64.
inline Ints first_small(const mtp::InputBlock& x) { return first_sum<128>(x); }
inline Ints dot4_small(Ints sum, Bytes w, const int8_t* four) { return dot4<128>(sum, w, four); }

}  // namespace
