#include <algorithm>
#include <map>

#include "validate.h"

namespace fasttps::npu {
namespace {

class Counter {
 public:
  explicit Counter(const Program& program) : program_(program) {
    for (const Link& link : program.links) count(link);
    for (const Fifo& fifo : program.fifos) count(fifo);
    for (const Core& core : program.cores) {
      TileUse& use = at(core.tile);
      use.bytes += core.stack_bytes;
      for (const Scratch& scratch : core.scratch) use.bytes += scratch.bytes;
    }
  }

  std::vector<TileUse> all() const {
    std::vector<TileUse> uses;
    for (const auto& [tile, use] : uses_) uses.push_back(use);
    return uses;
  }

 private:
  const Fifo& fifo(int f) const { return program_.fifos[static_cast<size_t>(f)]; }

  TileUse& at(Tile tile) {
    TileUse& use = uses_[tile];
    use.tile = tile;
    return use;
  }

  void count(const Link& link) {
    TileUse& use = at(link.tile);
    const bool join = link.inputs.size() > 1;
    const int whole = join ? link.outputs[0] : link.inputs[0];
    const auto parts = static_cast<int64_t>(std::max(link.inputs.size(), link.outputs.size()));
    const int64_t depth = fifo(link.outputs[0]).producer.depth;
    use.bytes += depth * fifo(whole).element_bytes;
    use.locks += 2 * parts;
    use.buffer_descriptors += (parts - 1) * depth;
  }

  void count(const Fifo& fifo) {
    const auto is_core = [](const End& end) { return end.tile.row >= 2; };
    const bool to_core = std::any_of(fifo.consumers.begin(), fifo.consumers.end(), is_core);
    add(fifo, fifo.producer, true, to_core);
    for (const End& end : fifo.consumers) add(fifo, end, false, is_core(fifo.producer));
  }

  void add(const Fifo& fifo, const End& end, bool out, bool other_is_core) {
    TileUse& use = at(end.tile);
    // A shared FIFO lies in its producer's memory, and no DMA serves it.
    if (end.tile.row >= 2 && (out || !fifo.shared)) {
      use.bytes += end.depth * fifo.element_bytes;
      use.locks += 2;
    }
    if (fifo.shared) return;
    (out ? use.channels_out : use.channels_in) += 1;
    if (other_is_core) use.core_ports += 1;
    use.buffer_descriptors += end.depth;
  }

  const Program& program_;
  std::map<Tile, TileUse> uses_;
};

}  // namespace

std::vector<TileUse> tile_uses(const Program& program) { return Counter(program).all(); }

}  // namespace fasttps::npu
