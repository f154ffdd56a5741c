// 16 lanes in two registers of AVX2, with FMA and F16C; avxvnni.cpp adds AVX-VNNI's dot product.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "kernels.h"
#include "layout_x86.h"

namespace {

constexpr int WIDE = 1;
constexpr int TILE_ROWS = 6;
constexpr int TILE_KEYS = 4;
constexpr int FLOAT_ROWS = 6;
constexpr int FLOAT_VECTORS = 1;
constexpr int LONE_VECTORS = 4;

struct Floats {
  __m256 a, b;
};
struct Ints {
  __m256i a, b;
};
struct Bytes {
  __m256i a, b;
};

inline Floats same(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Floats load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline __m256i first_lanes(int64_t count) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count)), lane);
}
inline Floats load_some(const float* p, int64_t count) {
  return {_mm256_maskload_ps(p, first_lanes(count)),
          count > 8 ? _mm256_maskload_ps(p + 8, first_lanes(count - 8)) : _mm256_setzero_ps()};
}
inline void store(float* p, Floats x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
inline Floats add(Floats x, Floats y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline Floats sub(Floats x, Floats y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline Floats mul(Floats x, Floats y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline Floats div(Floats x, Floats y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline Floats fma(Floats x, Floats y, Floats z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
inline Floats max(Floats x, Floats y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline Floats min(Floats x, Floats y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline Floats absolute(Floats x) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
inline Floats where_less(Floats x, Floats y, Floats yes, Floats no) {
  return {_mm256_blendv_ps(no.a, yes.a, _mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ)),
          _mm256_blendv_ps(no.b, yes.b, _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ))};
}
inline float largest(Floats x) {
  __m256 eight = _mm256_max_ps(x.a, x.b);
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

inline Floats to_floats(Ints x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline Ints to_ints(Floats x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
inline __m256 exponent(__m256i n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}
inline Floats power_of_two(Ints x) { return {exponent(x.a), exponent(x.b)}; }
inline int32_t total(Ints x, Ints y) {
  __m256i eight = _mm256_add_epi32(_mm256_add_epi32(x.a, x.b), _mm256_add_epi32(y.a, y.b));
  __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
}
inline int32_t pair_sums(Ints x, Ints y) {
  __m256i eight = _mm256_add_epi32(_mm256_add_epi32(x.a, x.b), _mm256_add_epi32(y.a, y.b));
  __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  __m128i pairs = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1));
  return _mm_cvtsi128_si32(_mm_unpacklo_epi16(pairs, _mm_unpackhi_epi64(pairs, pairs)));
}
inline void store_bytes(int8_t* p, Ints x) {  // the values fit bytes, so nothing saturates
  __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8);
  __m128i low = _mm256_castsi256_si128(words), high = _mm256_extracti128_si256(words, 1);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(low, high));
}

inline Bytes load_bytes(const uint8_t* p) {
  auto at = reinterpret_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(at), _mm256_loadu_si256(at + 1)};
}
inline Bytes low_halves(Bytes x) {
  const __m256i low = _mm256_set1_epi8(15);
  return {_mm256_and_si256(x.a, low), _mm256_and_si256(x.b, low)};
}
inline Bytes high_halves(Bytes x) {
  return low_halves({_mm256_srli_epi16(x.a, 4), _mm256_srli_epi16(x.b, 4)});
}
inline Bytes look_up(const uint8_t* table, Bytes places) {
  const __m256i all =
      _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
  return {_mm256_shuffle_epi8(all, places.a), _mm256_shuffle_epi8(all, places.b)};
}
// Scales 2^(e - 127): the smallest one is subnormal.
inline __m256 load_eight_powers(const uint8_t* p) {
  __m256i e = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  __m256i bits = _mm256_max_epu32(_mm256_slli_epi32(e, 23), _mm256_set1_epi32(1 << 22));
  return _mm256_castsi256_ps(bits);
}
inline Floats load_powers(const uint8_t* p) {
  return {load_eight_powers(p), load_eight_powers(p + 8)};
}
inline Floats load_halves(const uint16_t* p) {
  auto at = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(at)), _mm256_cvtph_ps(_mm_loadu_si128(at + 1))};
}
inline Floats load_signed(const int8_t* p) {
  auto at = reinterpret_cast<const __m128i*>(p);
  __m128i first = _mm_loadl_epi64(at), second = _mm_srli_si128(_mm_loadu_si128(at), 8);
  return to_floats({_mm256_cvtepi8_epi32(first), _mm256_cvtepi8_epi32(second)});
}

// Without VNNI, sums of codes of 4 bits have two halves of 16 bits. A half begins with its part of
// the correction for unsigned weights, and holds a block's eight pairs of products in the end, at
// most 8 * 2 * 12 * 127 for e2m1; on the way it may overflow, which is undone. Two products of int8
// weights within -128 .. 127 fit alone, so the input takes the weight's sign.
#ifdef __AVXVNNI__
constexpr bool VNNI = true;  // weights stay unsigned in both widths
#else
constexpr bool VNNI = false;
#endif
template <int ZERO>
inline Ints first_sum(const mtp::InputBlock& x) {
  __m256i c = _mm256_set1_epi32(VNNI ? -ZERO * x.sum : 0);
  if (!VNNI && ZERO != 128)
    c = _mm256_mullo_epi16(_mm256_set1_epi32(x.pairs), _mm256_set1_epi16(-ZERO));
  return {c, c};
}
// Returns a sum that GCC must not add up as a tree, for which it would keep all products in memory.
inline __m256i add_one_by_one(__m256i sum) {
  __asm__("" : "+x"(sum));
  return sum;
}
template <int ZERO>
inline __m256i dot4(__m256i sum, __m256i w, __m256i x) {
#ifdef __AVXVNNI__
  return _mm256_dpbusd_avx_epi32(sum, w, x);
#endif
  if (ZERO != 128) {
    sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(w, x));
  } else {
    w = _mm256_xor_si256(w, _mm256_set1_epi8(-128));
    __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
  return add_one_by_one(sum);
}
template <int ZERO>
inline Ints last_sum(Ints sum) {
  if (VNNI || ZERO == 128) return sum;
  const __m256i one = _mm256_set1_epi16(1);
  return {_mm256_madd_epi16(sum.a, one), _mm256_madd_epi16(sum.b, one)};
}
template <int ZERO>
inline Ints dot4(Ints sum, Bytes w, const int8_t* four) {
  int32_t bits;
  std::memcpy(&bits, four, 4);
  const __m256i x = _mm256_set1_epi32(bits);
  return {dot4<ZERO>(sum.a, w.a, x), dot4<ZERO>(sum.b, w.b, x)};
}

inline __m256i dot4_signed(__m256i sum, __m256i w, __m256i x) {
#ifdef __AVXVNNI__
  return _mm256_dpbusd_avx_epi32(sum, x, w);
#else
  __m256i pairs = _mm256_maddubs_epi16(x, w);  // at most 127 * 128 * 2
  return add_one_by_one(_mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))));
