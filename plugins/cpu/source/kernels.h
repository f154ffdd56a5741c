// What an instruction set offers: a table of kernels, the same in every set, to the bit.
//
// A result is defined by three rules, which every set keeps. A sum has one accumulator per output
// and adds in ascending order, by fused multiply-add where it multiplies. A reduction over one row
// has 16 lanes and one tree behind them. exp is our own polynomial. So a result depends neither on
// the instruction set, nor on rows beside it, nor on threads.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "half.h"

namespace mtp {

constexpr int64_t BLOCK = 32;   // inputs that share a scale
constexpr int64_t PANEL = 32;   // outputs that lie side by side
constexpr int64_t LANES = 16;   // outputs, or queries, that a vector holds
constexpr int64_t CHUNK = 64;   // cached rows between two looks at the largest score
constexpr int64_t SPLIT = 512;  // cached rows of a partial attention; a multiple of CHUNK

// 32 inputs of one row: x is values * scale.
struct InputBlock {
  float scale;
  int32_t sum;  // of the values
  int8_t values[BLOCK];
};

// Panel `p` of an integer weight: its blocks in order, each 32 outputs wide.
//
// values: a block has 128 * bits bytes, in lines of 64: 16 outputs with 4 bytes each. In 8 bits
// line 2 * g + v has inputs 4g .. 4g + 3 of outputs 16v .. 16v + 15; in 4 bits line 2 * j + v has
// inputs 8j .. 8j + 3 in the low halves and 8j + 4 .. 8j + 7 in the high ones. Zero is 8 or 128.
// scales: 32 fp16 numbers a block, one for each output.
struct Panel {
  const uint8_t* values;
  const uint16_t* scales;
  int64_t blocks;
};

// An fp32 weight: 32 outputs of an input are beside each other. Panels, [inputs][32] each, are
// `panel` numbers apart, and inputs `input`: 32 * inputs and 32 where the build has packed it. Rows
// [inputs][outputs] are panels, too, 32 and `outputs` apart; then no line is whole behind the last.
struct FloatPanels {
  const float* values;
  int64_t inputs, panel, input;
};

// Queries in the lanes attend to a run of cached rows.
struct Attention {
  const float* queries;  // [width][LANES], scaled
  const int32_t* seen;   // [LANES]: the lane sees positions before it
  const float* cache;    // [.., stride]: positions before `base`; null if they are bfloat16:
  const Bf16* halves;
  const float* fresh;  // [.., stride]: positions from `base` on; may be null if none is seen
  int64_t base;
  int64_t stride;          // of a row
  int64_t keys, width;     // where its key is, and how wide
  int64_t values, latent;  // where its values are, and how many
};

// A softmax under way: largest score, sum of weights and weighted sum of values, by lane.
struct Partial {
  float* largest;  // [LANES]
  float* total;    // [LANES]
  float* mixed;    // [latent][LANES]
};

// A delta rule's tokens, over COLUMNS values of a head; rows are `stride` and `heads` numbers
// apart, and a state's [width] `reads` and `writes`.
constexpr int64_t COLUMNS = 64;
struct Delta {
  const float *queries, *keys;   // [tokens, .. width]; without queries there are no outputs
  const float* values;           // [tokens][COLUMNS]
  const float *decays, *shares;  // [tokens, ..]
  int64_t tokens, stride, heads, width;
  float* out;          // [tokens][COLUMNS]
  const float* state;  // before the tokens
  float* after;        // behind them; may be null, and may be where `state` is
  int64_t reads, writes;
  float* between;  // [width][COLUMNS] of scratch
};

// The two highest numbers of a row, the first one's place, and sum(exp(x - top)), if it is asked.
struct Best {
  float top, second, total;
  int64_t id;
};

struct Kernels {
  const char* name;
  // x [32 * blocks] -> blocks
  void (*quantise)(const float* x, int64_t blocks, InputBlock* out);
  // Rows of blocks times a panel: 32 floats to each of `out`.
  void (*panel4)(const Panel&, int64_t rows, const InputBlock* const* in, float* const* out);
  void (*panel8)(const Panel&, int64_t rows, const InputBlock* const* in, float* const* out);
  // Rows x [inputs] times the first `columns` outputs of w.
  void (*floats)(const FloatPanels& w, int64_t columns, int64_t rows, const float* const* x,
                 float* const* out);
  // gate [count] -> silu(gate) * up; count is a multiple of LANES.
  void (*gated)(float* gate, const float* up, int64_t count);
  // x [count] -> x / rms(x) * weight
  void (*norm)(const float* x, const float* weight, int64_t count, float epsilon, float* out);
  void (*sigmoid)(const float* x, int64_t count, float* out);
  // The lowest place of equal numbers counts; count is at least 1.
  Best (*best)(const float* x, int64_t count, bool sum);
  // Attend to positions begin .. end - 1, at most SPLIT from a multiple of SPLIT on.
  // `rows` is scratch for CHUNK * stride floats, where old and fresh rows meet, or bfloat16 widens.
  void (*attend)(const Attention&, int64_t begin, int64_t end, float* rows, const Partial& out);
  // Fold a later partial into an earlier one.
  void (*fold)(const Partial& into, const Partial& later, int64_t latent);
  // At least one token.
  void (*delta)(const Delta&);
  // silu of `taps` rows' weighted sum; weight [taps][channels].
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
