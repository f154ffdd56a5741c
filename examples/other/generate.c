// Generates tokens by an engine of mtpbuild, with onnxruntime's C API alone:
//
//     cc -O2 generate.c -I ORT/include -L ORT/lib -lonnxruntime -Wl,-rpath,ORT/lib -o generate
//     ./generate ENGINE LIBRARY COUNT TOKEN...
//
// ENGINE is an engine's folder, of target onnxruntime. LIBRARY is the library of its operators,
// runtime/libmtpbuild_cpu.so of an installation (or -, for an engine built with --portable). The
// numbers after COUNT are the prompt's tokens. The steps are those of docs/engine-format.md,
// "Calling the programs", for one request in slot 0.
#include <errno.h>
#include <onnxruntime_c_api.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { RANK = 8, MOST = 2048, PART = 128 };  // caches are bound in parts of 128 rows

static const OrtApi* ort;
static OrtMemoryInfo* memory_info;

static void fail(const char* what, const char* why) {
  fprintf(stderr, "error: %s: %s\n", what, why);
  exit(1);
}
static void check(OrtStatus* status) {
  if (status) fail("onnxruntime", ort->GetErrorMessage(status));
}
static void* zeros(size_t bytes) {
  void* memory = calloc(bytes ? bytes : 1, 1);
  if (!memory) fail("memory", strerror(errno));
  return memory;
}

// ---- the manifest: a program that has a JSON library uses it ------------------------------------

static char* read_text(const char* folder, const char* name) {
  char path[4096];
  snprintf(path, sizeof path, "%s/%s", folder, name);
  FILE* file = fopen(path, "rb");
  if (!file) fail(path, strerror(errno));
  fseek(file, 0, SEEK_END);
  long size = ftell(file);
  rewind(file);
  char* text = zeros(size + 1);
  if (fread(text, 1, size, file) != (size_t)size) fail(path, "it can't be read");
  fclose(file);
  return text;
}
static const char* value_of(const char* manifest, const char* key) {
  char quoted[64];
  snprintf(quoted, sizeof quoted, "\"%s\":", key);
  const char* found = strstr(manifest, quoted);
  if (!found) fail("engine.json has no", key);
  return found + strlen(quoted);
}
static int64_t number_of(const char* manifest, const char* key) {
  return strtoll(value_of(manifest, key), NULL, 10);
}
static bool ends_text(const char* manifest, int64_t token) {
  const char* at = strchr(value_of(manifest, "eos_token_ids"), '[');
  while (*at != ']') {
    char* end;
    if (strtoll(at + 1, &end, 10) == token) return true;
    at = end + strspn(end, " \n\r\t");
  }
  return false;
}

// ---- tensors ------------------------------------------------------------------------------------

typedef struct {
  ONNXTensorElementDataType type;
  int64_t dims[RANK], bound[RANK];  // as allocated, and as bound
  size_t rank, width;               // bytes of a number
  int open;                         // the dimension of rows or of a chunk; -1 if there is none
  bool rows;                        // of a cache
  void* memory;
  OrtValue* value;
} Tensor;

// Binds the first `size` rows or tokens of a buffer, whose earlier dimensions are 1.
static OrtValue* bind(Tensor* tensor, int64_t size) {
  int64_t* now = tensor->open < 0 ? NULL : &tensor->bound[tensor->open];
  if (tensor->value && (!now || *now == size)) return tensor->value;
  if (now) *now = size;
  size_t bytes = tensor->width;
  for (size_t i = 0; i < tensor->rank; i++) bytes *= tensor->bound[i];
  if (tensor->value) ort->ReleaseValue(tensor->value);
  check(ort->CreateTensorWithDataAsOrtValue(memory_info, tensor->memory, bytes, tensor->bound,
                                            tensor->rank, tensor->type, &tensor->value));
  return tensor->value;
}

static size_t width_of(ONNXTensorElementDataType type, const char* name) {
  switch (type) {
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL:
      return 1;
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16:
      return 2;
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32:
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT:
      return 4;
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64:
      return 8;
    default:
      fail("unknown type of", name);
      return 0;
  }
}

