// The instruction sets of an x86-64 processor whose registers the system saves.
// __builtin_cpu_supports can't tell: with the library of zig's compiler it is always false.
#pragma once
#include <cpuid.h>

struct Processor {
  bool avx2 = false, avxvnni = false, avx512 = false;

  Processor() {
    unsigned a, b, c, d, unused, saved;
    const auto has = [](unsigned word, unsigned bits) { return (word & bits) == bits; };
    if (!__get_cpuid(1, &unused, &unused, &c, &unused)) return;
    if (!has(c, bit_OSXSAVE | bit_FMA | bit_F16C | bit_MOVBE)) return;
    __asm__("xgetbv" : "=a"(saved), "=d"(d) : "c"(0));
    if (!has(saved, 0x6) || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return;
    avx2 = has(b, bit_AVX2);
    const unsigned level4 = bit_BMI | bit_BMI2 | bit_AVX512F | bit_AVX512DQ | bit_AVX512CD |
                            bit_AVX512BW | bit_AVX512VL;  // x86-64-v4, with the checks below
    avx512 = avx2 && has(b, level4) && has(c, bit_AVX512VNNI) && has(saved, 0xe6) &&
             __get_cpuid(0x80000001, &unused, &unused, &c, &unused) && has(c, bit_LZCNT);
    avxvnni = avx2 && a >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d) && has(a, bit_AVXVNNI);
  }
};
