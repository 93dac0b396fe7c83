#pragma once
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "device.h"
#include "tile_name.h"
#include "validate.h"

// The parts of validate(), each of which throws at the first thing that is wrong.
namespace fasttps::npu::checks {

class Context {
 public:
  Context(const Program& program, const Machine& machine) : program(program), machine(machine) {}

  // A rule of programs.
  void need(bool holds, const std::string& where, const std::string& wanted,
            const std::string& got) const {
    if (holds) return;
    throw std::invalid_argument(program.name + ": " + where + ": wanted " + wanted + ", got " +
                                got);
  }
  void need(bool holds, const std::string& where, const std::string& wanted, int64_t got) const {
    need(holds, where, wanted, std::to_string(got));
  }
  // A limit of the machine.
  void must(bool can, const std::string& where, const std::string& wanted,
            const std::string& got) const {
    if (can) return;
    throw Incompatible(program.name + " on " + machine.name + ": " + where + ": wanted " + wanted +
                       ", got " + got);
  }
  void at_most(const std::string& where, const std::string& what, int64_t most, int64_t got) const {
    must(got <= most, where, "at most " + std::to_string(most) + " " + what, std::to_string(got));
  }
  void must_exist(Tile tile, const std::string& where) const;

  // Index `i` into a list of `count`.
  void need_index(int i, size_t count, const std::string& where, const std::string& what) const;
  // Only scalars that there are, and indices of loops that it stands in.
  void need_known(const Expression& e, const std::set<int>& indices,
                  const std::string& where) const;
  // A DMA's way through memory: words of 4 bytes, and as many dimensions as it has.
  void need_words(const Walk& walk, int64_t unit_bytes, int64_t dimensions,
                  const std::string& where) const;

  const TileSpec& spec(Tile tile) const;

  const Program& program;
  const Machine& machine;
};

// Names are there once, tiles exist, ends agree with their tiles.
void check_fifos(const Context& context);
void check_links(const Context& context);
void check_core(const Context& context, const Core& core);
void check_sequence(const Context& context);
void check_uses(const Context& context);

}  // namespace fasttps::npu::checks
