#include "validate.h"

#include <algorithm>
#include <map>
#include <set>

#include "device.h"
#include "tile_name.h"
#include "validate_core.h"

namespace fasttps::npu {
namespace {

constexpr int64_t kWordBytes = 4;

// The end of a FIFO at a tile; null where it has none there.
const End* end_at(const Fifo& fifo, Tile tile, bool producer) {
  if (producer) return fifo.producer.tile == tile ? &fifo.producer : nullptr;
  for (const End& end : fifo.consumers) {
    if (end.tile == tile) return &end;
  }
  return nullptr;
}

class Validator {
 public:
  Validator(const Program& program, const Machine& machine)
      : program_(program), machine_(machine) {}

  void run() {
    if (program_.name.empty()) wrong("program", "a name", "none");
    std::set<std::string> names;
    for (const Fifo& fifo : program_.fifos) {
      if (!names.insert(fifo.name).second)
        wrong("fifo " + fifo.name, "a name of its own", "another's");
      check_fifo(fifo);
    }
    for (const Link& link : program_.links) check_link(link);
    for (size_t i = 0; i < program_.fifos.size(); ++i) check_is_used(i);
    std::set<Tile> cores;
    for (const Core& core : program_.cores) {
      const std::string what = "core " + tile_name(core.tile);
      check_tile(what, core.tile);
      if (core.tile.row < 2) wrong(what, "a row of 2 or more", std::to_string(core.tile.row));
      if (!cores.insert(core.tile).second) wrong(what, "one body", "two");
      validate_core(program_, core);
    }
    check_sequence();
    for (const TileUse& use : tile_uses(program_)) check_use(use);
  }

 private:
  [[noreturn]] void wrong(const std::string& what, const std::string& wanted,
                          const std::string& got) const {
    throw std::invalid_argument(program_.name + ": " + what + " wanted " + wanted + ", got " + got);
  }
  [[noreturn]] void cannot(const std::string& what, const std::string& wanted,
                           const std::string& got) const {
    throw Incompatible(program_.name + " on " + machine_.name + ": " + what + " wanted " + wanted +
                       ", got " + got);
  }

  void check_tile(const std::string& what, Tile tile) const {
    if (tile.column < 0 || tile.column >= machine_.columns || tile.row < 0 ||
        tile.row >= 2 + machine_.core_rows) {
      cannot(what,
             "a tile of " + std::to_string(machine_.columns) + " columns and " +
                 std::to_string(2 + machine_.core_rows) + " rows",
             tile_name(tile));
    }
  }

  const TileSpec& spec(Tile tile) const {
    if (tile.row == 0) return machine_.shim;
    return tile.row == 1 ? machine_.mem_tile : machine_.core;
  }

  void check_fifo(const Fifo& fifo) const {
    const std::string what = "fifo " + fifo.name;
    if (fifo.element_bytes <= 0 || fifo.element_bytes % kWordBytes != 0) {
      wrong(what, "elements of whole words of 4 bytes",
            std::to_string(fifo.element_bytes) + " bytes");
    }
    if (fifo.consumers.empty()) wrong(what, "a consumer", "none");
    std::set<Tile> tiles{fifo.producer.tile};
    check_end(fifo, fifo.producer);
    for (const End& end : fifo.consumers) {
      check_end(fifo, end);
      if (!tiles.insert(end.tile).second)
        wrong(what, "each tile once", tile_name(end.tile) + " twice");
      if (end.tile.row == 0 && fifo.consumers.size() > 1) {
        wrong(what, "no broadcast to L3", std::to_string(fifo.consumers.size()) + " consumers");
      }
    }
    if (!fifo.shared) return;
    // AIE-ML: a core reaches the data memory of its neighbours to the north, south and west, and
    // they its own (AM020, memory of neighbours).
    const Tile a = fifo.producer.tile, b = fifo.consumers[0].tile;
    const int apart = std::abs(a.column - b.column) + std::abs(a.row - b.row);
    if (fifo.consumers.size() != 1 || a.row < 2 || b.row < 2 || apart != 1 ||
        !fifo.producer.walk.empty() || !fifo.consumers[0].walk.empty()) {
      cannot(what, "shared memory between two neighbouring cores, and no walks",
             tile_name(a) + " to " + tile_name(b));
    }
  }

