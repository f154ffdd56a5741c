// Products with fp32 weights: y[n] = fma(x[k], w[k][n], y[n]), k ascending, one total per output.
//
// A tile has enough totals to hide the latency of an addition: a single row uses several panels at
// once, more rows share the loads of one or two panels. Many rows are multiplied in stretches of
// inputs, so that a stretch's weights stay in the cache; between stretches the totals are in the
// result. A step's few rows are bound by the weights' bytes, a prompt's by the multiplications.
#pragma once
#include "products.h"

namespace {

constexpr int64_t STRETCH = 256;  // inputs that many rows are multiplied by at a time

struct FloatTile {
  const mtp::FloatPanels& w;
  int64_t vector, begin, end;  // first vector of 16 outputs; range of inputs
  const float* const* x;
  float* const* out;
  const float* at(int v) const {
    return w.values + (vector + v) / 2 * w.panel + (vector + v) % 2 * LANES + begin * w.input;
  }
};

// last: number of outputs in the last vector.
template <int ROWS, int VECTORS>
void float_tile(const FloatTile& t, int64_t last) {
  constexpr int V = VECTORS;
  Floats totals[ROWS][V];
  const float* lines[V];
  for (int v = 0; v < V; v++) lines[v] = t.at(v);
  for (int m = 0; m < ROWS; m++)
    for (int v = 0; v < V; v++) {
      const float* y = t.out[m] + LANES * (t.vector + v);
      totals[m][v] = t.begin == 0 ? same(0.0f) : v + 1 < V ? load(y) : load_some(y, last);
    }
  auto add_all = [&](bool full) __attribute__((always_inline)) {
    for (int64_t k = t.begin, i = 0; k < t.end; k++, i += t.w.input)
#pragma GCC unroll 8
      for (int v = 0; v < V; v++) {
        if (ROWS > 1 && ROWS <= 4)  // a page ahead, which the hardware does not prefetch
          __builtin_prefetch(lines[v] + i + 1024);
        Floats line = full || v + 1 < V ? load(lines[v] + i) : load_some(lines[v] + i, last);
#pragma GCC unroll 8
        for (int m = 0; m < ROWS; m++) totals[m][v] = fma(same(t.x[m][k]), line, totals[m][v]);
      }
  };
  if (last == LANES)
    add_all(true);
  else
    add_all(false);
  for (int m = 0; m < ROWS; m++)
    for (int v = 0; v < V; v++) {
      float lanes[LANES], *y = t.out[m] + LANES * (t.vector + v);
      if (v + 1 < V || last == LANES) {
        store(y, totals[m][v]);
        continue;
      }
      store(lanes, totals[m][v]);
      std::memcpy(y, lanes, last * sizeof(float));
    }
}

constexpr int most_vectors(int rows) { return rows == 1 ? LONE_VECTORS : FLOAT_VECTORS; }

// Selects the tile for `rows` <= ROWS and `vectors` <= VECTORS.
template <int ROWS, int VECTORS>
void some_vectors(const FloatTile& t, int64_t vectors, int64_t last) {
  if constexpr (VECTORS > 1)
    if (vectors < VECTORS) return some_vectors<ROWS, VECTORS - 1>(t, vectors, last);
  float_tile<ROWS, VECTORS>(t, last);
}

template <int ROWS>
void some_float_rows(FloatTile t, int64_t rows, int64_t columns) {
  if constexpr (ROWS > 1)
    if (rows < ROWS) return some_float_rows<ROWS - 1>(t, rows, columns);
  constexpr int MOST = most_vectors(ROWS);
  for (int64_t left = (columns + LANES - 1) / LANES; left > 0;) {
    int64_t some = next_tile(left, MOST);
    left -= some;
    int64_t last = left ? LANES : columns - LANES * (t.vector + some - 1);
    some_vectors<ROWS, MOST>(t, some, last);
    t.vector += some;
  }
}

void multiply_floats(const mtp::FloatPanels& w, int64_t columns, int64_t rows,
                     const float* const* x, float* const* out) {
  int64_t stretch = rows > FLOAT_ROWS ? STRETCH : w.inputs, begin = 0;
  do {
    int64_t end = w.inputs - begin < stretch ? w.inputs : begin + stretch;
    for (int64_t m = 0; m < rows;) {
      int64_t some = next_tile(rows - m, FLOAT_ROWS);
      some_float_rows<FLOAT_ROWS>({w, 0, begin, end, x + m, out + m}, some, columns);
      m += some;
    }
    begin = end;
  } while (begin < w.inputs);
}

}  // namespace
