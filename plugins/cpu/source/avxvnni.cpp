// Kernels for AVX-VNNI: those for AVX2 with another dot product.
#include "lanes_avx2.h"
//
#include "table.h"

const mtp::Kernels mtp::kAvxVnni = MTP_KERNELS("avxvnni");
