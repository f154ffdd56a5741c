// Kernels for Avx2.
#include "lanes_avx2.h"
//
#include "table.h"

const mtp::Kernels mtp::kAvx2 = MTP_KERNELS("avx2");
