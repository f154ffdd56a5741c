// The kernel table of one instruction set; a source file includes its lanes, then this.
#pragma once
#include "attention.h"
#include "delta.h"
#include "floats.h"
#include "integer_attention.h"
#include "kernels.h"
#include "maths.h"
#include "products.h"

#define MTP_KERNELS(name)                                                                 \
  {name,   quantise,        multiply<4>, multiply<8>, multiply_floats, gated, gated_gelu, \
   norm,   squares,         mix,         sigmoid,     soft_cap,        weigh, best,       \
   attend, attend_integers, fold,        delta,       convolve}
