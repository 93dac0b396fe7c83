#include "validate_core.h"

#include <map>
#include <set>
#include <stdexcept>

#include "kernel_list.h"
#include "tile_name.h"

namespace fasttps::npu {
namespace {

class CoreValidator {
 public:
  CoreValidator(const Program& program, const Core& core)
      : program_(program), core_(core), what_("core " + tile_name(core.tile)) {}

  void run() {
    for (const Scratch& scratch : core_.scratch) {
      if (scratch.bytes <= 0)
        wrong("scratch " + scratch.name, "bytes", std::to_string(scratch.bytes));
    }
    check(core_.body);
    check_released({});
  }

 private:
  using Side = std::pair<int, Port>;
  using Held = std::map<Side, int>;

  [[noreturn]] void wrong(const std::string& part, const std::string& wanted,
                          const std::string& got) const {
    throw std::invalid_argument(program_.name + ": " + what_ + ": " + part + " wanted " + wanted +
                                ", got " + got);
  }

  const Fifo& fifo(int i) const {
    if (i < 0 || i >= static_cast<int>(program_.fifos.size())) {
      wrong("a statement", "one of " + std::to_string(program_.fifos.size()) + " FIFOs",
            std::to_string(i));
    }
    return program_.fifos[static_cast<size_t>(i)];
  }

  // Elements at this tile.
  int depth(const Fifo& one, Port port) const {
    if (port == Port::kProduce) {
      if (one.producer.tile == core_.tile) return one.producer.depth;
    } else {
      for (const End& end : one.consumers) {
        if (end.tile == core_.tile) return one.shared ? one.producer.depth : end.depth;
      }
    }
    wrong("fifo " + one.name,
          std::string("one that ") + (port == Port::kProduce ? "begins" : "ends") + " there",
          "another tile's");
  }

  void check(const Body& body) {
    for (const Statement& statement : body) {
      std::visit([&](const auto& what) { check(what); }, statement.what);
    }
  }

  void check(const Acquire& acquire) {
    const Fifo& one = fifo(acquire.fifo);
    const int most = depth(one, acquire.port);
    int& held = held_[{acquire.fifo, acquire.port}];
    held += acquire.count;
    if (acquire.count < 1 || held > most) {
      wrong("acquire of " + one.name, "at most " + std::to_string(most) + " held",
            std::to_string(held));
    }
    for (int i = 0; i < acquire.count; ++i) bytes_[acquire.acquired + i] = one.element_bytes;
  }

  void check(const Release& release) {
    const Fifo& one = fifo(release.fifo);
    depth(one, release.port);
    int& held = held_[{release.fifo, release.port}];
    if (release.count < 1 || release.count > held) {
      wrong("release of " + one.name, "at most the " + std::to_string(held) + " held",
            std::to_string(release.count));
    }
    held -= release.count;
  }

  void check_expression(const Expression& expression) {
    switch (expression.op()) {
      case Expression::Op::kConstant:
        return;
      case Expression::Op::kScalar:
        if (expression.number() >= static_cast<int64_t>(program_.scalars.size())) {
          wrong("a number", "one of " + std::to_string(program_.scalars.size()) + " scalars",
                std::to_string(expression.number()));
        }
        return;
      case Expression::Op::kIndex:
        if (!counts_.contains(static_cast<int>(expression.number()))) {
          wrong("a number", "an index of a loop around it",
                "i" + std::to_string(expression.number()));
        }
        return;
      default:
        check_expression(expression.left());
        check_expression(expression.right());
    }
  }

  // What must be the same whenever a body is run again.
  void check_released(const Held& before) const {
    for (const auto& [side, count] : held_) {
      const auto old = before.find(side);
      const int wanted = old == before.end() ? 0 : old->second;
      if (count != wanted) {
        wrong("fifo " + fifo(side.first).name,
              "as many held at the end of a body as at its beginning, " + std::to_string(wanted),
              std::to_string(count));
      }
    }
  }

  void check(const Loop& loop) {
    check_expression(loop.count);
    if (counts_.contains(loop.index)) {
      wrong("a loop", "an index of its own", "i" + std::to_string(loop.index) + " twice");
    }
    counts_.emplace(loop.index, loop.count);
    const Held before = held_;
    check(loop.body);
    check_released(before);
    counts_.erase(loop.index);
  }

