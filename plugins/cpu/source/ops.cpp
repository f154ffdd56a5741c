// Registration of the operators in onnxruntime, domain `mtpbuild`. Operators check their operands,
// divide the work into tasks and call the kernels of the machine's instruction set.
#include <cstdlib>
#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#elif defined(__x86_64__)
#include "processor.h"
#endif

#include "chain.h"
#include "delta_ops.h"
#include "grouped_ops.h"
#include "latent_ops.h"
#include "mixture_ops.h"
#include "row_ops.h"
#include "sparse_ops.h"
#include "step_ops.h"

const void* const* ort::api = nullptr;

namespace {

// Selects the kernels of new sessions: the best instruction set, or the one that MTPBUILD_CPU_ISA
// names.
const Kernels& chosen() {
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
  const char* asked = std::getenv("MTPBUILD_CPU_ISA");
  if (!asked || !*asked) return *sets.back();
  std::string known;
  for (const Kernels* set : sets) {
    if (std::strcmp(set->name, asked) == 0) return *set;
    known += std::string(known.empty() ? "" : ", ") + set->name;
  }
  throw Bad(std::string("MTPBUILD_CPU_ISA is ") + asked + "; this machine has " + known);
}

// Runs a function and returns exceptions as statuses, since onnxruntime's API is C.
template <class F>
ort::Status* guarded(const F& body) noexcept {
  try {
    body();
    return nullptr;
  } catch (const std::exception& error) {
    return ort::failed(error.what());
  }
}

// The parts of an OrtCustomOp that are the same for all operators.
template <class Op>
ort::CustomOp common() {
  using ort::Context;
  using ort::CustomOp;
  CustomOp op{};
  op.version = ort::OP;
  op.name = [](const CustomOp*) { return Op::name; };
  op.provider = [](const CustomOp*) -> const char* { return nullptr; };
  op.destroy = [](void* kernel) { delete static_cast<Op*>(kernel); };
  op.input_memory = [](const CustomOp*, size_t) { return 0; };
  op.create_v2 = [](const CustomOp*, const void*, const ort::Info* info, void** kernel) {
    return guarded([&] { *kernel = new Op(chosen(), Attributes{info, {}}); });
  };
  op.compute_v2 = [](void* kernel, Context* context) {
    return guarded([&] {
      ort::NodeCall call(context);
      ort::named(Op::name, [&] { static_cast<const Op*>(kernel)->compute(call); });
    });
  };
  return op;
}

template <class Op>
ort::CustomOp declared() {
  using ort::CustomOp;
  CustomOp op = common<Op>();
  op.input_type = [](const CustomOp*, size_t i) -> int { return Op::inputs[i]; };
  op.input_count = [](const CustomOp*) { return std::size(Op::inputs); };
  op.output_type = [](const CustomOp*, size_t i) -> int { return Op::results[i]; };
  op.output_count = [](const CustomOp*) -> size_t { return std::size(Op::results); };
  op.input_kind = [](const CustomOp*, size_t i) -> int { return Op::optional >> i & 1; };
  op.output_kind = [](const CustomOp*, size_t i) -> int { return Op::optional_results >> i & 1; };
  return op;
}

// An operator with any number of operands and results of any types.
ort::CustomOp chain() {
  using ort::CustomOp;
  CustomOp op = common<Chain>();
  op.input_type = op.output_type = [](const CustomOp*, size_t) -> int { return ort::ANY; };
  op.input_count = op.output_count = [](const CustomOp*) -> size_t { return 1; };
  op.input_kind = op.output_kind = [](const CustomOp*, size_t) -> int { return ort::VARIADIC; };
  op.variadic_input_least = op.variadic_output_least = [](const CustomOp*) { return 1; };
  op.variadic_input_alike = op.variadic_output_alike = [](const CustomOp*) { return 0; };
  return op;
}

template <class... Op>
struct List {
  static constexpr Kind kinds[] = {kind<Op>()...};
  static const std::vector<ort::CustomOp>& ops() {
    static const std::vector<ort::CustomOp> all{chain(), declared<Op>()...};
    return all;
  }
};
using All =
    List<Product, GatedProduct, FloatProduct, Experts, Norm, Attention, Circle<true>, Circle<false>,
         GatedFloatProduct, FloatExperts, LatentRows<float>, LatentRows<mtp::Bf16>, LatentAttention,
         Route, Accept, Embedding, LogSoftmax, ArgMax, Take<float>, Take<int64_t>, Join<float>,
         Join<int64_t>, FloatEmbedding, Places, Weigh, GroupedRows<float>, GroupedRows<mtp::Bf16>,
         CausalConv, LastInputs, DeltaRule, DeltaAdvance, IndexKeys, ChooseRows, Gate, Split>;

const Kind* kind_of(const std::string& name) {
  for (const Kind& kind : All::kinds)
    if (name == kind.name) return &kind;
  return nullptr;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) ort::Status* RegisterCustomOps(
    ort::SessionOptions* options, const ort::ApiBase* base) {
  ort::api = base->get_api(ort::API);
  if (!ort::api) {
    ort::api = base->get_api(1);
    return ort::failed(std::string("mtpbuild's kernels need onnxruntime 1.17, this is ") +
                       base->version());
  }
  return guarded([&] {
    static ort::Domain* domain = [] {
      ort::Domain* made = nullptr;
      ort::check(ort::call<ort::Status*>(ort::CREATE_DOMAIN, "mtpbuild", &made));
      for (const ort::CustomOp& op : All::ops())
        ort::check(ort::call<ort::Status*>(ort::DOMAIN_ADD, made, &op));
      return made;
    }();
    ort::check(ort::call<ort::Status*>(ort::ADD_DOMAIN, options, domain));
  });
}
