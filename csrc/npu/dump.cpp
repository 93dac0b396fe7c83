#include "dump.h"

#include <algorithm>

#include "validate.h"

namespace fasttps::npu {
namespace {

std::string text(Tile tile) {
  return "(" + std::to_string(tile.column) + ", " + std::to_string(tile.row) + ")";
}

std::string bytes_text(int64_t bytes) {
  return std::to_string(bytes) + (bytes == 1 ? " byte" : " bytes");
}

std::string padded(const std::string& text, size_t width, bool right = false) {
  const std::string blanks(width - std::min(width, text.size()), ' ');
  return right ? blanks + text : text + blanks;
}

template <class List>
size_t longest_name(const List& list) {
  size_t most = 0;
  for (const auto& one : list) most = std::max(most, one.name.size());
  return most;
}

class Dumper {
 public:
  explicit Dumper(const Program& program) : program_(program) {}

  std::string all() {
    out_ = "program " + program_.name + "(" + joined(program_.scalars) + ")\n";
    if (!program_.arguments.empty()) arguments();
    if (!program_.fifos.empty()) fifos();
    if (!program_.links.empty()) links();
    for (const Core& core : program_.cores) add(core);
    if (!program_.sequence.empty()) sequence();
    return out_;
  }

 private:
  static std::string joined(const std::vector<std::string>& names) {
    std::string text;
    for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
    return text;
  }

  void line(int depth, const std::string& text) {
    out_ += std::string(static_cast<size_t>(depth) * 2, ' ') + text + "\n";
  }

  std::string text(const Expression& e) const { return e.text(program_.scalars); }
  const std::string& fifo_name(int f) const { return program_.fifos[static_cast<size_t>(f)].name; }

  std::string text(const Walk& walk, int64_t unit_bytes) const {
    std::string dimensions;
    for (const Dimension& dimension : walk) {
      dimensions +=
          (dimensions.empty() ? "" : ", ") + text(dimension.size) + " x " + text(dimension.stride);
    }
    return "walk " + dimensions + " of " + bytes_text(unit_bytes);
  }

  void arguments() {
    line(0, "\narguments");
    const size_t width = longest_name(program_.arguments);
    for (const Argument& argument : program_.arguments) {
      const char* access = argument.access == Access::kIn    ? "in"
                           : argument.access == Access::kOut ? "out"
                                                             : "in and out";
      line(1, padded(argument.name, width) + "  " + bytes_text(argument.bytes) + "  " + access);
    }
  }

  std::string end_text(const Fifo& fifo, const End& end) const {
    std::string text = npu::text(end.tile);
    if (end.depth > 0) text += " x " + std::to_string(end.depth);
    if (!end.walk.empty()) text += ", " + this->text(end.walk, fifo.unit_bytes);
    return text;
  }

  void fifos() {
    line(0, "\nfifos");
    const size_t width = longest_name(program_.fifos);
    for (const Fifo& fifo : program_.fifos) {
      std::string consumers;
      for (const End& end : fifo.consumers)
        consumers += (consumers.empty() ? "" : " and ") + end_text(fifo, end);
      line(1, padded(fifo.name, width) + "  " + bytes_text(fifo.element_bytes) + "  " +
                  end_text(fifo, fifo.producer) + " -> " + consumers +
                  (fifo.shared ? ", shared" : ""));
    }
  }

  void links() {
    line(0, "\nlinks");
    for (const Link& link : program_.links) {
      const bool join = link.inputs.size() > 1;
      const auto side = [&](const std::vector<int>& fifos, bool parts) {
        std::string text;
        for (size_t i = 0; i < fifos.size(); ++i) {
          text += (i == 0 ? "" : ", ") + fifo_name(fifos[i]);
          if (parts && i < link.offsets_bytes.size() && fifos.size() > 1)
            text += " at " + std::to_string(link.offsets_bytes[i]);
        }
        return text;
      };
      const bool once = link.repeat.is_constant() && link.repeat.constant() == 1;
      line(1, npu::text(link.tile) + "  " + side(link.inputs, join) + " -> " +
                  side(link.outputs, !join) +
                  (once ? "" : ", each " + text(link.repeat) + " times"));
    }
  }

  void add(const Core& core) {
    line(0, "\ncore " + npu::text(core.tile));
    line(1, "stack " + bytes_text(core.stack_bytes));
    for (const Scratch& scratch : core.scratch)
      line(1, "scratch " + scratch.name + ", " + bytes_text(scratch.bytes));
    add(core.body, core, 1);
  }

  void add(const Body& body, const Core& core, int depth) {
    for (const Statement& statement : body)
      std::visit([&](const auto& what) { add(what, core, depth); }, statement.what);
  }

