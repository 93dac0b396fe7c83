#include <map>
#include <optional>

#include "validate_checks.h"

namespace fasttps::npu::checks {
namespace {

// Bytes that a move takes, where they are known before a call.
std::optional<int64_t> bytes_of(const Move& move, const Argument& argument) {
  if (move.walk.empty()) return argument.bytes;
  int64_t bytes = move.unit_bytes;
  for (const Dimension& dimension : move.walk) {
    if (!dimension.size.is_constant()) return std::nullopt;
    bytes *= dimension.size.constant();
  }
  return bytes;
}

// Where they are known before a call, the bytes lie in the argument.
void check_bounds(const Context& context, const Move& move, const Argument& argument,
                  const std::string& where) {
  if (!move.offset.is_constant()) return;
  int64_t last = 0;
  for (const Dimension& dimension : move.walk) {
    if (!dimension.size.is_constant() || !dimension.stride.is_constant()) return;
    last += (dimension.size.constant() - 1) * dimension.stride.constant();
  }
  const int64_t begin = move.offset.constant() * move.unit_bytes;
  const int64_t end = begin + (move.walk.empty() ? argument.bytes : (last + 1) * move.unit_bytes);
  context.need(begin >= 0 && end <= argument.bytes, where,
               "bytes 0 to " + std::to_string(argument.bytes) + " of " + argument.name,
               std::to_string(begin) + " to " + std::to_string(end));
}

// All moves of a FIFO together are whole elements.
void check_whole_elements(const Context& context) {
  const Program& program = context.program;
  std::map<int, std::optional<int64_t>> moved;
  for (const SequenceStep& step : program.sequence) {
    const auto* move = std::get_if<Move>(&step);
    if (!move) continue;
    const auto bytes = bytes_of(*move, program.arguments[static_cast<size_t>(move->argument)]);
    auto& all = moved.emplace(move->fifo, 0).first->second;
    all = all && bytes ? std::optional(*all + *bytes) : std::nullopt;
  }
  for (const auto& [f, bytes] : moved) {
    const Fifo& fifo = program.fifos[static_cast<size_t>(f)];
    context.need(!bytes || *bytes % fifo.element_bytes == 0, "moves of fifo " + fifo.name,
                 "whole elements of " + std::to_string(fifo.element_bytes) + " bytes",
                 std::to_string(bytes.value_or(0)));
  }
}

void check_move(const Context& context, const Move& move) {
  const Program& program = context.program;
  const std::string where = "move " + move.name;
  context.need_index(move.argument, program.arguments.size(), where, "an argument");
  context.need_index(move.fifo, program.fifos.size(), where, "a fifo");
  const Argument& argument = program.arguments[static_cast<size_t>(move.argument)];
  const Fifo& fifo = program.fifos[static_cast<size_t>(move.fifo)];
  const bool from_l3 = fifo.producer.tile.row == 0;
  bool to_l3 = false;
  for (const End& end : fifo.consumers) to_l3 |= end.tile.row == 0;
  context.need(from_l3 || to_l3, where, "a fifo that begins or ends at a shim", fifo.name);
  const Access other = from_l3 ? Access::kOut : Access::kIn;
  context.need(argument.access != other, where,
               from_l3 ? "an argument that is read" : "an argument that is written",
               argument.name + ", which is only " + (from_l3 ? "written" : "read"));
  context.need_known(move.offset, {}, where + ", offset");
  for (const Dimension& dimension : move.walk) {
    context.need_known(dimension.size, {}, where + ", sizes");
    context.need_known(dimension.stride, {}, where + ", strides");
  }
  context.need_words(move.walk, move.unit_bytes, context.machine.shim.dimensions, where);
  check_bounds(context, move, argument, where);
}

}  // namespace

void check_sequence(const Context& context) {
  std::set<std::string> begun;
  for (const SequenceStep& step : context.program.sequence) {
    if (const auto* move = std::get_if<Move>(&step)) {
      context.need(!move->name.empty() && begun.insert(move->name).second, "move " + move->name,
                   "each move with a name of its own", "it again");
      check_move(context, *move);
    } else {
      const std::string& name = std::get<Await>(step).move;
      context.need(begun.contains(name), "await " + name, "a move before it", "none");
    }
  }
  check_whole_elements(context);
}

}  // namespace fasttps::npu::checks
