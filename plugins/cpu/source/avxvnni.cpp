// Kernels for AVX-VNNI: AVX2, but for the dot product.
#include "lanes_avx2.h"
//
#include "table.h"

const mtp::Kernels mtp::kAvxVnni = MTP_KERNELS("avxvnni");
