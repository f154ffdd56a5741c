// Kernels for NEON with the dot product.
#include "lanes_neon.h"
//
#include "table.h"

const mtp::Kernels mtp::kNeon = MTP_KERNELS("neon");
