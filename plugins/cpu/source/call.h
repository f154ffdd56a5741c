// The attributes and calls of operators, which are nodes of their own or steps of a chain.
#pragma once
#include <map>

#include "half.h"
#include "ort.h"

namespace ort {

// The attributes of a node or a step: integers, and the bits of fp32 numbers.
struct Attributes {
  const Info* info = nullptr;
  std::map<std::string, int64_t> own;

  bool find(const char* name, int64_t* value) const {
    if (info) return find(ATTRIBUTE_INT, name, value);
    auto found = own.find(name);
    if (found != own.end()) *value = found->second;
    return found != own.end();
  }
  bool find(const char* name, float* value) const {
    if (info) return find(ATTRIBUTE_FLOAT, name, value);
    int64_t bits;
    if (!find(name, &bits)) return false;
    uint32_t low = static_cast<uint32_t>(bits);
    std::memcpy(value, &low, sizeof low);
    return true;
  }
  int64_t integer(const char* name) const { return needed<int64_t>(name); }
  float real(const char* name) const { return needed<float>(name); }
  bool flag(const char* name) const { return integer(name) != 0; }
  std::string text(const char* name) const {
    size_t size = 0;
    check(call<Status*>(ATTRIBUTE_STRING, info, name, static_cast<char*>(nullptr), &size));
    std::string all(size, 0);
    check(call<Status*>(ATTRIBUTE_STRING, info, name, all.data(), &size));
    return all.c_str();
  }
  template <class T>
  T value_or(const char* name, T otherwise) const {
    T value;
    return find(name, &value) ? value : otherwise;
  }

 private:
  template <class T>
  bool find(Place place, const char* name, T* value) const {
    Status* missing = call<Status*>(place, info, name, value);
    if (missing) call<void>(RELEASE_STATUS, missing);
    return !missing;
  }
  template <class T>
  T needed(const char* name) const {
    T value;
    if (!find(name, &value)) throw OperandError(std::string("attribute ") + name + " is missing");
    return value;
  }
};

template <class T>
constexpr Type TYPE = std::is_same_v<T, float>       ? FLOAT
                      : std::is_same_v<T, mtp::Bf16> ? BFLOAT16
                      : std::is_same_v<T, int8_t>    ? INT8
                      : std::is_same_v<T, int32_t>   ? INT32
                      : std::is_same_v<T, int64_t>   ? INT64
                                                     : ANY;

// The type of an operand or a result, which may be missing if it is optional.
struct Operand {
  Type type;
  bool optional;
  constexpr Operand(Type type, bool optional = false) : type(type), optional(optional) {}
};
constexpr Operand maybe(Type type) { return {type, true}; }

// The operands, results and threads of one call.
class Call {
 public:
  Context* const context;

  explicit Call(Context* context) : context(context) {}
  virtual Tensor input(size_t place, bool optional = false) = 0;
  template <class T = float>
  T* output(const std::vector<int64_t>& shape, size_t place = 0) {
    return static_cast<T*>(result(shape, place, TYPE<T>, sizeof(T)));
  }

 protected:
  ~Call() = default;
  virtual void* result(const std::vector<int64_t>&, size_t place, Type, size_t size) = 0;
};

struct NodeCall final : Call {
  using Call::Call;
  Tensor input(size_t place, bool optional) override {
    return ort::input(context, place, optional);
  }

 private:
  void* result(const std::vector<int64_t>& shape, size_t place, Type, size_t) override {
    return ort::output(context, shape, place);
  }
};

// The base class of operators.
struct Operator {
  virtual ~Operator() = default;
  virtual void compute(Call&) const = 0;
};

}  // namespace ort
