// Registration of operators: an object Registered<Norm, Gate> adds these to the library, for nodes
// of their own and for steps of chains.
#pragma once
#include "op.h"

namespace mtp {

// An operator as chains know it, and its declaration for onnxruntime.
struct Kind {
  const char* name;
  const ort::Operand* inputs;
  size_t operands, results;
  std::unique_ptr<ort::Operator> (*make)(const Kernels&, const ort::Attributes&);
  ort::CustomOp node;
};

std::vector<Kind>& all_kinds();
const Kernels& chosen_kernels();  // of new sessions

}  // namespace mtp

namespace {

// Runs a function and returns exceptions as statuses, since onnxruntime's API is C.
template <class F>
ort::Status* guarded(const F& body) noexcept {
  try {
    body();
    return nullptr;
  } catch (const std::bad_alloc&) {
    return ort::failed("out of memory");
  } catch (const std::exception& error) {
    return ort::failed(error.what());
  }
}

// The parts of an OrtCustomOp that are the same for all operators.
template <class Op>
CustomOp common() {
  CustomOp op{};
  op.version = ort::OP;
  op.name = [](const CustomOp*) { return Op::name; };
  op.provider = [](const CustomOp*) -> const char* { return nullptr; };
  op.destroy = [](void* kernel) { delete static_cast<Op*>(kernel); };
  op.input_memory = [](const CustomOp*, size_t) { return 0; };
  op.create_v2 = [](const CustomOp*, const void*, const ort::Info* info, void** kernel) {
    return guarded([&] { *kernel = new Op(mtp::chosen_kernels(), Attributes{info, {}}); });
  };
  op.compute_v2 = [](void* kernel, ort::Context* context) {
    return guarded([&] {
      ort::NodeCall call(context);
      ort::named(Op::name, [&] { static_cast<const Op*>(kernel)->compute(call); });
    });
  };
  return op;
}

template <class Op>
CustomOp declared() {
  CustomOp op = common<Op>();
  op.input_type = [](const CustomOp*, size_t i) -> int { return Op::inputs[i].type; };
  op.input_count = [](const CustomOp*) { return std::size(Op::inputs); };
  op.output_type = [](const CustomOp*, size_t i) -> int { return Op::results[i].type; };
  op.output_count = [](const CustomOp*) { return std::size(Op::results); };
  op.input_kind = [](const CustomOp*, size_t i) -> int { return Op::inputs[i].optional; };
  op.output_kind = [](const CustomOp*, size_t i) -> int { return Op::results[i].optional; };
  return op;
}

template <class... Op>
struct Registered {
  Registered() {
    (mtp::all_kinds().push_back(
         {Op::name, Op::inputs, std::size(Op::inputs), std::size(Op::results),
          [](const Kernels& k, const Attributes& from) -> std::unique_ptr<ort::Operator> {
            return std::make_unique<Op>(k, from);
          },
          declared<Op>()}),
     ...);
  }
};

}  // namespace