static Tensor* allocate(const char* name, OrtTypeInfo* info, int64_t rows, int64_t chunk) {
  Tensor* tensor = zeros(sizeof *tensor);
  const OrtTensorTypeAndShapeInfo* shape;
  check(ort->CastTypeInfoToTensorInfo(info, &shape));
  check(ort->GetTensorElementType(shape, &tensor->type));
  check(ort->GetDimensionsCount(shape, &tensor->rank));
  if (tensor->rank > RANK) fail("too many dimensions", name);
  check(ort->GetDimensions(shape, tensor->dims, tensor->rank));
  tensor->open = -1;
  size_t bytes = tensor->width = width_of(tensor->type, name);
  for (size_t i = 0; i < tensor->rank; i++) {
    if (tensor->dims[i] < 0 && i == 0) {
      tensor->dims[i] = 1;  // of max_batch slots the first
    } else if (tensor->dims[i] < 0) {
      tensor->open = i, tensor->rows = tensor->rank == 4;  // [1, 1, rows, values], or [1, chunk]
      tensor->dims[i] = tensor->rows ? rows : chunk;
    }
    tensor->bound[i] = tensor->dims[i];
    bytes *= tensor->dims[i];
  }
  tensor->memory = zeros(bytes);
  return tensor;
}

// ---- programs -----------------------------------------------------------------------------------

typedef struct {
  OrtSession* session;
  size_t inputs, outputs;
  char* names[MOST];      // of inputs, then of outputs
  Tensor* tensors[MOST];  // likewise
  Tensor* before[MOST];   // of an output that is a state's next value: the state
} Program;

static Tensor* find(const Program* program, const char* name) {
  for (size_t i = 0; program && i < program->inputs + program->outputs; i++)
    if (strcmp(program->names[i], name) == 0) return program->tensors[i];
  return NULL;
}
static Tensor* get(const Program* program, const char* name) {
  Tensor* tensor = find(program, name);
  if (!tensor) fail("a program has no", name);
  return tensor;
}
static int64_t* integers(const Program* program, const char* name) {
  return get(program, name)->memory;
}

// Loads a program. Its states x, which have outputs x.out, are those of the earlier program.
static Program* load(const char* folder, const char* file, OrtEnv* env, OrtSessionOptions* options,
                     const Program* earlier, int64_t rows, int64_t chunk) {
  Program* program = zeros(sizeof *program);
  OrtAllocator* allocator;
  char path[4096], next[80];
  snprintf(path, sizeof path, "%s/%s", folder, file);
  check(ort->CreateSession(env, path, options, &program->session));
  check(ort->GetAllocatorWithDefaultOptions(&allocator));
  check(ort->SessionGetInputCount(program->session, &program->inputs));
  check(ort->SessionGetOutputCount(program->session, &program->outputs));
  size_t inputs = program->inputs, all = inputs + program->outputs;
  if (all > MOST) fail("too many inputs and outputs", path);
  for (size_t i = 0; i < all; i++) {
    bool in = i < inputs;
    size_t place = in ? i : i - inputs;
    OrtTypeInfo* info;
    check((in ? ort->SessionGetInputName : ort->SessionGetOutputName)(
        program->session, place, allocator, &program->names[i]));
    check((in ? ort->SessionGetInputTypeInfo : ort->SessionGetOutputTypeInfo)(program->session,
                                                                              place, &info));
    program->tensors[i] = allocate(program->names[i], info, rows, chunk);
    ort->ReleaseTypeInfo(info);
  }
  for (size_t i = 0; i < inputs; i++) {
    snprintf(next, sizeof next, "%s.out", program->names[i]);
    for (size_t j = inputs; j < all; j++) {
      if (strcmp(program->names[j], next) != 0) continue;
      Tensor* known = find(earlier, program->names[i]);
      if (known) program->tensors[i] = known;
      program->before[j] = program->tensors[i];
      if (program->tensors[i]->rows) program->tensors[j] = program->tensors[i];  // written in place
    }
  }
  return program;
}

