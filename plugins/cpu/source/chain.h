// A sequence of operators in one node: saves onnxruntime's cost of starting each node, and
// intermediate values stay inside the node.
//
// `steps` has a line for each operator: "NAME OPERAND .. > RESULT .. ATTRIBUTE=NUMBER ..". Values
// are numbered: first the node's `operands`, then each result in order; "-" is none. `results` are
// the values that the node returns. An fp32 attribute is written as its bits.
#pragma once
#include <sstream>

#include "registry.h"

namespace {

inline const mtp::Kind* kind_of(const std::string& name) {
  for (const mtp::Kind& kind : mtp::all_kinds())
    if (name == kind.name) return &kind;
  return nullptr;
}

struct Chain : ort::Operator {
  static constexpr const char* name = "Chain";

  Chain(const Kernels& k, const Attributes& from) {
    count = operands = from.integer("operands");
    REQUIRE(operands >= 0 && operands <= 1 << 16, name, std::to_string(operands) + " operands");
    std::istringstream lines(from.text("steps")), leaving(from.text("results"));
    for (std::string line; std::getline(lines, line);) steps.push_back(read(k, line));
    for (std::string word; leaving >> word;) {
      int64_t value = number(word, count);
      bool fits = value >= operands && leaves.emplace(value, leaves.size()).second;
      REQUIRE(fits, name, "no result " + word);
    }
    std::vector<size_t> last(count + 1);  // the last step that uses each value
    for (size_t s = 0; s < steps.size(); s++) {
      for (int64_t value : steps[s].results) last[std::max<int64_t>(value, 0)] = s;
      for (int64_t value : steps[s].operands) last[std::max<int64_t>(value, 0)] = s;
    }
    for (int64_t value = operands; value < count; value++)
      steps[last[value]].spent.push_back(value);
  }

  void compute(Call& node) const override {
    std::vector<Value> values(count);
    for (const Step& step : steps) {
      StepCall call(*this, step, node, values);
      ort::named(step.kind->name, [&] { step.op->compute(call); });
      for (int64_t value : step.spent) values[value].memory.reset();
    }
    for (const auto& [value, place] : leaves)
      REQUIRE(values[value].tensor.memory, name, "no step gives result " + std::to_string(place));
  }

 private:
  static constexpr int64_t NONE = -1;
  struct Step {
    const mtp::Kind* kind;
    std::unique_ptr<ort::Operator> op;
    std::vector<int64_t> operands, results, spent;
  };
  struct Value {
    Tensor tensor;
    std::unique_ptr<char[]> memory;
  };
  int64_t operands, count;
  std::vector<Step> steps;
  std::map<int64_t, size_t> leaves;  // value -> index of the node's result

  // Returns the value that a word names, which must be below `end`.
  static int64_t number(const std::string& word, int64_t end) {
    if (word == "-") return NONE;
    bool digits = !word.empty() && word.find_first_not_of("0123456789") == std::string::npos;
    int64_t value = digits && word.size() < 18 ? std::stoll(word) : NONE;
    REQUIRE(value >= 0 && value < end, name, "no value " + word);
    return value;
  }

  Step read(const Kernels& k, const std::string& line) {
    std::istringstream words(line);
    std::string word;
    words >> word;
    Step step{kind_of(word), nullptr, {}, {}, {}};
    REQUIRE(step.kind, name, "no operator " + word);
    while (words >> word && word != ">") step.operands.push_back(number(word, count));
    Attributes from;
    while (words >> word) {
      size_t equal = word.find('=');
      if (equal != std::string::npos) {
        from.own[word.substr(0, equal)] = std::strtoll(word.c_str() + equal + 1, nullptr, 10);
      } else {
        if (word != "-") count++;
        step.results.push_back(number(word, count));
        REQUIRE(word == "-" || step.results.back() == count - 1, name, "values out of order");
      }
    }
    REQUIRE(
        step.operands.size() <= step.kind->operands && step.results.size() <= step.kind->results,
        name, "too many operands or results of " + std::string(step.kind->name));
    step.op = step.kind->make(k, from);
    return step;
  }

  struct StepCall final : Call {
    StepCall(const Chain& chain, const Step& step, Call& node, std::vector<Value>& values)
        : Call(node.context), chain(chain), step(step), node(node), values(values) {}

    Tensor input(size_t place, bool optional) override {
      int64_t number = place < step.operands.size() ? step.operands[place] : NONE;
      REQUIRE(number != NONE || optional, step.kind->name, "an operand is missing");
      if (number == NONE) return {};
      Tensor& tensor = values[number].tensor;
      if (number < chain.operands && !tensor.memory) tensor = node.input(number, optional);
      ort::Type wanted = step.kind->inputs[place].type;
      REQUIRE(!tensor.memory || wanted == ort::ANY || wanted == tensor.type, step.kind->name,
              "an operand is of another type");
      REQUIRE(tensor.memory || optional, step.kind->name, "an operand is missing");
      return tensor;
    }

   private:
    const Chain& chain;
    const Step& step;
    Call& node;
    std::vector<Value>& values;
    std::vector<Value> unread;

    void* result(const std::vector<int64_t>& shape, size_t place, ort::Type type,
                 size_t size) override {
      int64_t number = place < step.results.size() ? step.results[place] : NONE;
      Value& value = number == NONE ? unread.emplace_back() : values[number];
      auto leaving = chain.leaves.find(number);
      if (leaving != chain.leaves.end()) {
        value.tensor.memory = ort::output(context, shape, leaving->second, type);
      } else {
        value.memory = scratch<char>(ort::element_count(shape), static_cast<int64_t>(size));
        value.tensor.memory = value.memory.get();
      }
      value.tensor.shape = shape;
      value.tensor.type = type;
      return const_cast<void*>(value.tensor.memory);
    }
  };
};

}  // namespace
