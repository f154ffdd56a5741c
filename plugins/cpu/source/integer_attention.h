// Attention over int8 rows, as products of integers: rows become a panel of a weight's layout,
// which the kernel of integer weights multiplies by the queries, and then by their rows' weights.
//
// Within a split the softmax has one maximum. Its weights times the scales of a block of values are
// rounded to int8 for each 32 rows, relative to a bound that only rows which the query sees decide.
// So a query's result depends on itself and the rows that it sees. A score that is infinite or NaN
// makes the result NaN.
#pragma once
#include "attention.h"
#include "products.h"

namespace {

constexpr int64_t PARTS = mtp::SPLIT / mtp::BLOCK;  // blocks of rows in a split
constexpr int64_t LINES = mtp::PANEL * mtp::BLOCK;  // bytes of a block of a panel

// A block of some rows: 32 numbers of each, from number `at` on. Fewer are filled up with zeros.
struct BlockRows {
  const int8_t* const* rows;
  int64_t at;
  const int8_t* filled[mtp::PANEL];
  int8_t padded[mtp::PANEL][mtp::BLOCK];

  BlockRows(const mtp::RowBlock& block, const int8_t* const* rows, int64_t count)
      : rows(rows), at(block.values) {
    if (block.count == mtp::BLOCK) return;
    for (int64_t n = 0; n < count; n++) {
      std::memset(padded[n], 0, mtp::BLOCK);
      std::memcpy(padded[n], rows[n] + at, block.count);
      filled[n] = padded[n];
    }
    this->rows = filled, at = 0;
  }
};

// Lays out 32 rows' keys as the weights of 32 outputs, and their scales [blocks][32].
inline void pack_keys(const mtp::IntegerAttention& a, const int8_t* const* rows, uint8_t* values,
                      float* scales) {
  uint16_t bits[mtp::PANEL];
  for (int64_t b = 0; b < a.key_blocks; b++, values += LINES, scales += mtp::PANEL) {
    BlockRows block(a.keys[b], rows, mtp::PANEL);
    for (int64_t n = 0; n < mtp::PANEL; n += 8)
      store_columns(block.rows + n, block.at, values + 4 * n);
    for (int64_t n = 0; n < mtp::PANEL; n++) std::memcpy(bits + n, rows[n] + a.keys[b].scale, 2);
    for (int64_t n = 0; n < mtp::PANEL; n += LANES) store(scales + n, load_halves(bits + n));
  }
}

// The rows that a query sees.
struct Sight {
  int64_t from;
  Floats hidden, visible, lanes;

  Sight(int64_t from, int64_t seen)
      : from(from),
        hidden(same(static_cast<float>(from))),
        visible(same(static_cast<float>(seen))) {
    float place[LANES];
    for (int i = 0; i < LANES; i++) place[i] = static_cast<float>(i);
    lanes = load(place);
  }
  // Returns `value` where the query sees rows r .. r + 15, else `other`.
  Floats where(int64_t r, Floats value, Floats other) const {
    Floats place = add(lanes, same(static_cast<float>(r)));
    Floats upper = where_less(place, visible, value, other);
    return from > r ? where_less(place, hidden, other, upper) : upper;
  }
};

// The scales of a block of a split's values. Those that are not finite are 0: the scores of their
// rows are NaN. So are negative ones, which only a damaged cache holds: no weight leaves 0 .. 127.
struct Factors {
  alignas(64) float of[mtp::SPLIT], normed[mtp::SPLIT];  // normed: over the largest of 32 rows
  float tops[PARTS];