  void check_end(const Fifo& fifo, const End& end) const {
    const std::string what = "fifo " + fifo.name + " at " + tile_name(end.tile);
    check_tile(what, end.tile);
    if (end.tile.row == 0 ? end.depth != 0 : end.depth < 1) {
      wrong(what, end.tile.row == 0 ? "a depth of 0" : "a depth of 1 or more",
            std::to_string(end.depth));
    }
    if (end.walk.empty()) return;
    if (end.tile.row == 0) wrong(what, "no walk but its moves'", "one");
    const int64_t most = spec(end.tile).dimensions;
    if (static_cast<int64_t>(end.walk.size()) > most) {
      cannot(what, "a walk of at most " + std::to_string(most) + " dimensions",
             std::to_string(end.walk.size()));
    }
    int64_t bytes = fifo.unit_bytes, last = 0;
    for (const Dimension& dimension : end.walk) {
      if (!dimension.size.is_constant() || !dimension.stride.is_constant() ||
          dimension.size.constant() < 1 || dimension.stride.constant() < 0) {
        wrong(what, "a walk of constants, sizes of 1 and strides of 0 or more",
              dimension.size.text(program_.scalars) + " steps of " +
                  dimension.stride.text(program_.scalars));
      }
      bytes *= dimension.size.constant();
      last += (dimension.size.constant() - 1) * dimension.stride.constant() * fifo.unit_bytes;
    }
    if (fifo.unit_bytes % kWordBytes != 0) {
      cannot(what, "units of whole words of 4 bytes", std::to_string(fifo.unit_bytes) + " bytes");
    }
    if (bytes != fifo.element_bytes || last + fifo.unit_bytes > fifo.element_bytes) {
      wrong(what,
            "a walk through the " + std::to_string(fifo.element_bytes) + " bytes of an element",
            std::to_string(bytes) + " bytes up to " + std::to_string(last + fifo.unit_bytes));
    }
  }

  const Fifo& fifo(int i, const std::string& what) const {
    if (i < 0 || i >= static_cast<int>(program_.fifos.size())) {
      wrong(what, "one of " + std::to_string(program_.fifos.size()) + " FIFOs", std::to_string(i));
    }
    return program_.fifos[static_cast<size_t>(i)];
  }

  void check_link(const Link& link) {
    const std::string what = "link at " + tile_name(link.tile);
    if (link.tile.row != 1) wrong(what, "a mem tile", "row " + std::to_string(link.tile.row));
    if (link.inputs.empty() || link.outputs.empty() ||
        (link.inputs.size() > 1 && link.outputs.size() > 1)) {
      wrong(what, "one FIFO on one side at least and some on each",
            std::to_string(link.inputs.size()) + " in and " + std::to_string(link.outputs.size()) +
                " out");
    }
    for (const bool in : {true, false}) {
      for (const int i : in ? link.inputs : link.outputs) {
        const Fifo& one = fifo(i, what);
        if (!end_at(one, link.tile, !in)) {
          wrong(what, std::string("FIFOs that ") + (in ? "end" : "begin") + " there", one.name);
        }
        if (!linked_.insert({i, link.tile}).second)
          wrong(what, "each FIFO once", one.name + " twice");
      }
    }
    const bool join = link.inputs.size() > 1;
    const Fifo& whole = fifo(join ? link.outputs[0] : link.inputs[0], what);
    const std::vector<int>& parts = join ? link.inputs : link.outputs;
    const int depth = end_at(whole, link.tile, join)->depth;
    for (const int i : parts) {
      const int other = end_at(fifo(i, what), link.tile, !join)->depth;
      if (other != depth) {
        wrong(what, "one depth for FIFOs in one memory, " + std::to_string(depth),
              std::to_string(other) + " of " + fifo(i, what).name);
      }
    }
    if (link.offsets_bytes.size() != parts.size()) {
      wrong(what, "an offset for each of " + std::to_string(parts.size()) + " parts",
            std::to_string(link.offsets_bytes.size()));
    }
    std::vector<std::pair<int64_t, int64_t>> ranges;
    for (size_t i = 0; i < parts.size(); ++i) {
      const int64_t begin = link.offsets_bytes[i];
      ranges.emplace_back(begin, begin + fifo(parts[i], what).element_bytes);
    }
    std::sort(ranges.begin(), ranges.end());
    int64_t end = 0;
    for (const auto& [from, to] : ranges) {
      // Every byte that goes out has come in: parts of a join fill the whole.
      if (join ? from != end : from < 0) {
        wrong(what, "parts that fill " + whole.name + " without overlap",
              "one from byte " + std::to_string(from));
      }
      end = std::max(end, to);
    }
    if (join ? end != whole.element_bytes : end > whole.element_bytes) {
      wrong(what, "parts of the " + std::to_string(whole.element_bytes) + " bytes of " + whole.name,
            std::to_string(end) + " bytes");
    }
  }

