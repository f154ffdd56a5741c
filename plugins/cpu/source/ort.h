// The part of onnxruntime's C ABI that operators need, declared by hand, so that compiling needs
// none of its headers. OrtApi is a table of functions that only grows, so an index in it is fixed
// from the release that added it. OrtCustomOp grows in the same way; `version` is its size.
#pragma once
#include <atomic>
#include <cstdint>
#include <cstring>
#include <exception>
#include <string>
#include <thread>
#include <vector>

#include "sizes.h"

namespace ort {

constexpr uint32_t API = 17;  // the release that added KernelContext_ParallelFor
constexpr uint32_t OP = 16;   // the version of OrtCustomOp that ends with KernelComputeV2

// Opaque types of onnxruntime.
struct Status;
struct Value;
struct Shape;
struct Domain;
struct SessionOptions;
struct Info;
struct Context;

struct ApiBase {
  const void* const* (*get_api)(uint32_t version);
  const char* (*version)();
};

struct CustomOp {
  uint32_t version;
  void* (*create)(const CustomOp*, const void* api, const Info*);
  const char* (*name)(const CustomOp*);
  const char* (*provider)(const CustomOp*);
  int (*input_type)(const CustomOp*, size_t);
  size_t (*input_count)(const CustomOp*);
  int (*output_type)(const CustomOp*, size_t);
  size_t (*output_count)(const CustomOp*);
  void (*compute)(void*, Context*);
  void (*destroy)(void*);
  int (*input_kind)(const CustomOp*, size_t);
  int (*output_kind)(const CustomOp*, size_t);
  int (*input_memory)(const CustomOp*, size_t);
  int (*variadic_input_least)(const CustomOp*);
  int (*variadic_input_alike)(const CustomOp*);
  int (*variadic_output_least)(const CustomOp*);
  int (*variadic_output_alike)(const CustomOp*);
  Status* (*create_v2)(const CustomOp*, const void* api, const Info*, void** kernel);
  Status* (*compute_v2)(void*, Context*);
};

using Type = int;
constexpr Type ANY = 0, FLOAT = 1, UINT8 = 2, INT8 = 3, INT32 = 6, INT64 = 7, BOOL = 9,
               FLOAT16 = 10, BFLOAT16 = 16;
constexpr int VARIADIC = 2;  // the kind of an operand; 0 is required, 1 optional

// Indices in OrtApi.
using Place = int;
constexpr Place CREATE_STATUS = 0, GET_ERROR_MESSAGE = 2, CREATE_DOMAIN = 26, DOMAIN_ADD = 27,
                ADD_DOMAIN = 28, TENSOR_DATA = 51, ELEMENT_TYPE = 60, DIMENSION_COUNT = 61,
                DIMENSIONS = 62, TENSOR_SHAPE = 65, ATTRIBUTE_FLOAT = 85, ATTRIBUTE_INT = 86,
                ATTRIBUTE_STRING = 87, CONTEXT_INPUT = 90, CONTEXT_OUTPUT = 91, RELEASE_STATUS = 93,
                RELEASE_SHAPE = 99, PARALLEL_FOR = 274;

extern const void* const* api;

template <class R, class... A>
R call(Place place, A... arguments) {
  return reinterpret_cast<R (*)(A...)>(const_cast<void*>(api[place]))(arguments...);
}

inline Status* failed(const std::string& why) {
  constexpr int invalid_argument = 2;
  return call<Status*>(CREATE_STATUS, invalid_argument, why.c_str());
}

inline void check(Status* status) {
  if (!status) return;
  std::string why = call<const char*>(GET_ERROR_MESSAGE, static_cast<const Status*>(status));
  call<void>(RELEASE_STATUS, status);
  throw OperandError(why);
}

// An input: its shape and its memory, whose length onnxruntime has checked. Its type is the
// declared one, if the operator declares one. A missing optional input has no memory.
struct Tensor {
  std::vector<int64_t> shape;
  const void* memory = nullptr;
  int type = ANY;

