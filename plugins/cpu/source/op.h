// The common parts of operators: checks, scratch memory and distribution of tasks to threads.
#pragma once
#include <algorithm>
#include <cstring>
#include <memory>

#include "call.h"
#include "kernels.h"

namespace {

using mtp::BLOCK;
using mtp::InputBlock;
using mtp::Kernels;
using mtp::LANES;
using mtp::Panel;
using mtp::PANEL;
using namespace ort;
using std::min;

constexpr int64_t SMALL = 1 << 18;  // fp32 multiplications below which one thread is used
constexpr int64_t ROWS = 48;        // most rows of a task
constexpr int64_t NO_NUMBER = -2;   // stands for a chosen row if a score is NaN

// Throws unless `holds`. A macro, so that the text is built only then.
#define REQUIRE(holds, op, ...)                                                              \
  do {                                                                                       \
    if (!(holds))                                                                            \
      throw OperandError(std::string("mtpbuild ") + (op) + ": " + std::string(__VA_ARGS__)); \
  } while (false)

inline int64_t ceil_div(int64_t a, int64_t b) {
  return a / b + (a % b > 0 ? 1 : 0);
}  // never overflows

// Allocates uninitialised memory for the product of these sizes.
template <class T, class... Sizes>
std::unique_ptr<T[]> scratch(Sizes... sizes) {
  int64_t count = product(sizes...);
  ort::require_fits(count <= MOST);
  return std::unique_ptr<T[]>(new T[static_cast<size_t>(std::max<int64_t>(count, 1))]);
}

// Sums a row. Lane i sums numbers i, i + 16, .., wherever the row lies; then the lanes are added by
// halves.
inline float sum_of(const float* row, int64_t size) {
  float lanes[LANES] = {};
  int64_t whole = size / LANES * LANES;
  for (int64_t i = 0; i < whole; i += LANES)
    for (int64_t lane = 0; lane < LANES; lane++) lanes[lane] += row[i + lane];
  for (int64_t i = whole; i < size; i++) lanes[i - whole] += row[i];
  for (int64_t width = LANES / 2; width > 0; width /= 2)
    for (int64_t lane = 0; lane < width; lane++) lanes[lane] += lanes[lane + width];
  return lanes[0];
}

// Runs tasks, on the session's threads if they have enough work together.
template <class F>
void run_tasks(Call& call, int64_t count, int64_t multiplications, const F& task) {
  if (multiplications < SMALL)
    for (int64_t i = 0; i < count; i++) task(i);
  else
    ort::parallel(call.context, count, task);
}

// The base of most operators; each declares `name`, `inputs` and any `results` but one of fp32.
// Makes gates at most `limit`, and ups within it and its negative; a NaN stays. 0: no limit.
inline void clamp_gates(float* gates, float* ups, int64_t count, float limit) {
  if (limit <= 0.0f) return;
  for (int64_t i = 0; i < count; i++) {
    gates[i] = gates[i] > limit ? limit : gates[i];
    ups[i] = ups[i] > limit ? limit : ups[i] < -limit ? -limit : ups[i];
  }
}

struct FloatOperator : ort::Operator {
  static constexpr Operand results[] = {FLOAT};
  const Kernels& k;
  const Attributes& from;  // for initial values of members only; it is gone when compute() runs

  FloatOperator(const Kernels& k, const Attributes& from) : k(k), from(from) {}
};

}  // namespace
