// How AVX2 lays out int8 rows for products of integers; AVX-512 does it alike.
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace {

// Writes the eight words of 32 bytes of each of eight rows to columns of words 128 bytes apart.
inline void store_columns(const int8_t* const* rows, int64_t at, uint8_t* to) {
  __m256i r[8], pairs[8], fours[8];
  for (int n = 0; n < 8; n++)
    r[n] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows[n] + at));
  for (int n = 0; n < 8; n += 2) {
    pairs[n] = _mm256_unpacklo_epi32(r[n], r[n + 1]);
    pairs[n + 1] = _mm256_unpackhi_epi32(r[n], r[n + 1]);
  }
  for (int n = 0; n < 8; n += 4)
    for (int i = 0; i < 2; i++) {
      fours[n + 2 * i] = _mm256_unpacklo_epi64(pairs[n + i], pairs[n + 2 + i]);
      fours[n + 2 * i + 1] = _mm256_unpackhi_epi64(pairs[n + i], pairs[n + 2 + i]);
    }
  const __m256i zero = _mm256_set1_epi8(-128);
  for (int g = 0; g < 4; g++) {
    __m256i low = _mm256_permute2x128_si256(fours[g], fours[4 + g], 0x20);
    __m256i high = _mm256_permute2x128_si256(fours[g], fours[4 + g], 0x31);
    auto out = reinterpret_cast<__m256i*>(to + 128 * g);
    _mm256_storeu_si256(out, _mm256_xor_si256(low, zero));
    _mm256_storeu_si256(out + 16, _mm256_xor_si256(high, zero));
  }
}

// Writes 32 bytes of each of four rows as 32 words.
inline void store_interleaved(const int8_t* const* rows, int64_t at, uint8_t* to) {
  __m256i r[4], both[4], four[4];
  for (int n = 0; n < 4; n++)
    r[n] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows[n] + at));
  for (int n = 0; n < 4; n += 2) {
    both[n] = _mm256_unpacklo_epi8(r[n], r[n + 1]);
    both[n + 1] = _mm256_unpackhi_epi8(r[n], r[n + 1]);
  }
  for (int i = 0; i < 2; i++) {
    four[2 * i] = _mm256_unpacklo_epi16(both[i], both[2 + i]);
    four[2 * i + 1] = _mm256_unpackhi_epi16(both[i], both[2 + i]);
  }
  auto out = reinterpret_cast<__m256i*>(to);
  for (int i = 0; i < 2; i++) {
    _mm256_storeu_si256(out + i, _mm256_permute2x128_si256(four[2 * i], four[2 * i + 1], 0x20));
    _mm256_storeu_si256(out + 2 + i, _mm256_permute2x128_si256(four[2 * i], four[2 * i + 1], 0x31));
  }
}

}  // namespace