  template <class T>
  const T* data() const {
    return static_cast<const T*>(memory);
  }
  size_t rank() const { return shape.size(); }
  int64_t last() const { return shape.empty() ? 1 : shape.back(); }
  int64_t rows() const { return count(0, rank() - 1); }
  int64_t count() const { return count(0, rank()); }
  bool is(const std::vector<int64_t>& sizes) const { return shape == sizes; }
  std::vector<int64_t> with_last(int64_t size) const {
    std::vector<int64_t> sizes = shape;
    return sizes.back() = size, sizes;
  }
  // Returns the product of sizes first .. end - 1, which `check_sizes` has bounded.
  int64_t count(size_t first, size_t end) const {
    int64_t all = 1;
    for (size_t i = first; i < end; i++) all *= shape[i];
    return all;
  }
  std::string text() const {
    std::string all = "[";
    for (int64_t size : shape) all += (all.size() > 1 ? ", " : "") + std::to_string(size);
    return all + "]";
  }
};

inline Tensor tensor_of(const Value* value) {
  Shape* shape = nullptr;
  check(call<Status*>(TENSOR_SHAPE, value, &shape));
  Tensor tensor;
  size_t rank = 0;
  Status* status = call<Status*>(DIMENSION_COUNT, static_cast<const Shape*>(shape), &rank);
  if (!status) {
    tensor.shape.resize(rank);
    status = call<Status*>(DIMENSIONS, static_cast<const Shape*>(shape), tensor.shape.data(), rank);
  }
  if (!status) status = call<Status*>(ELEMENT_TYPE, static_cast<const Shape*>(shape), &tensor.type);
  call<void>(RELEASE_SHAPE, shape);
  check(status);
  check_sizes(tensor.shape);
  void* memory = nullptr;
  check(call<Status*>(TENSOR_DATA, const_cast<Value*>(value), &memory));
  static const char nothing = 0;
  tensor.memory = memory ? memory : &nothing;  // an empty tensor may have none
  return tensor;
}

inline Tensor input(Context* context, size_t place, bool optional = false) {
  const Value* value = nullptr;
  check(call<Status*>(CONTEXT_INPUT, static_cast<const Context*>(context), place, &value));
  if (!value && !optional) throw OperandError("an operand is missing");
  return value ? tensor_of(value) : Tensor{};
}

// Returns the memory of a result; `type`, if given, must be the type that the graph declares.
inline void* output(Context* context, const std::vector<int64_t>& shape, size_t place,
                    int type = ANY) {
  check_sizes(shape);
  Value* value = nullptr;
  check(call<Status*>(CONTEXT_OUTPUT, context, place, shape.data(), shape.size(), &value));
  if (!value) throw OperandError("a result is missing");
  if (type != ANY && tensor_of(value).type != type)
    throw OperandError("a result is of another type");
  void* memory = nullptr;
  check(call<Status*>(TENSOR_DATA, value, &memory));
  return memory;
}

// The most threads that have worked at once so far; onnxruntime does not tell how many it has.
inline std::atomic<int64_t> most_threads{1};

// Runs tasks 0 .. count - 1 on the session's threads. Threads take tasks from a counter, so that
// a slow core does fewer. The first exception of a task is thrown here, after all threads have
// ended.
template <class F>
void parallel(Context* context, int64_t count, const F& task) {
  struct Work {
    const F& task;
    int64_t count;
    std::atomic<int64_t> next{0}, threads{0};
    std::atomic<bool> failed{false};
    std::exception_ptr error{};
  } work{task, count};
  auto run = [](void* given, size_t) {
    Work& work = *static_cast<Work*>(given);
    int64_t now = ++work.threads, most = most_threads;
    while (now > most && !most_threads.compare_exchange_weak(most, now)) continue;
    try {
      for (int64_t i; (i = work.next.fetch_add(1)) < work.count;) work.task(i);
    } catch (...) {
      if (!work.failed.exchange(true)) work.error = std::current_exception();
    }
    work.threads--;
  };
  static const size_t most = std::max(1u, std::thread::hardware_concurrency());
  size_t workers = std::min<size_t>(most, static_cast<size_t>(count));
  if (workers <= 1) {
    run(&work, 0);
  } else {
    void (*function)(void*, size_t) = run;
    check(call<Status*>(PARALLEL_FOR, static_cast<const Context*>(context), function, workers,
                        workers, static_cast<void*>(&work)));
  }
  if (work.error) std::rethrow_exception(work.error);
}

}  // namespace ort
