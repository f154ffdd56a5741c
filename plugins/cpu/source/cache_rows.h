// Rotation and writing of cache rows, for latent and grouped attention.
#pragma once
#include <cmath>
#include <initializer_list>

#include "op.h"

namespace {

// Rotates the pairs of x [2 * half]; interleaved: pairs are adjacent, else `half` apart.
inline void rotate(const float* x, const float* cos, const float* sin, int64_t half,
                   bool interleaved, float* y) {
  int64_t step = interleaved ? 2 : 1, apart = interleaved ? 1 : half;
  for (int64_t i = 0; i < half; i++) {
    float a = x[i * step], b = x[i * step + apart];
    y[i * step] = a * cos[i] - b * sin[i];
    y[i * step + apart] = b * cos[i] + a * sin[i];
  }
}

// cos and sin [B, T, half]
struct Angles {
  Tensor cos, sin;
  int64_t half;

  Angles(const char* op, const Tensor& c, const Tensor& s, int64_t slots, int64_t tokens)
      : cos(c), sin(s), half(c.last()) {
    std::vector<int64_t> shape{slots, tokens, half};
    REQUIRE(c.shape == shape && s.shape == shape, op,
            "angles " + c.text() + ", " + s.text() + " of " + std::to_string(tokens) + " tokens");
  }
  void rotate_row(int64_t row, const float* x, bool interleaved, float* y) const {
    rotate(x, cos.data<float>() + row * half, sin.data<float>() + row * half, half, interleaved, y);
  }
};

// The sections of an int8 row: all values, then a scale in fp16 for each block of at most 32
// numbers. No block has numbers of two sections.
struct Sections {
  static constexpr int8_t NO_VALUE = -128;
  std::vector<mtp::RowBlock> blocks;
  int64_t bytes = 0;

  Sections(std::initializer_list<int64_t> sizes, int64_t times) {
    int64_t at = 0;
    for (int64_t i = 0; i < times; i++)
      for (int64_t size : sizes)
        for (int64_t end = at + size; at < end; at += blocks.back().count)
          blocks.push_back({at, min(BLOCK, end - at), 0});
    bytes = at + 2 * static_cast<int64_t>(blocks.size());
    for (auto& block : blocks) block.scale = at, at += 2;
  }
  int64_t numbers() const { return bytes - 2 * static_cast<int64_t>(blocks.size()); }
  // Rounds a row: a block's largest number becomes 127. If a number is not finite, or a scale does
  // not fit fp16, all scales are NaN and all values NO_VALUE.
  void round(const float* x, int8_t* y) const {
    bool finite = true;
    for (const mtp::RowBlock& block : blocks) {
      const float* own = x + block.values;
      float top = 0.0f;
      for (int64_t i = 0; i < block.count; i++) {
        top = std::max(top, std::fabs(own[i]));
        finite &= std::fabs(own[i]) < INFINITY;
      }
      uint16_t bits = mtp::to_half(top / 127.0f);
      float scale = mtp::half(bits), inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
      finite &= scale == scale;
      std::memcpy(y + block.scale, &bits, 2);
      for (int64_t i = 0; i < block.count && finite; i++)
        y[block.values + i] =
            static_cast<int8_t>(std::lrint(std::max(-127.0f, min(127.0f, own[i] * inverse))));
    }
    if (finite) return;
    std::memset(y, NO_VALUE, numbers());
    const uint16_t nan = mtp::to_half(NAN);
    for (const mtp::RowBlock& block : blocks) std::memcpy(y + block.scale, &nan, 2);
  }
};

// The rows that attention reads: a cache [B, 1, S, R] in fp32 or bfloat16, or in int8 with another
// width, and fresh rows [B, 1, F, R], whose positions follow those of a slot's rows in the cache.
struct Rows {
  Tensor cache, fresh;
  int64_t stride, old, count;  // numbers in a row; a slot's rows in the cache; its fresh rows
  bool halves, integers;       // the cache is bfloat16, or int8

  Rows(const char* op, const Tensor& cache, const Tensor& fresh, int64_t slots)
      : cache(cache),
        fresh(fresh),
        halves(cache.type == ort::BFLOAT16),
        integers(cache.type == ort::INT8) {
    REQUIRE(cache.rank() == 4 && fresh.rank() == 4, op, "rows have 4 axes, not " + cache.text());
    stride = fresh.shape[3], old = cache.shape[2], count = fresh.shape[2];
    REQUIRE(cache.is({slots, 1, old, integers ? cache.shape[3] : stride}) &&
                fresh.is({slots, 1, count, stride}),
            op,
            "rows " + cache.text() + " and " + fresh.text() + " of " + std::to_string(slots) +
                " slots");
    REQUIRE(old <= INT32_MAX && count <= INT32_MAX, op, "too many rows");
    REQUIRE(halves || integers || cache.type == FLOAT, op, "a cache of another type");
  }
  // Clamps a slot's number of rows in the cache, since an idle slot may have any.
  int64_t clamped(int64_t base) const { return std::max<int64_t>(0, min(base, old)); }
  // Returns `size` numbers of the row at a position, from number `first` on. Positions from `base`
  // on are fresh rows. bfloat16 becomes fp32 in `memory`.
  const float* at(int64_t slot, int64_t base, int64_t position, int64_t first, int64_t size,
                  float* memory) const {
    if (position >= base)
      return fresh.data<float>() + (slot * count + position - base) * stride + first;
    int64_t place = (slot * old + position) * stride + first;
    if (!halves) return cache.data<float>() + place;
    for (int64_t i = 0; i < size; i++) memory[i] = mtp::wide(cache.data<mtp::Bf16>()[place + i]);
    return memory;
  }
};

// Compressed rows in a cache [B, 1, S, C] in fp32 or bfloat16. A row of `ratio` tokens lies in the
// places of the last `group` of them, whose numbers are adjacent.
struct CompressedCache {
  struct Kind {
    int64_t ratio, group;
  };
  Tensor cache;
  int64_t count, stride, begin;  // of a slot: rows, numbers from one to the next, before the first
  bool halves;

