#include <algorithm>
#include <deque>
#include <map>
#include <utility>

#include "kernel_list.h"
#include "validate_checks.h"

namespace fasttps::npu::checks {
namespace {

bool has_scalar(const Expression& e) {
  switch (e.op()) {
    case Expression::Op::kConstant:
    case Expression::Op::kIndex:
      return false;
    case Expression::Op::kScalar:
      return true;
    default:
      return has_scalar(e.left()) || has_scalar(e.right());
  }
}

// Walks through a core's body once. Every pass of a loop, and every condition, must leave held what
// it found held: then what is held at a statement does not depend on numbers of a call.
class BodyCheck {
 public:
  BodyCheck(const Context& context, const Core& core)
      : context_(context), core_(core), where_("core " + tile_name(core.tile)) {}

  void run() {
    context_.need(core_.stack_bytes >= 0, where_, "a stack of 0 bytes or more", core_.stack_bytes);
    for (const Scratch& scratch : core_.scratch) {
      context_.need(scratch.bytes > 0, where_ + ", scratch " + scratch.name, "1 byte or more",
                    scratch.bytes);
    }
    check(core_.body);
    for (const auto& [side, held] : held_) {
      context_.need(held.empty(), where_,
                    "to release all of " + fifo(side.first).name + " by the end of its body",
                    std::to_string(held.size()) + " held");
    }
  }

 private:
  using Side = std::pair<int, Port>;
  using HeldElements = std::map<Side, std::deque<int>>;  // their numbers, oldest first

  const Fifo& fifo(int f) const { return context_.program.fifos[static_cast<size_t>(f)]; }

  void need_at_most(const std::string& where, const std::string& what, int64_t most,
                    int64_t got) const {
    context_.need(got <= most, where, "at most " + std::to_string(most) + " " + what, got);
  }

  void check(const Body& body) {
    for (const Statement& statement : body)
      std::visit([this](const auto& what) { check(what); }, statement.what);
  }

  // The depth of the FIFO's end at this core.
  int64_t depth_here(int f, Port port, const std::string& verb) const {
    context_.need_index(f, context_.program.fifos.size(), where_ + " " + verb, "a fifo");
    const bool produce = port == Port::kProduce;
    const End* here = nullptr;
    if (produce && fifo(f).producer.tile == core_.tile) here = &fifo(f).producer;
    for (const End& end : fifo(f).consumers)
      if (!produce && end.tile == core_.tile) here = &end;
    context_.need(here != nullptr, where_ + " " + verb + " of " + fifo(f).name,
                  std::string("a fifo that ") + (produce ? "begins" : "ends") + " here",
                  "one of other tiles");
    return here->depth;
  }

  void check(const Acquire& what) {
    const int64_t depth = depth_here(what.fifo, what.port, "acquires");
    const std::string where = where_ + " acquires of " + fifo(what.fifo).name;
    context_.need(what.count >= 1, where, "1 element or more", what.count);
    std::deque<int>& held = held_[{what.fifo, what.port}];
    need_at_most(where, "elements held", depth, static_cast<int64_t>(held.size()) + what.count);
    for (int i = 0; i < what.count; ++i) {
      const int number = what.acquired + i;
      context_.need(number >= 0 && !fifo_of_number_.contains(number), where,
                    "a number that names no held element", number);
      fifo_of_number_[number] = what.fifo;
      held.push_back(number);
    }
  }

  void check(const Release& what) {
    depth_here(what.fifo, what.port, "releases");
    const std::string where = where_ + " releases of " + fifo(what.fifo).name;
    std::deque<int>& held = held_[{what.fifo, what.port}];
    context_.need(what.count >= 1, where, "1 element or more", what.count);
    need_at_most(where, "elements, as many as are held", static_cast<int64_t>(held.size()),
                 what.count);
    for (int i = 0; i < what.count; ++i) {
      fifo_of_number_.erase(held.front());
      held.pop_front();
    }
  }

  void check(const Loop& loop) {
    const std::string where = where_ + ", loop i" + std::to_string(loop.index);
    context_.need(loop.index >= 0 && !indices_.contains(loop.index), where, "an index of its own",
                  loop.index);
    context_.need_known(loop.count, indices_, where + ", count");
    context_.need(!loop.count.is_constant() || loop.count.constant() >= 0, where,
                  "a count of 0 or more", loop.count.text(context_.program.scalars));
    indices_.insert(loop.index);
    // Where the count is a call's, only the first pass is sure.
    last_of_index_[loop.index] = loop.count.is_constant() ? loop.count.constant() - 1 : 0;
    check_balanced(loop.body, where, "a pass");
    indices_.erase(loop.index);
    last_of_index_.erase(loop.index);
  }

  void check(const If& condition) {
    const std::string where = where_ + ", if";
    context_.need_known(condition.condition, indices_, where);
    conditions_.push_back(condition.condition);
    check_balanced(condition.body, where, "its body");
    conditions_.pop_back();
  }

