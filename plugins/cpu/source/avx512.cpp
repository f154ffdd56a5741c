// Kernels for Avx512.
#include "lanes_avx512.h"
//
#include "table.h"

const mtp::Kernels mtp::kAvx512 = MTP_KERNELS("avx512");