  // Returns the largest of those of 32 rows that a query sees: from one on, up to `seen`.
  float top(int64_t part, int64_t from, int64_t seen) const {
    Sight sight(from, seen);
    Floats low = load(of + mtp::BLOCK * part), high = load(of + mtp::BLOCK * part + LANES);
    return largest(max(sight.where(0, low, same(0.0f)), sight.where(LANES, high, same(0.0f))));
  }
};

// Lays out `parts` times 32 rows' values as the weights of 32 outputs, but signed.
inline void pack_values(const mtp::RowBlock& block, const int8_t* const* rows, int64_t parts,
                        uint8_t* values, Factors& factors) {
  uint16_t bits[mtp::SPLIT];
  for (int64_t r = 0; r < mtp::BLOCK * parts; r += 4, values += 128) {
    BlockRows four(block, rows + r, 4);
    store_interleaved(four.rows, four.at, values);
    for (int64_t i = 0; i < 4; i++) std::memcpy(bits + r + i, rows[r + i] + block.scale, 2);
  }
  for (int64_t r = 0; r < mtp::BLOCK * parts; r += LANES) {
    Floats found = load_halves(bits + r);
    found = where_less(found, same(65536.0f), found, same(0.0f));
    store(factors.of + r, max(found, same(0.0f)));
  }
  for (int64_t part = 0; part < parts; part++) {
    float top = factors.tops[part] = factors.top(part, 0, mtp::BLOCK);
    Floats inverse = same(top > 0.0f ? 1.0f / top : 0.0f);
    for (int64_t r = mtp::BLOCK * part; r < mtp::BLOCK * (part + 1); r += LANES)
      store(factors.normed + r, mul(load(factors.of + r), inverse));
  }
}

// Turns scores of the rows from one up to `seen` into weights; up to `count` others are zeros. Each
// 32 weights are scaled to a largest one of 127, and their scale is returned.
inline void weigh(float* scores, int64_t from, int64_t seen, int64_t count, float* scales,
                  float* largest_score, float* sum) {
  Floats lowest = same(LOWEST), tops = lowest;
  Sight sight(from, seen);
  for (int64_t r = 0; r < seen; r += LANES)
    tops = max(tops, sight.where(r, load(scores + r), lowest));
  Floats top = same(largest(tops)), sums = same(0.0f);
  for (int64_t b = 0; b < count; b += mtp::BLOCK) {
    Floats both[2];
    for (int64_t i = 0; i < 2; i++) {
      int64_t r = b + LANES * i;
      Floats score = load(scores + r), weight = exp(max(same(LOG_FLOOR), sub(score, top)));
      weight = fma(score, same(0.0f), weight);  // NaN unless the score is finite
      both[i] = sight.where(r, weight, same(0.0f));
      sums = add(sums, both[i]);
    }
    float most = largest(max(both[0], both[1]));
    Floats inverse = same(most > 0.0f ? 127.0f / most : 0.0f);
    scales[b / mtp::BLOCK] = most / 127.0f;
    for (int64_t i = 0; i < 2; i++) store(scores + b + LANES * i, mul(both[i], inverse));
  }
  *largest_score = largest(tops);
  *sum = tree(sums);
}

// Rounds a query's weights of the rows that it sees, times the scales of a block of values, to
// int8.
inline void share(const float* weights, const float* scales, int64_t from, int64_t seen,
                  const Factors& factors, int64_t parts, mtp::InputBlock* out) {
  for (int64_t part = 0, r = 0; part < parts; part++, r += mtp::BLOCK) {
    Floats low = load(factors.normed + r), high = load(factors.normed + r + LANES);
    float top = factors.tops[part];
    if (seen < r + mtp::BLOCK || from > r) {
      top = factors.top(part, from - r, seen - r);
      Floats inverse = same(top > 0.0f ? 1.0f / top : 0.0f);
      low = mul(load(factors.of + r), inverse), high = mul(load(factors.of + r + LANES), inverse);
    }
    out[part].scale = scales[part] * top;
    store_block(out[part].values, to_ints(mul(load(weights + r), low)),
                to_ints(mul(load(weights + r + LANES), high)));
  }
}

// Multiplies rows of blocks by a panel of 32 keys, whose scales are [blocks][32], or of values.
template <bool KEYS, int ROWS>
void multiply_rows(const uint8_t* panel, const float* scales, int64_t blocks,
                   const mtp::InputBlock* const* in, float* const* out) {
  for (int v = 0; v < 2; v++) {
    Floats totals[ROWS];
    for (int m = 0; m < ROWS; m++) totals[m] = same(0.0f);
    const uint8_t* lines = panel + 64 * v;
    for (int64_t b = 0; b < blocks; b++) {
      Ints sums[ROWS] = {};
      if (KEYS)
        for (int m = 0; m < ROWS; m++) sums[m] = first_small(in[m][b]);
#pragma GCC unroll 8
      for (int g = 0; g < 8; g++, lines += 128) {
        Bytes line = load_bytes(lines);
#pragma GCC unroll 16
        for (int m = 0; m < ROWS; m++) {
          const int8_t* four = in[m][b].values + 4 * g;
          sums[m] = KEYS ? dot4_small(sums[m], line, four) : dot4_signed(sums[m], line, four);
        }
      }
#pragma GCC unroll 16
      for (int m = 0; m < ROWS; m++) {
        Floats scale = same(in[m][b].scale);
        if (KEYS) scale = mul(load(scales + mtp::PANEL * b + LANES * v), scale);
        totals[m] = fma(to_floats(sums[m]), scale, totals[m]);
      }
    }
    for (int m = 0; m < ROWS; m++) store(out[m] + LANES * v, totals[m]);
  }
}

// Selects the tile for `rows` <= ROWS.
template <bool KEYS, int ROWS>
void multiply_some(int64_t rows, const uint8_t* panel, const float* scales, int64_t blocks,
                   const mtp::InputBlock* const* in, float* const* out) {
  if constexpr (ROWS > 1)
    if (rows < ROWS) return multiply_some<KEYS, ROWS - 1>(rows, panel, scales, blocks, in, out);
  multiply_rows<KEYS, ROWS>(panel, scales, blocks, in, out);
}

void attend_integers(const mtp::IntegerAttention& a, int64_t latent, float* out) {
  constexpr int64_t Q = mtp::QUERIES;
  alignas(64) float products[Q][mtp::PANEL];
  Factors factors;
  float scales[Q][PARTS], *to[Q];
  mtp::InputBlock shares[Q][PARTS];
  const mtp::InputBlock* in[Q];
  int64_t parts = 0;
  for (int64_t i = 0; i < a.count; i++)
    parts = a.seen[i] > mtp::BLOCK * parts ? (a.seen[i] + mtp::BLOCK - 1) / mtp::BLOCK : parts;
  auto key_scales = reinterpret_cast<float*>(a.panel + LINES * a.key_blocks);
  for (int64_t p = 0; p < parts; p++) {
    pack_keys(a, a.rows + mtp::PANEL * p, a.panel, key_scales);
    for (int64_t i = 0; i < a.count; i++) to[i] = a.scores + mtp::SPLIT * i + mtp::PANEL * p;
    for (int64_t m = 0, some; m < a.count; m += some) {
      some = next_tile(a.count - m, TILE_KEYS);
      multiply_some<true, TILE_KEYS>(some, a.panel, key_scales, a.key_blocks, a.queries + m,
                                     to + m);
    }
  }
  auto partial = [&](int64_t i) {
    return out + i / mtp::LANES * (2 + latent) * mtp::LANES + i % mtp::LANES;
  };
  for (int64_t i = 0; i < a.count; i++) {
    float* own = partial(i);
    weigh(a.scores + mtp::SPLIT * i, a.from[i], a.seen[i], mtp::BLOCK * parts, scales[i], own,
          own + mtp::LANES);
    in[i] = shares[i], to[i] = products[i];
  }
  for (int64_t b = 0, at = 0; b < a.value_blocks; at += a.values[b++].count) {
    pack_values(a.values[b], a.rows, parts, a.panel, factors);
    for (int64_t i = 0; i < a.count; i++)
      share(a.scores + mtp::SPLIT * i, scales[i], a.from[i], a.seen[i], factors, parts, shares[i]);
    for (int64_t m = 0, some; m < a.count; m += some) {
      some = next_tile(a.count - m, TILE_KEYS);
      multiply_some<false, TILE_KEYS>(some, a.panel, nullptr, parts, in + m, to + m);
    }
    for (int64_t i = 0; i < a.count; i++)
      for (int64_t d = 0; d < a.values[b].count; d++)
        partial(i)[(2 + at + d) * mtp::LANES] = products[i][d];
  }
}

}  // namespace