#endif
}
inline Ints dot4_signed(Ints sum, Bytes w, const int8_t* four) {
  int32_t bits;
  std::memcpy(&bits, four, 4);
  const __m256i x = _mm256_set1_epi32(bits);
  return {dot4_signed(sum.a, w.a, x), dot4_signed(sum.b, w.b, x)};
}
inline void store_block(int8_t* p, Ints x, Ints y) {
  __m256i words = _mm256_packs_epi32(x.a, x.b), more = _mm256_packs_epi32(y.a, y.b);
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(words, more), order);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), bytes);
}

// dot4<128> and its start for inputs within -64 .. 64, whose products by two unsigned weights fit.
inline Ints first_small(const mtp::InputBlock& x) {
  const __m256i c = _mm256_set1_epi32(-128 * x.sum);
  return {c, c};
}
inline Ints dot4_small(Ints sum, Bytes w, const int8_t* four) {
  int32_t bits;
  std::memcpy(&bits, four, 4);
  const __m256i x = _mm256_set1_epi32(bits);
#ifdef __AVXVNNI__
  return {dot4<128>(sum.a, w.a, x), dot4<128>(sum.b, w.b, x)};
#else
  auto add = [&](__m256i sum, __m256i w) {
    __m256i pairs = _mm256_maddubs_epi16(w, x);
    return add_one_by_one(_mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))));
  };
  return {add(sum.a, w.a), add(sum.b, w.b)};
#endif
}

}  // namespace
