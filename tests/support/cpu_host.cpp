// Runs operators of the CPU's library without onnxruntime: for processors that are not here, and
// under sanitizers. cpu_host.py writes cases and reads results.
//
//     host LIBRARY < cases > results
//
// It is the part of onnxruntime's C ABI that plugins/cpu/source/ort.h declares. An operand's memory
// is as long as its shape says, so that a sanitizer sees what is read behind it.
#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <new>

#include "ort.h"

const void* const* ort::api = nullptr;      // the library has its own
constexpr int64_t ROOM = int64_t{1} << 28;  // bytes of a result, or of what an operator asks for
constexpr int OPTIONAL = 1;                 // the kind of an operand
constexpr unsigned SECONDS = 60;            // for a case: longer is a loop that never ends

// A damaged size must not fill this machine's memory: beyond ROOM there is none.
void* operator new(size_t size) {
  void* memory = size <= size_t{ROOM} ? std::malloc(size ? size : 1) : nullptr;
  if (!memory) throw std::bad_alloc();
  return memory;
}
void* operator new[](size_t size) { return operator new(size); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, size_t) noexcept { std::free(memory); }

struct ort::Status {
  std::string why;
};
struct ort::Shape {
  int type;
  std::vector<int64_t> sizes;
};
struct ort::Value {
  Shape shape;
  std::unique_ptr<char[]> memory;
};
struct ort::Info {
  std::map<std::string, int64_t> integers;
  std::map<std::string, float> floats;
  std::map<std::string, std::string> texts;
};
struct ort::Context {
  std::vector<std::unique_ptr<Value>> inputs, outputs;
  const CustomOp* op;
  std::vector<int> types;  // of results, where the operator leaves them to the graph
};
struct ort::Domain {
  std::map<std::string, const CustomOp*> ops;
};

