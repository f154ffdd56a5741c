// Registration of the operators in onnxruntime. Operators check their operands,
// divide the work into tasks and call the kernels of the machine's instruction set.
#include <cstdlib>
#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#elif defined(__x86_64__)
#include "processor.h"
#endif

#include "chain.h"
#ifdef __GLIBC__
#include <malloc.h>
#endif

const void* const* ort::api = nullptr;

std::vector<mtp::Kind>& mtp::all_kinds() {
  static std::vector<Kind> kinds;
  return kinds;
}

// Selects the kernels of new sessions: the best instruction set, or the one that MTPBUILD_CPU_ISA
// names.
const Kernels& mtp::chosen_kernels() {
  std::vector<const Kernels*> sets{&mtp::kPlain};
#if defined(__x86_64__)
  const Processor processor;
  if (processor.avx2) sets.push_back(&mtp::kAvx2);
  if (processor.avxvnni) sets.push_back(&mtp::kAvxVnni);
  if (processor.avx512) sets.push_back(&mtp::kAvx512);
#elif defined(__APPLE__) && defined(__aarch64__)
  sets.push_back(&mtp::kNeon);  // all of Apple's ARM processors have the dot product
#elif defined(__aarch64__)
  if (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) sets.push_back(&mtp::kNeon);
#endif
  const char* requested = std::getenv("MTPBUILD_CPU_ISA");
  if (!requested || !*requested) return *sets.back();
  std::string known;
  for (const Kernels* set : sets) {
    if (std::strcmp(set->name, requested) == 0) return *set;
    known += std::string(known.empty() ? "" : ", ") + set->name;
  }
  throw OperandError(std::string("MTPBUILD_CPU_ISA is ") + requested + "; this machine has " +
                     known);
}

namespace {

constexpr char OP_DOMAIN[] = "mtpbuild";  // as in plugins/cpu/onnx.py

// An operator with any number of operands and results of any types.
CustomOp chain() {
  CustomOp op = common<Chain>();
  op.input_type = op.output_type = [](const CustomOp*, size_t) -> int { return ort::ANY; };
  op.input_count = op.output_count = [](const CustomOp*) -> size_t { return 1; };
  op.input_kind = op.output_kind = [](const CustomOp*, size_t) -> int { return ort::VARIADIC; };
  op.variadic_input_least = op.variadic_output_least = [](const CustomOp*) { return 1; };
  op.variadic_input_alike = op.variadic_output_alike = [](const CustomOp*) { return 0; };
  return op;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) ort::Status* RegisterCustomOps(
    ort::SessionOptions* options, const ort::ApiBase* base) {
  ort::api = base->get_api(ort::API);
  if (!ort::api) {
    ort::api = base->get_api(1);
    return ort::failed(std::string("onnxruntime ") + base->version() +
                       ": mtpbuild's CPU kernels need 1.17 or later; upgrade it with pip");
  }
  return guarded([&] {
    static ort::Domain* domain = [] {
#ifdef __GLIBC__  // keeps freed memory: zeros in new pages took a tenth of a prompt's time
      mallopt(M_MMAP_THRESHOLD, 32 << 20);
      mallopt(M_TRIM_THRESHOLD, 64 << 20);
#endif
      ort::Domain* created = nullptr;
      ort::check(ort::call<ort::Status*>(ort::CREATE_DOMAIN, OP_DOMAIN, &created));
      for (const mtp::Kind& kind : mtp::all_kinds())
        ort::check(ort::call<ort::Status*>(ort::DOMAIN_ADD, created, &kind.node));
      static const CustomOp joined = chain();
      ort::check(ort::call<ort::Status*>(ort::DOMAIN_ADD, created, &joined));
      return created;
    }();
    ort::check(ort::call<ort::Status*>(ort::ADD_DOMAIN, options, domain));
  });
}