// Runs a program over the first rows of the caches. Then each state has its next value.
static void run(const Program* program, int64_t rows, int64_t chunk) {
  size_t inputs = program->inputs, all = inputs + program->outputs;
  OrtValue* values[MOST] = {0};
  for (size_t i = 0; i < all; i++)
    values[i] = bind(program->tensors[i], program->tensors[i]->rows ? rows : chunk);
  const char* const* names = (const char* const*)program->names;
  check(ort->Run(program->session, NULL, names, (const OrtValue* const*)values, inputs,
                 names + inputs, program->outputs, values + inputs));
  for (size_t i = inputs; i < all; i++) {
    Tensor *before = program->before[i], *after = program->tensors[i], swapped = *after;
    if (!before || before == after) continue;
    after->memory = before->memory, after->value = before->value;
    before->memory = swapped.memory, before->value = swapped.value;
  }
}

int main(int argc, char** argv) {
  if (argc < 5) fail("usage", "generate ENGINE LIBRARY COUNT TOKEN...");
  const char *folder = argv[1], *library = argv[2];
  int64_t wanted = strtoll(argv[3], NULL, 10), prompt = argc - 4;
  ort = OrtGetApiBase()->GetApi(ORT_API_VERSION);
  if (!ort) fail("onnxruntime is older than these headers", OrtGetApiBase()->GetVersionString());
  OrtEnv* env;
  OrtSessionOptions* options;
  check(ort->CreateEnv(ORT_LOGGING_LEVEL_FATAL, "generate", &env));
  check(ort->CreateSessionOptions(&options));
  check(ort->CreateCpuMemoryInfo(OrtArenaAllocator, OrtMemTypeDefault, &memory_info));
  if (strcmp(library, "-") != 0) check(ort->RegisterCustomOpsLibrary_V2(options, library));

  char* manifest = read_text(folder, "engine.json");
  int64_t capacity = number_of(manifest, "capacity"), chunk = number_of(manifest, "prefill_chunk");
  int64_t lookahead = number_of(manifest, "lookahead");
  if (prompt + wanted > number_of(manifest, "max_seq_len")) fail("prompt", "too long");
  Program* prefill = load(folder, "prefill.onnx", env, options, NULL, capacity, chunk);
  Program* decode = load(folder, "decode.onnx", env, options, prefill, capacity, chunk);

  // The prompt but for its last token.
  for (int64_t start = 0, size; start < prompt - 1; start += size) {
    size = prompt - 1 - start < chunk ? prompt - 1 - start : chunk;
    for (int64_t i = 0; i < size; i++)
      integers(prefill, "tokens")[i] = strtoll(argv[4 + start + i], NULL, 10);
    for (int64_t i = 0; i < lookahead; i++) {
      int64_t place = start + size + i;
      integers(prefill, "ahead")[i] = place < prompt ? strtoll(argv[4 + place], NULL, 10) : 0;
    }
    *integers(prefill, "start") = start;
    run(prefill, capacity, size);
  }

  // The first step's newest token is the prompt's last one.
  *integers(decode, "lengths") = prompt - 1;
  integers(decode, "window")[0] = strtoll(argv[3 + prompt], NULL, 10);
  *(bool*)get(decode, "active")->memory = true;
  int64_t width = get(decode, "window")->dims[1];
  for (int64_t emitted = 0, steps = 1; emitted < wanted; steps++) {
    int64_t rows = (*integers(decode, "lengths") + width + PART - 1) / PART * PART;
    run(decode, rows < capacity ? rows : capacity, chunk);
    for (int64_t i = 0; i < *integers(decode, "num_tokens"); i++) {
      int64_t token = integers(decode, "tokens")[i];
      printf("%lld\n", (long long)token);
      bool ended = ++emitted == wanted || ends_text(manifest, token);
      if (!ended) continue;
      fprintf(stderr, "%lld tokens in %lld steps\n", (long long)emitted, (long long)steps);
      return 0;
    }
  }
}
