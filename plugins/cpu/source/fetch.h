// Asks the system for weights that may not be in memory, before they are used. Without it each
// fault waits for the device's read-ahead around one page, much of which may be other experts'.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#if defined(__linux__)
#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>
#endif

namespace mtp {

#if defined(__linux__)

// Returns whether the process has waited for a disk in its last calls. If all is asked for in time,
// it doesn't, and so the first of many calls does without.
inline bool is_short_of_memory() {
  constexpr int64_t patience = 256;
  static std::atomic<long> faults{0};
  static std::atomic<int64_t> left{0};
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  if (usage.ru_majflt != faults.exchange(usage.ru_majflt)) left = patience;
  return left > 0 && left-- > 0;
}

// Asks for the pages of some memory that a file backs; those in memory stay.
inline void fetch(const void* from, size_t size) {
  constexpr uintptr_t page = 4096, piece = 128 << 10;  // more than a device's limit is ignored
  auto start = reinterpret_cast<uintptr_t>(from), end = start + size;
  for (start = start / page * page; start < end; start += piece)
    madvise(reinterpret_cast<void*>(start), std::min(piece, end - start), MADV_WILLNEED);
}

#else

inline bool is_short_of_memory() { return false; }
inline void fetch(const void*, size_t) {}

#endif

}  // namespace mtp
