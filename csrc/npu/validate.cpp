#include "validate.h"

#include <algorithm>

#include "validate_checks.h"

namespace fasttps::npu {
namespace checks {

void Context::need_index(int i, size_t count, const std::string& where,
                         const std::string& what) const {
  need(i >= 0 && static_cast<size_t>(i) < count, where, what + " below " + std::to_string(count),
       i);
}

void Context::need_known(const Expression& e, const std::set<int>& indices,
                         const std::string& where) const {
  using Op = Expression::Op;
  switch (e.op()) {
    case Op::kConstant:
      return;
    case Op::kScalar:
      return need_index(static_cast<int>(e.number()), program.scalars.size(), where, "a scalar");
    case Op::kIndex:
      return need(indices.contains(static_cast<int>(e.number())), where,
                  "the index of a loop around it", e.text(program.scalars));
    default:
      need_known(e.left(), indices, where);
      need_known(e.right(), indices, where);
  }
}

void Context::need_words(const Walk& walk, int64_t unit_bytes, int64_t dimensions,
                         const std::string& where) const {
  constexpr int64_t kWordBytes = 4;
  need(unit_bytes > 0, where, "a unit of 1 byte or more", unit_bytes);
  if (walk.empty()) return;
  for (const Dimension& dimension : walk) {
    const Expression& size = dimension.size;
    const Expression& stride = dimension.stride;
    need(!size.is_constant() || size.constant() > 0, where, "sizes of 1 or more",
         size.text(program.scalars));
    need(!stride.is_constant() || stride.constant() >= 0, where, "strides of 0 or more",
         stride.text(program.scalars));
  }
  // Units side by side are a run of words. Units of several words apart from each other need the
  // innermost dimension for their words.
  const Dimension& innermost = walk.back();
  const bool side_by_side = innermost.stride.is_constant() && innermost.stride.constant() == 1;
  const bool words_apart = unit_bytes > kWordBytes && !side_by_side;
  at_most(where, "dimensions", dimensions,
          static_cast<int64_t>(walk.size()) + (words_apart ? 1 : 0));
  if (unit_bytes % kWordBytes == 0) return;
  const auto whole = [&](const Expression& units) {
    return !units.is_constant() || units.constant() * unit_bytes % kWordBytes == 0;
  };
  must(side_by_side && whole(innermost.size), where, "runs of whole words of 4 bytes",
       innermost.size.text(program.scalars) + " units of " + std::to_string(unit_bytes) +
           " bytes, " + innermost.stride.text(program.scalars) + " apart");
  for (size_t d = 0; d + 1 < walk.size(); ++d) {
    must(whole(walk[d].stride), where, "strides of whole words of 4 bytes",
         walk[d].stride.text(program.scalars) + " units of " + std::to_string(unit_bytes) +
             " bytes");
  }
}

void Context::must_exist(Tile tile, const std::string& where) const {
  must(tile.column >= 0 && tile.column < machine.columns && tile.row >= 0 &&
           tile.row < 2 + machine.core_rows,
       where,
       "columns 0 to " + std::to_string(machine.columns - 1) + " and rows 0 to " +
           std::to_string(machine.core_rows + 1),
       tile_name(tile));
}

const TileSpec& Context::spec(Tile tile) const {
  if (tile.row == 0) return machine.shim;
  if (tile.row == 1) return machine.mem_tile;
  return machine.core;
}

void check_uses(const Context& context) {
  for (const TileUse& use : tile_uses(context.program)) {
    const TileSpec& spec = context.spec(use.tile);
    const std::string where = tile_name(use.tile);
    context.at_most(where, "channels in", spec.channels_in, use.channels_in);
    context.at_most(where, "channels out", spec.channels_out, use.channels_out);
    context.at_most(where, "bytes", spec.memory_bytes, use.bytes);
    context.at_most(where, "buffer descriptors", spec.buffer_descriptors, use.buffer_descriptors);
    context.at_most(where, "locks", spec.locks, use.locks);
  }
}

namespace {

void check_arguments(const Context& context) {
  std::set<std::string> names;
  for (const Argument& argument : context.program.arguments) {
    const std::string where = "argument " + argument.name;
    context.need(names.insert(argument.name).second, where, "each name once", "it again");
    context.need(argument.bytes > 0, where, "1 byte or more", argument.bytes);
  }
}

void check_cores(const Context& context) {
  std::set<Tile> tiles;
  for (const Core& core : context.program.cores) {
    const std::string where = "core " + tile_name(core.tile);
    context.must_exist(core.tile, where);
    context.need(core.tile.row >= 2, where, "a row of 2 or more", core.tile.row);
    context.need(tiles.insert(core.tile).second, where, "one body a tile", "another");
  }
  for (const Fifo& fifo : context.program.fifos) {
    std::vector<Tile> ends{fifo.producer.tile};
    for (const End& end : fifo.consumers) ends.push_back(end.tile);
    for (const Tile tile : ends) {
      context.need(tile.row < 2 || tiles.contains(tile), "fifo " + fifo.name,
                   "a body for the core at " + tile_name(tile), "none");
    }
  }
  for (const Core& core : context.program.cores) check_core(context, core);
}

}  // namespace
}  // namespace checks

void validate(const Program& program, const Machine& machine) {
  const checks::Context context(program, machine);
  checks::check_arguments(context);
  checks::check_fifos(context);
  checks::check_links(context);
  checks::check_cores(context);
  checks::check_sequence(context);
  checks::check_uses(context);
}

}  // namespace fasttps::npu