  // At a mem tile somebody must pass on what comes; at a core its body does.
  void check_is_used(size_t i) const {
    const Fifo& one = program_.fifos[i];
    const auto check = [&](const End& end) {
      if (end.tile.row == 1 && !linked_.contains({static_cast<int>(i), end.tile})) {
        wrong("fifo " + one.name, "a link at " + tile_name(end.tile), "none");
      }
    };
    check(one.producer);
    for (const End& end : one.consumers) check(end);
  }

  void check_sequence() const {
    std::set<std::string> moves;
    for (const SequenceStep& step : program_.sequence) {
      if (const auto* await = std::get_if<Await>(&step)) {
        if (!moves.contains(await->move)) wrong("await", "an earlier move", await->move);
        continue;
      }
      const auto& move = std::get<Move>(step);
      const std::string what = "move " + move.name;
      if (!moves.insert(move.name).second) wrong(what, "a name of its own", "another's");
      if (move.argument < 0 || move.argument >= static_cast<int>(program_.arguments.size())) {
        wrong(what, "one of " + std::to_string(program_.arguments.size()) + " arguments",
              std::to_string(move.argument));
      }
      const Argument& argument = program_.arguments[static_cast<size_t>(move.argument)];
      const Fifo& one = fifo(move.fifo, what);
      const bool reads = one.producer.tile.row == 0;
      if (!reads && one.consumers[0].tile.row != 0) {
        wrong(what, "a FIFO with an end at a shim", one.name);
      }
      if (argument.access == (reads ? Access::kOut : Access::kIn)) {
        wrong(what, std::string("an argument that may be ") + (reads ? "read" : "written"),
              argument.name);
      }
      const int64_t most = machine_.shim.dimensions;
      if (static_cast<int64_t>(move.walk.size()) > most) {
        cannot(what, "at most " + std::to_string(most) + " dimensions",
               std::to_string(move.walk.size()));
      }
      if (move.unit_bytes % kWordBytes != 0) {
        cannot(what, "units of whole words of 4 bytes", std::to_string(move.unit_bytes) + " bytes");
      }
    }
  }

  void check_use(const TileUse& use) const {
    const TileSpec& limits = spec(use.tile);
    const auto check = [&](const char* of, int64_t most, int64_t got) {
      if (got > most)
        cannot(tile_name(use.tile), "at most " + std::to_string(most) + " " + of,
               std::to_string(got));
    };
    if (use.tile.row != 0) check("bytes", limits.memory_bytes, use.bytes);
    check("channels in", limits.channels_in, use.channels_in);
    check("channels out", limits.channels_out, use.channels_out);
    check("buffer descriptors", limits.buffer_descriptors, use.buffer_descriptors);
    check("locks", limits.locks, use.locks);
  }

  const Program& program_;
  const Machine& machine_;
  std::set<std::pair<int, Tile>> linked_;
};

}  // namespace

std::vector<TileUse> tile_uses(const Program& program) {
  std::map<Tile, TileUse> uses;
  const auto use = [&](Tile tile) -> TileUse& {
    TileUse& one = uses[tile];
    one.tile = tile;
    return one;
  };
  // Ends whose memory a link has counted.
  std::set<std::pair<const Fifo*, Tile>> counted;
  for (const Link& link : program.links) {
    const bool join = link.inputs.size() > 1;
    const auto at = [&](int i) -> const Fifo& { return program.fifos[static_cast<size_t>(i)]; };
    const Fifo& whole = at(join ? link.outputs[0] : link.inputs[0]);
    TileUse& here = use(link.tile);
    here.bytes += end_at(whole, link.tile, join)->depth * whole.element_bytes;
    for (const int i : link.inputs) counted.insert({&at(i), link.tile});
    for (const int i : link.outputs) counted.insert({&at(i), link.tile});
  }
  for (const Fifo& fifo : program.fifos) {
    const auto add = [&](const End& end, bool out) {
      TileUse& here = use(end.tile);
      if (!fifo.shared) {
        ++(out ? here.channels_out : here.channels_in);
        // A shim's descriptors are its moves', which are made anew as they are done.
        if (end.tile.row != 0) here.buffer_descriptors += end.depth;
      }
      if (end.tile.row == 0 || (fifo.shared && !out)) return;
      here.locks += 2;
      if (!counted.contains({&fifo, end.tile})) here.bytes += end.depth * fifo.element_bytes;
    };
    add(fifo.producer, true);
    for (const End& end : fifo.consumers) add(end, false);
  }
  for (const Core& core : program.cores) {
    TileUse& here = use(core.tile);
    here.bytes += core.stack_bytes;
    for (const Scratch& scratch : core.scratch) here.bytes += scratch.bytes;
  }
  std::vector<TileUse> found;
  for (const auto& [tile, one] : uses) found.push_back(one);
  return found;
}

void validate(const Program& program, const Machine& machine) { Validator(program, machine).run(); }

}  // namespace fasttps::npu
