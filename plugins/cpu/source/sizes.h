// Checked arithmetic of sizes from shapes, attributes and operands; sizes beyond memory are errors.
#pragma once
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace ort {

// The error for an invalid operand or attribute.
struct OperandError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct TooLarge : OperandError {
  TooLarge() : OperandError("a size is negative or too large") {}
};

// Calls an operator and adds its name to errors about sizes.
template <class F>
void named(const char* op, const F& compute) {
  try {
    compute();
  } catch (const TooLarge& error) {
    throw OperandError(std::string("mtpbuild ") + op + ": " + error.what());
  }
}

constexpr int64_t MOST = int64_t{1} << 40;  // numbers in a tensor

inline void require_fits(bool fits) {
  if (!fits) throw TooLarge();
}

template <class... Sizes>
int64_t product(Sizes... sizes) {
  int64_t all = 1;
  bool fits = (... && (sizes >= 0 && !__builtin_mul_overflow(all, int64_t{sizes}, &all)));
  require_fits(fits);
  return all;
}

// Returns the number of elements of a tensor. The product of its sizes other than 0 is bounded,
// too, so that no product of some sizes overflows, and loops over empty rows end.
inline int64_t element_count(const std::vector<int64_t>& shape) {
  int64_t all = 1;
  bool empty = false;
  for (int64_t size : shape) {
    empty |= size == 0;
    all = product(all, size ? size : 1);
    require_fits(all <= MOST);
  }
  require_fits(!empty || all <= INT32_MAX);
  return empty ? 0 : all;
}

inline void check_sizes(const std::vector<int64_t>& shape) { element_count(shape); }

}  // namespace ort