  void add(const Acquire& what, const Core&, int depth) {
    std::string names;
    for (int i = 0; i < what.count; ++i)
      names += (i == 0 ? "e" : ", e") + std::to_string(what.acquired + i);
    line(depth, "acquire " + names + " of " + fifo_name(what.fifo) +
                    (what.port == Port::kProduce ? " to write" : " to read"));
  }

  void add(const Release& what, const Core&, int depth) {
    line(depth, "release " + (what.count == 1 ? "" : std::to_string(what.count) + " of ") +
                    fifo_name(what.fifo));
  }

  std::string text(const KernelArgument& argument, const Core& core) const {
    if (const auto* number = std::get_if<Expression>(&argument)) return text(*number);
    const auto* held = std::get_if<Held>(&argument);
    const auto* scratch = std::get_if<OfScratch>(&argument);
    const std::string name = held ? "e" + std::to_string(held->acquired)
                                  : core.scratch[static_cast<size_t>(scratch->scratch)].name;
    const Expression& offset = held ? held->offset_bytes : scratch->offset_bytes;
    const bool at_begin = offset.is_constant() && offset.constant() == 0;
    return name + (at_begin ? "" : "[" + text(offset) + "]");
  }

  void add(const Call& what, const Core& core, int depth) {
    std::string arguments;
    for (const KernelArgument& argument : what.arguments)
      arguments += (arguments.empty() ? "" : ", ") + text(argument, core);
    line(depth, what.kernel + "(" + arguments + ")");
  }

  void add(const Loop& what, const Core& core, int depth) {
    line(depth, "for i" + std::to_string(what.index) + " below " + text(what.count));
    add(what.body, core, depth + 1);
  }

  void add(const If& what, const Core& core, int depth) {
    line(depth, "if " + text(what.condition));
    add(what.body, core, depth + 1);
  }

  void sequence() {
    line(0, "\nsequence");
    for (const SequenceStep& step : program_.sequence) {
      if (const auto* await = std::get_if<Await>(&step)) {
        line(1, "await " + await->move);
        continue;
      }
      const Move& move = std::get<Move>(step);
      const Fifo& fifo = program_.fifos[static_cast<size_t>(move.fifo)];
      std::string memory = program_.arguments[static_cast<size_t>(move.argument)].name;
      if (!move.offset.is_constant() || move.offset.constant() != 0)
        memory += " from " + text(move.offset) + " on";
      memory += move.walk.empty() ? ", all" : ", " + text(move.walk, move.unit_bytes);
      const bool from_l3 = fifo.producer.tile.row == 0;
      line(1, "move " + move.name + ": " +
                  (from_l3 ? memory + " -> " + fifo.name : fifo.name + " -> " + memory));
    }
  }

  const Program& program_;
  std::string out_;
};

const TileSpec& spec_of(const Machine& machine, Tile tile) {
  if (tile.row == 0) return machine.shim;
  return tile.row == 1 ? machine.mem_tile : static_cast<const TileSpec&>(machine.core);
}

}  // namespace

std::string dump(const Program& program) { return Dumper(program).all(); }

std::string dump_uses(const Program& program, const Machine& machine) {
  std::vector<std::vector<std::string>> rows{
      {"tile", "channels in", "channels out", "bytes", "buffer descriptors", "locks"}};
  int64_t ports = 0;
  for (const TileUse& use : tile_uses(program)) {
    const TileSpec& spec = spec_of(machine, use.tile);
    const auto of = [](int64_t used, int64_t most) {
      return std::to_string(used) + " of " + std::to_string(most);
    };
    rows.push_back({text(use.tile), of(use.channels_in, spec.channels_in),
                    of(use.channels_out, spec.channels_out), of(use.bytes, spec.memory_bytes),
                    of(use.buffer_descriptors, spec.buffer_descriptors),
                    of(use.locks, spec.locks)});
    if (use.tile.row == 1) ports += use.core_ports;
  }
  std::string table;
  for (const auto& row : rows) {
    for (size_t column = 0; column < row.size(); ++column) {
      size_t width = 0;
      for (const auto& other : rows) width = std::max(width, other[column].size());
      table += (column == 0 ? "" : "  ") + padded(row[column], width, column > 0);
    }
    table += '\n';
  }
  return table + "ports of mem tiles to cores: " + std::to_string(ports) + "; paper 002 counts " +
         std::to_string(machine.mem_tile.channels_in) + " a mem tile, whichever way they go, of " +
         std::to_string(machine.columns * machine.mem_tile.channels_in) + "\n";
}

}  // namespace fasttps::npu