  void check_balanced(const Body& body, const std::string& where, const std::string& what) {
    const HeldElements before = held_;
    check(body);
    for (const auto& [side, held] : held_) {
      const auto old = before.find(side);
      const size_t had = old == before.end() ? 0 : old->second.size();
      context_.need(held.size() == had, where,
                    what + " that leaves " + std::to_string(had) + " elements of " +
                        fifo(side.first).name + " held",
                    static_cast<int64_t>(held.size()));
      context_.need(had == 0 || held == old->second, where,
                    what + " that leaves the same elements of " + fifo(side.first).name + " held",
                    "others");
    }
  }

  void check(const Call& call) {
    const std::string where = where_ + " calls " + call.kernel;
    const Kernel& kernel = npu::kernel(call.kernel);
    context_.need(call.arguments.size() == kernel.arguments.size(), where,
                  std::to_string(kernel.arguments.size()) + " arguments",
                  static_cast<int64_t>(call.arguments.size()));
    for (size_t i = 0; i < call.arguments.size(); ++i) {
      const std::string at = where + ", argument " + std::to_string(i);
      const bool number = std::holds_alternative<Expression>(call.arguments[i]);
      context_.need(number == (kernel.arguments[i] == ArgumentKind::kNumber), at,
                    number ? "memory" : "a number", number ? "a number" : "memory");
      check_argument(call.arguments[i], at);
    }
    if (calls_scalars(call)) return;
    check_bytes(call, kernel, where, false);
    check_bytes(call, kernel, where, true);
  }

  void check_argument(const KernelArgument& argument, const std::string& where) const {
    if (const auto* held = std::get_if<Held>(&argument)) {
      context_.need(fifo_of_number_.contains(held->acquired), where, "an element that is held",
                    held->acquired);
      context_.need_known(held->offset_bytes, indices_, where);
    } else if (const auto* scratch = std::get_if<OfScratch>(&argument)) {
      context_.need_index(scratch->scratch, core_.scratch.size(), where, "a scratch");
      context_.need_known(scratch->offset_bytes, indices_, where);
    } else {
      context_.need_known(std::get<Expression>(argument), indices_, where);
    }
  }

  // The number of an argument, or where in memory it begins.
  static const Expression& number_of(const KernelArgument& argument) {
    if (const auto* held = std::get_if<Held>(&argument)) return held->offset_bytes;
    if (const auto* scratch = std::get_if<OfScratch>(&argument)) return scratch->offset_bytes;
    return std::get<Expression>(argument);
  }

  bool calls_scalars(const Call& call) const {
    return std::any_of(call.arguments.begin(), call.arguments.end(),
                       [](const KernelArgument& one) { return has_scalar(number_of(one)); }) ||
           std::any_of(conditions_.begin(), conditions_.end(), has_scalar);
  }

  // What the kernel reads and writes is there, in the first pass of the loops around it or in the
  // last: offsets that grow with an index are largest there.
  void check_bytes(const Call& call, const Kernel& kernel, const std::string& where,
                   bool last) const {
    std::vector<int64_t> indices;
    for (const auto& [index, most] : last_of_index_) {
      if (most < 0) return;
      indices.resize(std::max(indices.size(), static_cast<size_t>(index) + 1));
      indices[static_cast<size_t>(index)] = last ? most : 0;
    }
    for (const Expression& condition : conditions_)
      if (condition.value({}, indices) == 0) return;
    std::vector<KernelValue> values(call.arguments.size());
    for (size_t i = 0; i < values.size(); ++i) {
      values[i].memory = nullptr;
      if (kernel.arguments[i] == ArgumentKind::kNumber)
        values[i].number = number_of(call.arguments[i]).value({}, indices);
    }
    const std::vector<int64_t> wanted = kernel.memory_bytes(values);
    size_t memory = 0;
    for (size_t i = 0; i < values.size() && memory < wanted.size(); ++i) {
      if (kernel.arguments[i] == ArgumentKind::kNumber) continue;
      const std::string at = where + ", argument " + std::to_string(i);
      const int64_t offset = number_of(call.arguments[i]).value({}, indices);
      context_.need(offset >= 0, at, "an offset of 0 or more", offset);
      need_at_most(at, "bytes of its memory", bytes_of(call.arguments[i]),
                   offset + wanted[memory++]);
    }
  }

  int64_t bytes_of(const KernelArgument& argument) const {
    if (const auto* held = std::get_if<Held>(&argument))
      return fifo(fifo_of_number_.at(held->acquired)).element_bytes;
    return core_.scratch[static_cast<size_t>(std::get<OfScratch>(argument).scratch)].bytes;
  }

  const Context& context_;
  const Core& core_;
  std::string where_;
  HeldElements held_;
  std::map<int, int> fifo_of_number_;
  std::set<int> indices_;
  std::map<int, int64_t> last_of_index_;
  std::vector<Expression> conditions_;
};

}  // namespace

void check_core(const Context& context, const Core& core) { BodyCheck(context, core).run(); }

}  // namespace fasttps::npu::checks