  CompressedCache(const char* op, const Tensor& cache, Kind kind, int64_t slots, int64_t width)
      : cache(cache), halves(cache.type == ort::BFLOAT16) {
    REQUIRE(cache.rank() == 4 && cache.is({slots, 1, cache.shape[2], cache.shape[3]}) &&
                (halves || cache.type == FLOAT),
            op, "compressed rows " + cache.text() + " of " + std::to_string(slots) + " slots");
    REQUIRE(kind.group > 0 && kind.group <= kind.ratio && width > 0 &&
                width <= product(kind.group, cache.shape[3]),
            op,
            "compressed rows of " + std::to_string(width) + " numbers, each for " +
                std::to_string(kind.ratio) + " tokens, in " + cache.text());
    count = cache.shape[2] / kind.ratio;
    stride = product(kind.ratio, cache.shape[3]);
    begin = (kind.ratio - kind.group) * cache.shape[3];
  }
  // Returns `size` numbers of a row, from number `first` on. bfloat16 becomes fp32 in `memory`.
  const float* at(int64_t slot, int64_t row, int64_t first, int64_t size, float* memory) const {
    int64_t place = slot * cache.count(2, 4) + row * stride + begin + first;
    if (!halves) return cache.data<float>() + place;
    for (int64_t i = 0; i < size; i++) memory[i] = mtp::wide(cache.data<mtp::Bf16>()[place + i]);
    return memory;
  }
};

// The sizes of fresh rows [slots, 1, tokens, width].
struct Fresh {
  int64_t slots, tokens, width;
};

// Writes result 2: a cache [slots, 1, S, width] with the fresh rows from start [slots] on. It is
// updated in place if input and output are bound to the same memory. With a bfloat16 cache the
// fresh rows are rounded, too, so that a step reads the same values as later steps; attention over
// an int8 cache rounds fresh rows itself, by the same sections. ring: after its last row the cache
// begins anew, and a slot whose start is negative writes nothing.
template <class C>
void write_rows(const char* op, Call& call, const Tensor& cache, const Tensor& start, float* fresh,
                const Fresh& size, const Sections& sections, bool ring = false) {
  int64_t width = std::is_same_v<C, int8_t> ? sections.bytes : size.width;
  REQUIRE(cache.rank() == 4 && cache.shape[0] == size.slots && cache.shape[1] == 1 &&
              cache.shape[3] == width && start.is({size.slots}),
          op, "rows of " + std::to_string(size.width) + " numbers into " + cache.text());
  C* updated = call.output<C>(cache.shape, 2);
  if (updated != cache.memory) std::memcpy(updated, cache.memory, cache.count(0, 4) * sizeof(C));
  for (int64_t slot = 0; slot < size.slots; slot++) {
    int64_t at = start.data<int64_t>()[slot], rows = cache.shape[2];
    REQUIRE(size.tokens <= rows && (ring || (at >= 0 && at <= rows - size.tokens)), op,
            std::to_string(size.tokens) + " rows from " + std::to_string(at) +
                " on in a cache of " + std::to_string(rows));
    for (int64_t t = 0; t < size.tokens; t++) {
      float* own = fresh + (slot * size.tokens + t) * size.width;
      C* to = updated + (slot * rows + std::max<int64_t>(0, at + t) % rows) * width;
      if constexpr (std::is_same_v<C, int8_t>) {
        if (at >= 0) sections.round(own, to);
      } else if constexpr (std::is_same_v<C, float>) {
        if (at >= 0) std::copy_n(own, width, to);
      } else {
        for (int64_t i = 0; i < width; i++) {
          mtp::Bf16 rounded = mtp::narrow(own[i]);
          own[i] = mtp::wide(rounded);
          if (at >= 0) to[i] = rounded;
        }
      }
    }
  }
}

// Returns the name of an operator whose caches have this type.
template <class C>
constexpr const char* name_of(const char* floats, const char* halves, const char* integers) {
  return std::is_same_v<C, float> ? floats : std::is_same_v<C, int8_t> ? integers : halves;
}

}  // namespace
