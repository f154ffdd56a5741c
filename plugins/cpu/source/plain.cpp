// Kernels in plain C++.
#include "lanes_plain.h"
//
#include "table.h"

const mtp::Kernels mtp::kPlain = MTP_KERNELS("plain");
