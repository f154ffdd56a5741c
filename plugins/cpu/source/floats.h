// Products with fp32 weights, whose rows are inputs: y[n] = fma(x[k], w[k][n], y[n]), k ascending,
// one total per output. Bound by the weights' bytes; an input's row of 32 outputs is two lines.
#pragma once
#include "products.h"

namespace {

template <int ROWS, bool WHOLE>
void float_tile(const float* w, int64_t stride, int64_t inputs, int64_t count,
                const float* const* x, float* const* out) {
  Floats totals[ROWS][WIDE];
  for (int m = 0; m < ROWS; m++)
    for (int v = 0; v < WIDE; v++) totals[m][v] = same(0.0f);
  for (int64_t k = 0; k < inputs; k++, w += stride) {
#pragma GCC unroll 2
    for (int v = 0; v < WIDE; v++) {
      int64_t left = count - 16 * v;
      Floats line = WHOLE || left >= 16 ? load(w + 16 * v)
                    : left > 0          ? load_some(w + 16 * v, left)
                                        : same(0.0f);
#pragma GCC unroll 8
      for (int m = 0; m < ROWS; m++) totals[m][v] = fma(same(x[m][k]), line, totals[m][v]);
    }
  }
  for (int m = 0; m < ROWS; m++)
    for (int v = 0; v < WIDE; v++) {
      int64_t left = count - 16 * v;
      float lanes[16];
      store(lanes, totals[m][v]);
      if (left > 0) std::memcpy(out[m] + 16 * v, lanes, (left < 16 ? left : 16) * sizeof(float));
    }
}

template <int ROWS, bool WHOLE>
void some_float_rows(const float* w, int64_t stride, int64_t inputs, int64_t count, int64_t rows,
                     const float* const* x, float* const* out) {
  if constexpr (ROWS > 1)
    if (rows < ROWS)
      return some_float_rows<ROWS - 1, WHOLE>(w, stride, inputs, count, rows, x, out);
  float_tile<ROWS, WHOLE>(w, stride, inputs, count, x, out);
}

void multiply_floats(const float* w, int64_t stride, int64_t inputs, int64_t count, int64_t rows,
                     const float* const* x, float* const* out) {
  for (int64_t m = 0; m < rows;) {
    int64_t some = next_rows(rows - m);
    float* to[TILE_ROWS];
    for (int64_t n = 0; n < count; n += 16 * WIDE) {
      int64_t width = count - n < 16 * WIDE ? count - n : 16 * WIDE;
      for (int64_t i = 0; i < some; i++) to[i] = out[m + i] + n;
      auto run =
          width == 16 * WIDE ? some_float_rows<TILE_ROWS, true> : some_float_rows<TILE_ROWS, false>;
      run(w + n, stride, inputs, width, some, x + m, to);
    }
    m += some;
  }
}

}  // namespace
