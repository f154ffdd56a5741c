// The table of kernels of an instruction set. Results are the same to the bit in every set.
//
// Three rules define results in every set. A sum has one accumulator per output and adds in
// ascending order, by fused multiply-add if it multiplies. A reduction over one row has 16 lanes,
// which are then added as a tree. exp is our own polynomial. So a result does not depend on the
// instruction set, on other rows or on threads.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "half.h"

namespace mtp {

constexpr int64_t BLOCK = 32;   // inputs that share a scale
constexpr int64_t PANEL = 32;   // adjacent outputs
constexpr int64_t LANES = 16;   // outputs, or queries, in a vector
constexpr int64_t CHUNK = 64;   // cached rows after which attention rescales its softmax
constexpr int64_t SPLIT = 512;  // cached rows of a partial attention; a multiple of CHUNK

// 32 quantised inputs of one row: x = values * scale.
struct InputBlock {
  float scale;
  int32_t sum;  // of the values
  int8_t values[BLOCK];
  int32_t pairs;  // two sums of 16 bits: of values 4g and 4g + 1, and of 4g + 2 and 4g + 3
};

// A panel of an integer weight: its blocks in order, each for 32 outputs.
//
// values: a block has 128 * bits bytes, in lines of 64: 16 outputs with 4 bytes each. In 8 bits
// line 2 * g + v has inputs 4g .. 4g + 3 of outputs 16v .. 16v + 15; in 4 bits line 2 * j + v has
// inputs 8j .. 8j + 3 in the low halves and 8j + 4 .. 8j + 7 in the high ones. Zero is 8 or 128.
// scales: `wide` halves per block: 32 fp16 numbers, one for each output, then what else there is.
// ZEROED: 32 signed bytes are subtracted from the outputs' values. SHIFTED: 32 fp16 numbers are
// added to values times scales, whose zero is then 0. POWERS: 32 bytes e, and no fp16 numbers: the
// scales are 2^(e - 127), an infinite one for 255, and values are codes of e2m1.
struct Panel {
  const uint8_t* values;
  const uint16_t* scales;
  int64_t blocks, wide;
};
constexpr int64_t POWERS = 16, ZEROED = 48, SHIFTED = 64;  // widths

// Twice the number of each code of e2m1, less its zero. All are whole, so kernels multiply them
// like int4's codes, by other numbers and with another zero, and halve the sums at the end.
constexpr int E2M1_ZERO = 12;
constexpr uint8_t E2M1[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

// An fp32 weight in panels of 32 outputs. Two panels are `panel` numbers apart, two inputs of a
// panel `input` numbers. These are 32 * inputs and 32 in a packed weight [panels][inputs][32]. They
// are 32 and `outputs` in a weight [inputs][outputs], whose last panel may have fewer outputs.
struct FloatPanels {
  const float* values;
  int64_t inputs, panel, input;
};

// Attention of up to LANES queries, one in each lane, to cached and fresh rows.
struct Attention {
  const float* queries;  // [width][LANES], scaled
  const int32_t* seen;   // [LANES]: a lane sees the positions below it
  const int32_t* from;   // [LANES]: and not those below this one
  const float* cache;    // [.., stride]: positions before `base`; null if they are in `halves`
  const Bf16* halves;
  const float* fresh;  // [.., stride]: positions from `base` on; may be null if none is seen
  int64_t base;
  int64_t ring;            // rows of the cache, which begins anew after them
  int64_t stride;          // of a row
  int64_t keys, width;     // offset and size of its key
  int64_t values, latent;  // offset and number of its values
};

// A partial softmax: largest score, sum of weights and weighted sum of values, by lane.
struct Partial {
  float* largest;  // [LANES]
  float* total;    // [LANES]
  float* mixed;    // [latent][LANES]
};

// Up to BLOCK adjacent numbers of an int8 row that share a scale: the offset and number of their
// bytes, and the offset of their fp16 scale.
struct RowBlock {
  int64_t values, count, scale;
};

// Attention of up to QUERIES queries to the first rows of a split, which are int8.
constexpr int64_t QUERIES = 64;
struct IntegerAttention {
  int64_t count;                     // of queries
  const InputBlock* const* queries;  // blocks as those of a key, scaled, of numbers in -64 .. 64
  const int32_t* seen;               // [count]: a query sees the rows below it
  const int32_t* from;               // [count]: and not those below this one
  const int8_t* const* rows;         // [SPLIT]; those that no query sees are any rows
  const RowBlock* keys;
  const RowBlock* values;
  int64_t key_blocks, value_blocks;
  float* scores;   // scratch [count][SPLIT]
  uint8_t* panel;  // scratch: PANEL * (BLOCK + 4) bytes for a key's blocks, or for each 32 rows
};

// The delta rule of some tokens for COLUMNS values of a head. Distances, in numbers: `stride` from
// a token's query or key to the next token's, `heads` for decays and shares, `reads` from a row of
// `state` to the next, `writes` for rows of `after`.
constexpr int64_t COLUMNS = 64;
struct Delta {
  const float *queries, *keys;   // [tokens, .. width]; without queries there are no outputs
  const float* values;           // [tokens][COLUMNS]
  const float *decays, *shares;  // [tokens, ..]
  int64_t tokens, stride, heads, width;
  float* out;          // [tokens][COLUMNS]
  const float* state;  // before the tokens
  float* after;        // after the tokens; may be null or equal to `state`
  int64_t reads, writes;
  float* between;  // [width][COLUMNS], scratch
};

// The two highest numbers of a row, the index of the highest, and sum(exp(x - top)) if requested.
struct Best {
  float top, second, total;
  int64_t id;
};

struct Kernels {
  const char* name;
  // x [32 * blocks], times factor -> blocks, whose largest numbers become `most` or -most
  void (*quantise)(const float* x, int64_t blocks, float factor, float most, InputBlock* out);
  // Multiplies rows of blocks by a panel: 32 floats to each of `out`.
  void (*panel4)(const Panel&, int64_t rows, const InputBlock* const* in, float* const* out);
  void (*panel8)(const Panel&, int64_t rows, const InputBlock* const* in, float* const* out);
  // Multiplies rows x [inputs] by the first `columns` outputs of w.
  void (*floats)(const FloatPanels& w, int64_t columns, int64_t rows, const float* const* x,
                 float* const* out);
  // gate [count] -> silu(gate) * up; count is a multiple of LANES.
  void (*gated)(float* gate, const float* up, int64_t count);
  // The same with gelu, by its approximation with tanh.
  void (*gated_gelu)(float* gate, const float* up, int64_t count);
  // x [count] -> x / rms(x) * weight
  void (*norm)(const float* x, const float* weight, int64_t count, float epsilon, float* out);
  float (*squares)(const float* x, int64_t count);  // the sum of x * x
  // Sums rows of `count` numbers, each times its weight.
  void (*mix)(const float* const* rows, const float* weights, int64_t terms, int64_t count,
              float* out);
  void (*sigmoid)(const float* x, int64_t count, float* out);
  // x [count] -> cap * tanh(x / cap)
  void (*soft_cap)(const float* x, int64_t count, float cap, float* out);
  // x [count] -> exp((x - top) / temperature), exactly 0 where that is below exp(-87)
  void (*weigh)(const float* x, int64_t count, float top, float temperature, float* out);
  // Ties go to the lowest index; count is at least 1.
  Best (*best)(const float* x, int64_t count, bool sum);
  // Attends to positions begin .. end - 1, which are within a SPLIT. rows:
  // scratch of CHUNK * stride floats, for chunks with cached and fresh rows, or with bfloat16 rows.
  void (*attend)(const Attention&, int64_t begin, int64_t end, float* rows, const Partial& out);
  // Attends to int8 rows. out: a partial softmax of `latent` values for each LANES queries.
  void (*attend_integers)(const IntegerAttention&, int64_t latent, float* out);
  // Folds a later partial softmax into an earlier one.
  void (*fold)(const Partial& into, const Partial& later, int64_t latent);
  // Runs the delta rule; there is at least one token.
  void (*delta)(const Delta&);
  // Computes silu of the weighted sum of `taps` rows; weight [taps][channels].
  void (*convolve)(const float* const* rows, const float* weight, int64_t taps, int64_t channels,
                   float* out);
};

extern const Kernels kPlain;
#if defined(__x86_64__)
extern const Kernels kAvx2, kAvxVnni, kAvx512;
#elif defined(__aarch64__)
extern const Kernels kNeon;
#endif

}  // namespace mtp
