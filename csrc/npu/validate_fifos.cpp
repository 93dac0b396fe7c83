#include <algorithm>
#include <numeric>

#include "validate_checks.h"

namespace fasttps::npu::checks {
namespace {

// A core reaches its own memory and that of its neighbours to the north, south and west, on every
// row: AM020 (AIE-ML Architecture Manual) and UG1603, "Memory and DMA Programming"; mlir-aie's
// AIE2TargetModel::isLegalMemAffinity.
bool reaches(Tile core, Tile memory) {
  const int east = memory.column - core.column;
  const int north = memory.row - core.row;
  return (east == 0 && north >= -1 && north <= 1) || (east == -1 && north == 0);
}

// Every unit of an element once: then nothing of it is stale, and nothing else is touched.
void check_element_walk(const Context& context, const Fifo& fifo, const Walk& walk,
                        const std::string& where) {
  const int64_t units = fifo.element_bytes / fifo.unit_bytes;
  int64_t walked = 1;
  for (const Dimension& dimension : walk) {
    context.need(dimension.size.is_constant() && dimension.stride.is_constant(), where,
                 "a constant walk",
                 dimension.size.text(context.program.scalars) + " x " +
                     dimension.stride.text(context.program.scalars));
    walked = dimension.size.constant() > units ? units + 1 : walked * dimension.size.constant();
    if (walked > units) break;
  }
  context.need(walked == units && fifo.element_bytes % fifo.unit_bytes == 0, where,
               "a walk of " + std::to_string(fifo.element_bytes) + " bytes",
               (walked > units ? "more than " : "") +
                   std::to_string(std::min(walked, units) * fifo.unit_bytes));
  std::vector<int64_t> sizes, strides;
  for (const Dimension& dimension : walk) {
    sizes.push_back(dimension.size.constant());
    strides.push_back(dimension.stride.constant());
  }
  std::vector<bool> seen(static_cast<size_t>(units));
  std::vector<int64_t> at(walk.size());
  for (int64_t step = 0; step < units; ++step) {
    int64_t unit = 0;
    for (size_t d = 0; d < walk.size(); ++d) unit += at[d] * strides[d];
    if (unit >= units) {
      context.need(false, where,
                   "a walk within the " + std::to_string(units) + " units of an element",
                   "unit " + std::to_string(unit));
    }
    if (seen[static_cast<size_t>(unit)])
      context.need(false, where, "every unit once", "unit " + std::to_string(unit) + " twice");
    seen[static_cast<size_t>(unit)] = true;
    for (size_t d = walk.size(); d > 0; --d) {
      if (++at[d - 1] < sizes[d - 1]) break;
      at[d - 1] = 0;
    }
  }
}

void check_end(const Context& context, const Fifo& fifo, const End& end) {
  const std::string where = "fifo " + fifo.name + " at " + tile_name(end.tile);
  context.must_exist(end.tile, where);
  if (end.tile.row == 0) {
    context.must(
        end.tile.column < context.machine.shim_columns, where,
        "a shim with DMAs, columns 0 to " + std::to_string(context.machine.shim_columns - 1),
        "column " + std::to_string(end.tile.column));
    context.need(end.depth == 0, where, "depth 0 at a shim", end.depth);
    context.need(end.walk.empty(), where, "a shim's walk in its moves", "one in the fifo");
  } else {
    context.need(end.depth >= 1, where, "a depth of 1 or more", end.depth);
  }
  if (end.walk.empty()) return;
  context.need_words(end.walk, fifo.unit_bytes, context.spec(end.tile).dimensions, where);
  check_element_walk(context, fifo, end.walk, where);
}

void check_shared(const Context& context, const Fifo& fifo) {
  const std::string where = "fifo " + fifo.name;
  const Tile from = fifo.producer.tile;
  context.need(fifo.consumers.size() == 1, where, "one consumer of a shared fifo",
               static_cast<int64_t>(fifo.consumers.size()));
  const End& to = fifo.consumers[0];
  context.must(from.row >= 2 && to.tile.row >= 2 && reaches(to.tile, from), where,
               "a consumer that reaches memory of " + tile_name(from) +
                   ": the core to the north, south or east of it",
               tile_name(to.tile));
  context.need(fifo.producer.walk.empty() && to.walk.empty(), where, "no walk in a shared fifo",
               "one");
  context.need(to.depth == fifo.producer.depth, where, "one depth of a shared fifo",
               std::to_string(fifo.producer.depth) + " and " + std::to_string(to.depth));
}

// Every byte that goes out has come in: the inputs of a join lie side by side and are the whole;
// the outputs of a distribute lie in it.
void check_parts(const Context& context, const Fifo& whole, const std::vector<int>& parts,
                 const std::vector<int64_t>& offsets, bool join, const std::string& where) {
  std::vector<size_t> order(parts.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(),
            [&](size_t a, size_t b) { return offsets[a] < offsets[b]; });
  int64_t next = 0;
  for (const size_t i : order) {
    const Fifo& part = context.program.fifos[static_cast<size_t>(parts[i])];
    context.need(join ? offsets[i] == next : offsets[i] >= 0, where,
                 part.name + " from byte " + std::to_string(next) + " on", offsets[i]);
    const int64_t end = offsets[i] + part.element_bytes;
    context.need(end <= whole.element_bytes, where,
                 part.name + " within the " + std::to_string(whole.element_bytes) + " bytes of " +
                     whole.name,
                 "it up to byte " + std::to_string(end));
    if (join) next = end;
  }
  context.need(!join || next == whole.element_bytes, where,
               "inputs of the " + std::to_string(whole.element_bytes) + " bytes of " + whole.name,
               next);
}

// The links at mem tiles that take up a FIFO's end.
int64_t links_of(const Program& program, int fifo, Tile tile, bool input) {
  int64_t found = 0;
  for (const Link& link : program.links) {
    const std::vector<int>& fifos = input ? link.inputs : link.outputs;
    if (link.tile == tile) found += std::count(fifos.begin(), fifos.end(), fifo);
  }
  return found;
}

}  // namespace

void check_fifos(const Context& context) {
  std::set<std::string> names;
  for (size_t f = 0; f < context.program.fifos.size(); ++f) {
    const Fifo& fifo = context.program.fifos[f];
    const std::string where = "fifo " + fifo.name;
    context.need(!fifo.name.empty() && names.insert(fifo.name).second, where,
                 "each fifo with a name of its own", "it again");
    context.need(fifo.element_bytes > 0, where, "an element of 1 byte or more", fifo.element_bytes);
    context.need(fifo.shared || fifo.element_bytes % 4 == 0, where,
                 "an element of whole words of 4 bytes for a stream", fifo.element_bytes);
    context.need(fifo.unit_bytes > 0, where, "a unit of 1 byte or more", fifo.unit_bytes);
    context.need(!fifo.consumers.empty(), where, "a consumer", "none");
    check_end(context, fifo, fifo.producer);
    std::set<Tile> tiles{fifo.producer.tile};
    int shims = fifo.producer.tile.row == 0 ? 1 : 0;
    for (const End& end : fifo.consumers) {
      check_end(context, fifo, end);
      context.need(tiles.insert(end.tile).second, where, "ends at different tiles",
                   tile_name(end.tile) + " twice");
      shims += end.tile.row == 0 ? 1 : 0;
    }
    context.need(shims <= 1, where, "at most one end at a shim", shims);
    if (fifo.shared) check_shared(context, fifo);
  }
}

void check_links(const Context& context) {
  const Program& program = context.program;
  for (const Link& link : program.links) {
    const std::string where = "link at " + tile_name(link.tile);
    context.must_exist(link.tile, where);
    context.need(link.tile.row == 1, where, "a mem tile", "row " + std::to_string(link.tile.row));
    context.need(!link.inputs.empty() && !link.outputs.empty() &&
                     (link.inputs.size() == 1 || link.outputs.size() == 1),
                 where, "one input to one or more outputs, or more to one",
                 std::to_string(link.inputs.size()) + " to " + std::to_string(link.outputs.size()));
    std::set<int> depths;
    for (const int i : link.inputs) {
      context.need_index(i, program.fifos.size(), where, "a fifo");
      const Fifo& fifo = program.fifos[static_cast<size_t>(i)];
      const auto end = std::find_if(fifo.consumers.begin(), fifo.consumers.end(),
                                    [&](const End& one) { return one.tile == link.tile; });
      context.need(end != fifo.consumers.end(), where, "an input that ends here", fifo.name);
      depths.insert(end->depth);
    }
    for (const int i : link.outputs) {
      context.need_index(i, program.fifos.size(), where, "a fifo");
      const Fifo& fifo = program.fifos[static_cast<size_t>(i)];
      context.need(fifo.producer.tile == link.tile, where, "an output that begins here", fifo.name);
      depths.insert(fifo.producer.depth);
    }
    context.need(depths.size() == 1, where, "one depth, since its fifos share their memory",
                 std::to_string(*depths.begin()) + " and " + std::to_string(*depths.rbegin()));

    const bool join = link.inputs.size() > 1;
    const std::vector<int>& parts = join ? link.inputs : link.outputs;
    const Fifo& whole = program.fifos[static_cast<size_t>(join ? link.outputs[0] : link.inputs[0])];
    std::vector<int64_t> offsets = link.offsets_bytes;
    if (offsets.empty() && parts.size() == 1) offsets = {0};
    context.need(offsets.size() == parts.size(), where, std::to_string(parts.size()) + " offsets",
                 static_cast<int64_t>(offsets.size()));
    check_parts(context, whole, parts, offsets, join, where);
    context.need_known(link.repeat, {}, where + ", repeat");
    context.need(!link.repeat.is_constant() || link.repeat.constant() >= 1, where,
                 "to repeat once or more", link.repeat.text(program.scalars));
  }
  for (size_t f = 0; f < program.fifos.size(); ++f) {
    const Fifo& fifo = program.fifos[f];
    const auto check = [&](Tile tile, bool input) {
      if (tile.row != 1) return;
      const int64_t links = links_of(program, static_cast<int>(f), tile, input);
      context.need(links == 1, "fifo " + fifo.name + " at " + tile_name(tile), "one link", links);
    };
    check(fifo.producer.tile, false);
    for (const End& end : fifo.consumers) check(end.tile, true);
  }
}

}  // namespace fasttps::npu::checks