namespace {

using namespace ort;

Domain domain;

Status* bad(const std::string& why) { return new Status{why}; }

int64_t size_of(int type) {
  if (type == FLOAT16 || type == BFLOAT16) return 2;
  return type == UINT8 || type == INT8 || type == BOOL ? 1 : type == INT64 ? 8 : 4;
}

// The bytes of a tensor; -1 if no tensor has these sizes.
int64_t bytes(const Shape& shape) {
  int64_t all = size_of(shape.type);
  for (int64_t size : shape.sizes)
    if (size < 0 || __builtin_mul_overflow(all, size, &all)) return -1;
  return all;
}

Status* create_status(int, const char* why) { return bad(why); }
const char* message(const Status* status) { return status->why.c_str(); }
Status* create_domain(const char*, Domain** made) {
  *made = &domain;
  return nullptr;
}
Status* domain_add(Domain* to, const CustomOp* op) {
  to->ops[op->name(op)] = op;
  return nullptr;
}
Status* add_domain(SessionOptions*, Domain*) { return nullptr; }
Status* data(Value* value, void** memory) {
  *memory = value->memory.get();
  return nullptr;
}
Status* element_type(const Shape* shape, int* type) {
  *type = shape->type;
  return nullptr;
}
Status* dimension_count(const Shape* shape, size_t* count) {
  *count = shape->sizes.size();
  return nullptr;
}
Status* dimensions(const Shape* shape, int64_t* sizes, size_t count) {
  std::copy_n(shape->sizes.begin(), count, sizes);
  return nullptr;
}
Status* shape_of(const Value* value, Shape** shape) {
  *shape = new Shape(value->shape);
  return nullptr;
}
template <class T>
Status* found(const std::map<std::string, T>& all, const char* name, T* value) {
  auto at = all.find(name);
  if (at == all.end()) return bad(std::string("attribute with name:'") + name + "' is not there");
  *value = at->second;
  return nullptr;
}
Status* text_of(const Info* info, const char* name, char* text, size_t* size) {
  std::string value;
  if (Status* status = found(info->texts, name, &value)) return status;
  if (text) std::memcpy(text, value.c_str(), std::min(*size, value.size() + 1));
  *size = value.size() + 1;
  return nullptr;
}
Status* float_of(const Info* info, const char* name, float* value) {
  return found(info->floats, name, value);
}
Status* integer_of(const Info* info, const char* name, int64_t* value) {
  return found(info->integers, name, value);
}
Status* input_of(const Context* context, size_t place, const Value** value) {
  *value = place < context->inputs.size() ? context->inputs[place].get() : nullptr;
  return nullptr;
}
Status* output_of(Context* context, size_t place, const int64_t* sizes, size_t rank, Value** to) {
  const CustomOp* op = context->op;
  bool any = op->output_kind(op, 0) == VARIADIC;
  *to = nullptr;
  if (place >= (any ? context->types.size() : op->output_count(op))) return nullptr;
  Shape shape{any ? context->types[place] : op->output_type(op, place), {sizes, sizes + rank}};
  int64_t size = bytes(shape);
  if (size < 0 || size > ROOM) return bad("onnxruntime: no memory for a result");
  context->outputs.resize(std::max(context->outputs.size(), place + 1));
  std::unique_ptr<Value> made(new Value{shape, std::unique_ptr<char[]>(new char[size])});
  *to = (context->outputs[place] = std::move(made)).get();
  return nullptr;
}
void release_status(Status* status) { delete status; }
void release_shape(Shape* shape) { delete shape; }
Status* parallel_for(const Context*, void (*task)(void*, size_t), size_t count, size_t,
                     void* data) {
  for (size_t i = 0; i < count; i++) task(data, i);
  return nullptr;
}

const void* const* table(uint32_t) {
  static const void* places[PARALLEL_FOR + 1];
  auto put = [](Place place, auto* function) {
    places[place] = reinterpret_cast<const void*>(function);
  };
  put(CREATE_STATUS, create_status), put(GET_ERROR_MESSAGE, message);
  put(CREATE_DOMAIN, create_domain), put(DOMAIN_ADD, domain_add), put(ADD_DOMAIN, add_domain);
  put(TENSOR_DATA, data), put(ELEMENT_TYPE, element_type);
  put(DIMENSION_COUNT, dimension_count), put(DIMENSIONS, dimensions), put(TENSOR_SHAPE, shape_of);
  put(ATTRIBUTE_FLOAT, float_of), put(ATTRIBUTE_INT, integer_of);
  put(ATTRIBUTE_STRING, text_of);
  put(CONTEXT_INPUT, input_of), put(CONTEXT_OUTPUT, output_of);
  put(RELEASE_STATUS, release_status), put(RELEASE_SHAPE, release_shape);
  put(PARALLEL_FOR, parallel_for);
  return places;
}

// ---- cases and results --------------------------------------------------------------------------

void read_bytes(void* to, size_t size) {
  if (size && std::fread(to, 1, size, stdin) != size) {
    std::fprintf(stderr, "the cases end too early\n");
    std::exit(2);
  }
}
template <class T = int64_t>
T read_one() {
  T value;
  read_bytes(&value, sizeof value);
  return value;
}
std::string read_text() {
  std::string text(read_one(), '\0');
  read_bytes(text.data(), text.size());
  return text;
}
void write_one(int64_t value) { std::fwrite(&value, sizeof value, 1, stdout); }
void write_text(const std::string& text) {
  write_one(static_cast<int64_t>(text.size()));
  std::fwrite(text.data(), 1, text.size(), stdout);
}

std::unique_ptr<Value> read_operand() {
  int64_t type = read_one();
  if (type == ANY) return nullptr;
  Shape shape{static_cast<int>(type), std::vector<int64_t>(read_one())};
  for (int64_t& size : shape.sizes) size = read_one();
  std::unique_ptr<char[]> memory(new char[bytes(shape)]);
  read_bytes(memory.get(), bytes(shape));
  return std::unique_ptr<Value>(new Value{std::move(shape), std::move(memory)});
}

// What onnxruntime checks by itself: an error, or null.
Status* fit(const CustomOp* op, const Context& context) {
  if (op->input_kind(op, 0) == VARIADIC) return nullptr;
  if (context.inputs.size() > op->input_count(op)) return bad("onnxruntime: too many operands");
  for (size_t i = 0; i < op->input_count(op); i++) {
    const Value* value = i < context.inputs.size() ? context.inputs[i].get() : nullptr;
    if (!value && op->input_kind(op, i) != OPTIONAL)
      return bad("onnxruntime: an operand is missing");
    int type = op->input_type(op, i);
    if (value && type != ANY && value->shape.type != type) return bad("onnxruntime: another type");
  }
  return nullptr;
}

Status* compute(const CustomOp* op, const Info& info, Context& context) {
  if (Status* status = fit(op, context)) return status;
  void* kernel = nullptr;
  if (Status* status = op->create_v2(op, table(API), &info, &kernel)) return status;
  Status* status = op->compute_v2(kernel, &context);
  op->destroy(kernel);
  return status;
}

void run_case(const std::string& name) {
  Info info;
  for (int64_t count = read_one(); count > 0; count--) {
    std::string attribute = read_text();
    int64_t kind = read_one();
    if (kind == 0) info.integers[attribute] = read_one();
    if (kind == 1) info.floats[attribute] = read_one<float>();
    if (kind == 2) info.texts[attribute] = read_text();
  }
  Context context{};
  for (int64_t count = read_one(); count > 0; count--) context.inputs.push_back(read_operand());
  for (int64_t count = read_one(); count > 0; count--)
    context.types.push_back(static_cast<int>(read_one()));
  auto at = domain.ops.find(name);
  context.op = at == domain.ops.end() ? nullptr : at->second;
  alarm(SECONDS);
  Status* status = context.op ? compute(context.op, info, context) : bad("no operator " + name);
  alarm(0);
  write_one(status ? -1 : static_cast<int64_t>(context.outputs.size()));
  if (status) {
    write_text(status->why);
    delete status;
    return;
  }
  for (const auto& value : context.outputs) {
    write_one(value ? value->shape.type : int{ANY});
    if (!value) continue;
    write_one(static_cast<int64_t>(value->shape.sizes.size()));
    for (int64_t size : value->shape.sizes) write_one(size);
    std::fwrite(value->memory.get(), 1, bytes(value->shape), stdout);
  }
}

}  // namespace

int main(int, char** arguments) {
  void* library = dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    std::fprintf(stderr, "%s\n", dlerror());
    return 2;
  }
  auto add = reinterpret_cast<Status* (*)(SessionOptions*, const ApiBase*)>(
      dlsym(library, "RegisterCustomOps"));
  const ApiBase base{table, [] { return "none"; }};
  if (Status* status = add(nullptr, &base)) {
    std::fprintf(stderr, "%s\n", status->why.c_str());
    return 2;
  }
  for (int64_t number = 0;; number++) {
    std::string name = read_text();
    if (name.empty()) return std::fflush(stdout);
    std::fprintf(stderr, "case %lld\n", static_cast<long long>(number));
    run_case(name);
  }
}
