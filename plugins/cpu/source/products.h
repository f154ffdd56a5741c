// Products with int4, int8 and e2m1 weights in blocks of 32, for inputs rounded to int8 likewise.
//
// Integer sums of a block are exact, also less the zeros times the inputs' sum, as numbers stay
// below 2^24. Blocks are added in ascending order, by
// fma(float(sum), weight's scale * input's scale, total), with one total per output. A step's few
// rows are bound by the weights' bytes, a prompt's by the multiplications.
#pragma once
#include <cmath>

#include "maths.h"

namespace {

// A block whose largest input is not above LEAST becomes zeros: 127 / largest would overflow.
constexpr float LEAST = 1e-30f;

// A row with a NaN or an infinite input becomes NaN in all blocks, so that its products are NaN.
void quantise(const float* x, int64_t blocks, float factor, float most, mtp::InputBlock* out) {
  Floats zeros = same(0.0f), factors = same(factor);
  for (int64_t b = 0; b < blocks; b++, x += mtp::BLOCK) {
    Floats first = mul(load(x), factors), second = mul(load(x + LANES), factors);
    float top = largest(max(absolute(first), absolute(second)));
    Floats inverse = same(top > LEAST ? most / top : 0.0f);
    Ints low = to_ints(mul(first, inverse)), high = to_ints(mul(second, inverse));
    out[b].scale = top > LEAST ? top / most : 0.0f;
    out[b].sum = total(low, high);
    out[b].pairs = pair_sums(low, high);
    store_bytes(out[b].values, low);
    store_bytes(out[b].values + LANES, high);
    zeros = fma(first, same(0.0f), fma(second, same(0.0f), zeros));
  }
  if (tree(zeros) == 0.0f) return;
  for (int64_t b = 0; b < blocks; b++) out[b] = {NAN, 0, {}, 0};
}

// Multiplies rows by WIDE vectors of a panel's outputs, from vector `first` on.
template <int BITS, int SCALES, int ROWS>
void tile(const mtp::Panel& panel, int first, const mtp::InputBlock* const* in, float* const* out) {
  constexpr int INPUTS = BITS == 4 ? 8 : 4;  // of each output in a line
  constexpr bool E2M1 = SCALES == mtp::POWERS;
  constexpr int ZERO = E2M1 ? mtp::E2M1_ZERO : 1 << (BITS - 1);
  const Floats zero = same(ZERO);
  Floats totals[ROWS][WIDE];
  for (int m = 0; m < ROWS; m++)
    for (int v = 0; v < WIDE; v++) totals[m][v] = same(0.0f);
  const uint8_t* values = panel.values + 64 * first;
  const uint16_t* scales = panel.scales + LANES * first;
  auto powers = reinterpret_cast<const uint8_t*>(panel.scales) + LANES * first;
  auto bytes = reinterpret_cast<const int8_t*>(panel.scales + mtp::PANEL) + LANES * first;
  for (int64_t b = 0; b < panel.blocks; b++) {
    Ints sums[ROWS][WIDE];
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 2
      for (int v = 0; v < WIDE; v++) sums[m][v] = first_sum<ZERO>(in[m][b]);
    for (int i = 0; i < 128 * BITS; i += 64 * (3 - WIDE))
      __builtin_prefetch(values + 4096 + i);  // a page ahead, which the hardware does not prefetch
#pragma GCC unroll 8
    for (int i = 0; i < 32; i += INPUTS)
#pragma GCC unroll 2
      for (int v = 0; v < WIDE; v++) {
        Bytes line = load_bytes(values + 64 * (2 * (i / INPUTS) + v));
        Bytes one = BITS == 4 ? low_halves(line) : line;
        if (E2M1) one = look_up(mtp::E2M1, one);
#pragma GCC unroll 8
        for (int m = 0; m < ROWS; m++)
          sums[m][v] = dot4<ZERO>(sums[m][v], one, in[m][b].values + i);
        if (BITS == 8) continue;
        Bytes other = high_halves(line);
        if (E2M1) other = look_up(mtp::E2M1, other);
#pragma GCC unroll 8
        for (int m = 0; m < ROWS; m++)
          sums[m][v] = dot4<ZERO>(sums[m][v], other, in[m][b].values + i + 4);
      }
#pragma GCC unroll 2
    for (int v = 0; v < WIDE; v++) {
      Floats scale =
          E2M1 ? load_powers(powers + 2 * SCALES * b + LANES * v) : load_halves(scales + LANES * v);
      Floats moved = scale;
      if (SCALES == mtp::ZEROED) moved = load_signed(bytes + 2 * SCALES * b + LANES * v);
      if (SCALES == mtp::SHIFTED) moved = load_halves(scales + mtp::PANEL + LANES * v);
#pragma GCC unroll 8
      for (int m = 0; m < ROWS; m++) {
        Floats sum = to_floats(last_sum<ZERO>(sums[m][v]));
        float inputs = static_cast<float>(in[m][b].sum);
        if (SCALES == mtp::ZEROED) sum = fma(moved, same(-inputs), sum);
        if (SCALES == mtp::SHIFTED) sum = fma(zero, same(inputs), sum);
        totals[m][v] = fma(sum, mul(scale, same(in[m][b].scale)), totals[m][v]);
        if (SCALES == mtp::SHIFTED)
          totals[m][v] = fma(moved, same(inputs * in[m][b].scale), totals[m][v]);
      }
    }
    values += 128 * BITS;
    scales += SCALES;
  }
  for (int m = 0; m < ROWS; m++)
    for (int v = 0; v < WIDE; v++)
      store(out[m] + LANES * (first + v), E2M1 ? mul(totals[m][v], same(0.5f)) : totals[m][v]);
}

// Selects the tile for `rows` <= ROWS.
template <int BITS, int SCALES, int ROWS>
void some_rows(const mtp::Panel& panel, int first, int64_t rows, const mtp::InputBlock* const* in,
               float* const* out) {
  if constexpr (ROWS > 1)
    if (rows < ROWS) return some_rows<BITS, SCALES, ROWS - 1>(panel, first, rows, in, out);
  tile<BITS, SCALES, ROWS>(panel, first, in, out);
}

// Returns how many of the remaining rows the next tile takes. Tiles of similar sizes share the work
// per block best: 7 rows are 4 + 3, not 6 + 1.
inline int64_t next_tile(int64_t left, int64_t most) {
  if (left >= 2 * most) return most;
  return left > most ? (left + 1) / 2 : left;
}

template <int BITS, int SCALES = mtp::PANEL>
void multiply(const mtp::Panel& panel, int64_t rows, const mtp::InputBlock* const* in,
              float* const* out) {
  if (panel.wide != SCALES)
    return (panel.wide == mtp::POWERS    ? multiply<4, mtp::POWERS>
            : panel.wide == mtp::ZEROED  ? multiply<BITS, mtp::ZEROED>
            : panel.wide == mtp::SHIFTED ? multiply<BITS, mtp::SHIFTED>
                                         : multiply<BITS, mtp::PANEL>)(panel, rows, in, out);
  for (int64_t m = 0; m < rows;) {
    int64_t some = next_tile(rows - m, TILE_ROWS);
    for (int first = 0; first < 2; first += WIDE)
      some_rows<BITS, SCALES, TILE_ROWS>(panel, first, some, in + m, out + m);
    m += some;
  }
}

}  // namespace
