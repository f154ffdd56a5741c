// A step's small operators: taking, joining, splitting and looking up rows, placing tokens.
#include "registry.h"
#include "trigonometry.h"

namespace {

// x [B, N, ..], start [B] -> [B, count, ..]: `count` rows of each slot from its start on.
template <class T>
struct Take : FloatOperator {
  static constexpr const char* name = std::is_same_v<T, float> ? "Take" : "TakeInts";
  static constexpr Operand inputs[] = {TYPE<T>, INT64};
  static constexpr Operand results[] = {TYPE<T>};
  using FloatOperator::FloatOperator;
  int64_t count = from.integer("count");

  void compute(Call& call) const {
    Tensor x = call.input(0), start = call.input(1);
    REQUIRE(x.rank() > 1 && start.is({x.shape[0]}) && count > 0 && count <= x.shape[1], name,
            std::to_string(count) + " rows of " + x.text());
    std::vector<int64_t> shape = x.shape;
    shape[1] = count;
    T* y = call.output<T>(shape);
    int64_t width = x.count(2, x.rank());
    for (int64_t slot = 0; slot < x.shape[0]; slot++) {
      int64_t at = start.data<int64_t>()[slot];
      REQUIRE(at >= 0 && at <= x.shape[1] - count, name,
              std::to_string(count) + " rows from " + std::to_string(at) + " on of " + x.text());
      std::copy_n(x.data<T>() + (slot * x.shape[1] + at) * width, count * width,
                  y + slot * count * width);
    }
  }
};

// Concatenates two to four tensors along an axis.
template <class T>
struct Join : FloatOperator {
  static constexpr const char* name = std::is_same_v<T, float> ? "Join" : "JoinInts";
  static constexpr Operand inputs[] = {TYPE<T>, TYPE<T>, maybe(TYPE<T>), maybe(TYPE<T>)};
  static constexpr Operand results[] = {TYPE<T>};
  using FloatOperator::FloatOperator;
  int64_t axis = from.integer("axis");

  void compute(Call& call) const {
    std::vector<Tensor> parts;
    for (size_t i = 0; i < std::size(inputs); i++) {
      Tensor part = call.input(i, i > 1);
      if (part.memory) parts.push_back(part);
    }
    std::vector<int64_t> shape = parts[0].shape;
    REQUIRE(axis >= 0 && axis < static_cast<int64_t>(shape.size()), name, parts[0].text());
    size_t place = static_cast<size_t>(axis);
    shape[place] = 0;
    for (const Tensor& part : parts) {
      std::vector<int64_t> other = part.shape;
      REQUIRE(other.size() == shape.size(), name, part.text() + " beside " + parts[0].text());
      int64_t size = other[place];
      other[place] = shape[place];
      REQUIRE(other == shape && size <= MOST && shape[place] <= MOST, name,
              part.text() + " beside " + parts[0].text());
      shape[place] += size;
    }
    T* y = call.output<T>(shape);
    // An empty tensor may have any number of outer lines, so skip the loop.
    int64_t outers = shape[place] ? parts[0].count(0, place) : 0;
    for (int64_t outer = 0; outer < outers; outer++)
      for (const Tensor& part : parts) {
        int64_t width = part.count(place, part.rank());
        y = std::copy_n(part.data<T>() + outer * width, width, y);
      }
  }
};

// x [.., N] -> the first `first` columns, and the others.
struct Split : FloatOperator {
  static constexpr const char* name = "Split";
  static constexpr Operand inputs[] = {FLOAT};
  static constexpr Operand results[] = {FLOAT, FLOAT};
  using FloatOperator::FloatOperator;
  int64_t first = from.integer("first");

  void compute(Call& call) const {
    Tensor x = call.input(0);
    REQUIRE(x.rank() > 0 && first > 0 && first < x.last(), name,
            std::to_string(first) + " columns of " + x.text());
    std::vector<int64_t> shape = x.shape;
    int64_t rest = shape.back() - first;
    shape.back() = first;
    float* a = call.output(shape);
    shape.back() = rest;
    float* b = call.output(shape, 1);
    const float* row = x.data<float>();
    for (int64_t m = x.rows(); m > 0; m--, row += first + rest) {
      a = std::copy_n(row, first, a);
      b = std::copy_n(row + first, rest, b);
    }
  }
};

// As defined in `plugins/rotary_rows/op.py`: start [B], active [B] or none, inv_freq [half], number
// of tokens, and the position of inactive slots -> cos and sin [B, T, half], base, place and first
// [B].
struct Places : FloatOperator {
  static constexpr const char* name = "Places";
  static constexpr Operand inputs[] = {INT64, maybe(BOOL), FLOAT, INT64, INT64};
  static constexpr Operand results[] = {FLOAT, FLOAT, INT64, INT64, INT64};
  using FloatOperator::FloatOperator;
  int64_t offset = from.integer("offset");
  float scale = from.real("scale");

  void compute(Call& call) const {
    Tensor start = call.input(0), active = call.input(1, true), frequencies = call.input(2);
    int64_t tokens = number(call.input(3)), end = number(call.input(4));
    REQUIRE(start.rank() == 1 && (!active.memory || active.shape == start.shape) &&
                frequencies.rank() == 1 && tokens >= 0 && tokens <= INT32_MAX && offset <= MOST,
            name, "start " + start.text() + ", frequencies " + frequencies.text());
    int64_t slots = start.shape[0], half = frequencies.shape[0];
    float* cos = call.output({slots, tokens, half});
    float* sin = call.output({slots, tokens, half}, 1);
    int64_t* base = call.output<int64_t>({slots}, 2);
    int64_t* place = call.output<int64_t>({slots}, 3);
    std::fill_n(call.output<int64_t>({slots}, 4), slots, offset);
    for (int64_t slot = 0; slot < slots; slot++) {
      bool there = !active.memory || active.data<uint8_t>()[slot];
      base[slot] = there ? start.data<int64_t>()[slot] : 0;
      place[slot] = there ? start.data<int64_t>()[slot] : end;
      for (int64_t t = 0; t < tokens; t++)
        for (int64_t i = 0; i < half; i++, cos++, sin++) {
          // An idle slot may have any position, so the sum may wrap around.
          uint64_t at = static_cast<uint64_t>(place[slot]) + static_cast<uint64_t>(offset + t);
          float position = static_cast<float>(static_cast<int64_t>(at));
          mtp::sine_and_cosine(position * frequencies.data<float>()[i], sin, cos);
          *cos *= scale;
          *sin *= scale;
        }
    }
  }

 private:
  static int64_t number(const Tensor& x) {
    REQUIRE(x.count() == 1, name, "no number, but " + x.text());
    return *x.data<int64_t>();
  }
};

const Registered<Take<float>, Take<int64_t>, Join<float>, Join<int64_t>, Split, Places> registered;

}  // namespace