  void check(const If& condition) {
    check_expression(condition.condition);
    const Held before = held_;
    check(condition.body);
    check_released(before);
  }

  void check(const Call& call) {
    const Kernel& called = kernel(call.kernel);
    if (call.arguments.size() != called.arguments.size()) {
      wrong(call.kernel, std::to_string(called.arguments.size()) + " arguments",
            std::to_string(call.arguments.size()));
    }
    bool known = true;
    std::vector<KernelValue> values;
    for (size_t i = 0; i < call.arguments.size(); ++i) {
      const auto* number = std::get_if<Expression>(&call.arguments[i]);
      const std::string name = call.kernel + "'s argument " + std::to_string(i);
      if ((number != nullptr) != (called.arguments[i] == ArgumentKind::kNumber)) {
        wrong(name, called.arguments[i] == ArgumentKind::kNumber ? "a number" : "memory",
              number ? "a number" : "memory");
      }
      KernelValue value{.memory = nullptr};
      if (number) {
        check_expression(*number);
        known = known && (number->is_constant() || bounded(*number));
        value.number = known ? at_ends(*number).second : 0;
      }
      values.push_back(value);
    }
    if (!known) return;
    const std::vector<int64_t> needed = called.memory_bytes(values);
    size_t memory = 0;
    for (size_t i = 0; i < call.arguments.size(); ++i) {
      if (called.arguments[i] != ArgumentKind::kMemory) continue;
      check_room(call.kernel + "'s argument " + std::to_string(i), call.arguments[i],
                 needed[memory++]);
    }
  }

  // Whether only loops whose counts are constants decide it.
  bool bounded(const Expression& expression) const {
    switch (expression.op()) {
      case Expression::Op::kConstant:
        return true;
      case Expression::Op::kScalar:
        return false;
      case Expression::Op::kIndex:
        return counts_.at(static_cast<int>(expression.number())).is_constant();
      default:
        return bounded(expression.left()) && bounded(expression.right());
    }
  }

  // Values at the first and the last turns of all loops: the least and the most, where it only
  // grows with indices, as offsets do.
  std::pair<int64_t, int64_t> at_ends(const Expression& expression) const {
    std::vector<int64_t> first, last;
    for (const auto& [index, count] : counts_) {
      const auto size = static_cast<size_t>(index) + 1;
      if (first.size() < size) first.resize(size), last.resize(size);
      last[size - 1] = count.is_constant() ? count.constant() - 1 : 0;
    }
    return {expression.value({}, first), expression.value({}, last)};
  }

  void check_room(const std::string& name, const KernelArgument& argument, int64_t needed) const {
    const auto* held = std::get_if<npu::Held>(&argument);
    const Expression& offset =
        held ? held->offset_bytes : std::get<OfScratch>(argument).offset_bytes;
    int64_t bytes = 0;
    if (held) {
      const auto found = bytes_.find(held->acquired);
      if (found == bytes_.end()) wrong(name, "an acquired element", std::to_string(held->acquired));
      bytes = found->second;
    } else {
      const auto scratch = std::get<OfScratch>(argument).scratch;
      if (scratch < 0 || scratch >= static_cast<int>(core_.scratch.size())) {
        wrong(name, "one of " + std::to_string(core_.scratch.size()) + " scratches",
              std::to_string(scratch));
      }
      bytes = core_.scratch[static_cast<size_t>(scratch)].bytes;
    }
    if (!bounded(offset)) return;
    const auto [first, last] = at_ends(offset);
    if (first < 0 || last + needed > bytes) {
      wrong(name,
            "room for " + std::to_string(needed) + " bytes from " + std::to_string(last) + " on",
            std::to_string(bytes) + " bytes");
    }
  }

  const Program& program_;
  const Core& core_;
  std::string what_;
  Held held_;
  std::map<int, int64_t> bytes_;      // of acquired elements
  std::map<int, Expression> counts_;  // of the loops around
};

}  // namespace

void validate_core(const Program& program, const Core& core) { CoreValidator(program, core).run(); }

}  // namespace fasttps::npu
