// 16 lanes in plain C++, for any machine; defines what the other lanes_*.h do.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels.h"

namespace {

constexpr int WIDE = 1;           // vectors of columns in a tile
constexpr int TILE_ROWS = 4;      // rows of the largest tile
constexpr int TILE_KEYS = 4;      // cached rows, or values, in a tile of attention
constexpr int FLOAT_ROWS = 2;     // rows of the largest tile with fp32 weights
constexpr int FLOAT_VECTORS = 1;  // vectors of columns in that tile
constexpr int LONE_VECTORS = 2;   // vectors of columns in the tile of a single row

struct Floats {
  float v[16];
};
struct Ints {
  int32_t v[16];
};
struct Bytes {
  uint8_t v[64];
};

template <class F>
inline Floats each(F&& lane) {
  Floats r;
  for (int i = 0; i < 16; i++) r.v[i] = lane(i);
  return r;
}
inline Floats same(float x) {
  return each([&](int) { return x; });
}
inline Floats load(const float* p) {
  Floats r;
  std::memcpy(r.v, p, sizeof r.v);
  return r;
}
inline Floats load_some(const float* p, int64_t count) {
  Floats r{};
  std::memcpy(r.v, p, count * sizeof(float));
  return r;
}
inline void store(float* p, const Floats& a) { std::memcpy(p, a.v, sizeof a.v); }
inline Floats add(const Floats& a, const Floats& b) {
  return each([&](int i) { return a.v[i] + b.v[i]; });
}
inline Floats sub(const Floats& a, const Floats& b) {
  return each([&](int i) { return a.v[i] - b.v[i]; });
}
inline Floats mul(const Floats& a, const Floats& b) {
  return each([&](int i) { return a.v[i] * b.v[i]; });
}
inline Floats div(const Floats& a, const Floats& b) {
  return each([&](int i) { return a.v[i] / b.v[i]; });
}
inline Floats fma(const Floats& a, const Floats& b, const Floats& c) {
  return each([&](int i) { return std::fma(a.v[i], b.v[i], c.v[i]); });
}
inline Floats max(const Floats& a, const Floats& b) {
  return each([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
inline Floats min(const Floats& a, const Floats& b) {
  return each([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
}
inline Floats absolute(const Floats& a) {
  return each([&](int i) { return std::fabs(a.v[i]); });
}
inline Floats where_less(const Floats& a, const Floats& b, const Floats& yes, const Floats& no) {
  return each([&](int i) { return a.v[i] < b.v[i] ? yes.v[i] : no.v[i]; });
}
inline float largest(const Floats& a) {
  float top = a.v[0];
  for (int i = 1; i < 16; i++) top = a.v[i] > top ? a.v[i] : top;
  return top;
}

inline Floats to_floats(const Ints& a) {
  return each([&](int i) { return static_cast<float>(a.v[i]); });
}
// Rounds to nearest, ties to even; numbers that do not fit int32 become INT32_MIN, as on x86.
inline Ints to_ints(const Floats& a) {
  Ints r;
  for (int i = 0; i < 16; i++) {
    bool fits = a.v[i] >= -2147483648.0f && a.v[i] < 2147483648.0f;
    r.v[i] = fits ? static_cast<int32_t>(std::lrint(a.v[i])) : INT32_MIN;
  }
  return r;
}
inline Floats power_of_two(const Ints& a) {
  Floats r;
  for (int i = 0; i < 16; i++) {
    uint32_t bits = static_cast<uint32_t>(a.v[i] + 127) << 23;
    std::memcpy(&r.v[i], &bits, 4);
  }
  return r;
}
inline int32_t total(const Ints& a, const Ints& b) {
  uint32_t sum = 0;  // unsigned, because NaNs make it overflow
  for (int i = 0; i < 16; i++) sum += static_cast<uint32_t>(a.v[i]) + static_cast<uint32_t>(b.v[i]);
  return static_cast<int32_t>(sum);
}
// InputBlock::pairs of a block's values; only sets that read them compute them.
inline int32_t pair_sums(const Ints&, const Ints&) { return 0; }
inline void store_bytes(int8_t* p, const Ints& a) {
  for (int i = 0; i < 16; i++) p[i] = static_cast<int8_t>(a.v[i]);
}

inline Bytes load_bytes(const uint8_t* p) {
  Bytes r;
  std::memcpy(r.v, p, sizeof r.v);
  return r;
}
inline Bytes low_halves(const Bytes& a) {
  Bytes r;
  for (int i = 0; i < 64; i++) r.v[i] = a.v[i] & 15;
  return r;
}
inline Bytes high_halves(const Bytes& a) {
  Bytes r;
  for (int i = 0; i < 64; i++) r.v[i] = a.v[i] >> 4;
  return r;
}
// Returns the bytes of a table at places 0 .. 15.
inline Bytes look_up(const uint8_t* table, const Bytes& places) {
  Bytes r;
  for (int i = 0; i < 64; i++) r.v[i] = table[places.v[i]];
  return r;
}
inline Floats load_halves(const uint16_t* p) {
  return each([&](int i) { return mtp::half(p[i]); });
}
inline Floats load_powers(const uint8_t* p) {
  return each([&](int i) { return mtp::power(p[i]); });
}
inline Floats load_signed(const int8_t* p) {
  return each([&](int i) { return static_cast<float>(p[i]); });
}

// The start of a block's sum, which corrects for unsigned weights; here weights are signed.
template <int ZERO>
inline Ints first_sum(const mtp::InputBlock&) {
  return Ints{};
}
template <int ZERO>
inline Ints last_sum(const Ints& sum) {
  return sum;
}
// Adds the products of four inputs and the four weights of each of 16 outputs.
template <int ZERO>
inline Ints dot4(const Ints& sum, const Bytes& w, const int8_t* four) {
  Ints r;
  for (int n = 0; n < 16; n++) {
    int32_t s = sum.v[n];
    for (int i = 0; i < 4; i++) s += (w.v[4 * n + i] - ZERO) * four[i];
    r.v[n] = s;
  }
  return r;
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

// Adds the products of four inputs, which are not negative, and four signed weights of 16 outputs.
inline Ints dot4_signed(const Ints& sum, const Bytes& w, const int8_t* four) {
  Ints r;
  for (int n = 0; n < 16; n++) {
    int32_t s = sum.v[n];
    for (int i = 0; i < 4; i++) s += static_cast<int8_t>(w.v[4 * n + i]) * four[i];
    r.v[n] = s;
  }
  return r;
}
inline void store_block(int8_t* p, const Ints& a, const Ints& b) {
  store_bytes(p, a);
  store_bytes(p + 16, b);
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
