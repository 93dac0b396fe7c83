#include "array.h"

#include <algorithm>

#include "../tile_name.h"
#include "fabric.h"

namespace fasttps::npu::sim {
namespace {

KnownWalk known(const Walk& walk, int64_t unit_bytes, int64_t offset_bytes, int64_t all_bytes,
                std::span<const int64_t> scalars) {
  std::vector<KnownWalk::Dimension> dimensions;
  for (const Dimension& dimension : walk) {
    dimensions.push_back(
        {dimension.size.value(scalars, {}), dimension.stride.value(scalars, {}) * unit_bytes});
  }
  return {offset_bytes, dimensions, unit_bytes, all_bytes};
}

// Everything that a program becomes, and the coroutine of its sequence.
class Array {
 public:
  Array(const Program& program, const Machine& machine,
        std::span<const std::span<std::byte>> arguments, std::span<const int64_t> scalars,
        const RunOptions& options)
      : run_(program, machine, arguments, scalars, options), program_(program) {
    run_.statistics.cores.resize(program.cores.size());
    run_.statistics.fifos.resize(program.fifos.size());
    sides_.resize(program.fifos.size());
    for (Sides& sides : sides_) sides.to.resize(1);
    for (size_t i = 0; i < program.fifos.size(); ++i) {
      sides_[i].to.resize(program.fifos[i].consumers.size());
      run_.statistics.fifos[i].name = program.fifos[i].name;
    }
    for (const Link& link : program.links) make_link(link);
    for (size_t i = 0; i < program.fifos.size(); ++i) make_fifo(i);
    patch_moves();
    for (size_t i = 0; i < program.cores.size(); ++i) make_core(i);
  }

  Statistics run() {
    for (const auto& way : ways_) {
      run_.simulation.start("dma " + way->fifo->name, serve_way(run_, *way), true);
    }
    for (const auto& core : cores_) {
      run_.simulation.start("core " + tile_name(core->core->tile), run_core(run_, *core));
    }
    run_.simulation.start("sequence", sequence());
    run_.simulation.run();
    for (const PatchedMove& move : moves_) {
      if (!move.done->is_open()) {
        throw Deadlock("deadlock: " + move.done->describe() + " is never done");
      }
    }
    run_.statistics.dram_busy = run_.dram.busy();
    return std::move(run_.statistics);
  }

 private:
  struct Sides {
    WayEnd from;
    std::vector<WayEnd> to;
  };

  Pool& make_pool(const std::string& name, int depth, int64_t element_bytes,
                  const std::vector<std::string>& producers,
                  const std::vector<std::string>& consumers) {
    pools_.push_back(std::make_unique<Pool>(run_.simulation, name, depth, element_bytes, producers,
                                            consumers, run_.options.functional));
    return *pools_.back();
  }

  std::string at(Tile tile) const { return " at " + tile_name(tile); }

  void make_link(const Link& link) {
    const auto fifo = [&](int i) -> const Fifo& { return program_.fifos[static_cast<size_t>(i)]; };
    const auto ends_here = [&](const End& end) { return end.tile == link.tile; };
    const auto consumer = [&](int i) {
      const auto& ends = fifo(i).consumers;
      return std::find_if(ends.begin(), ends.end(), ends_here) - ends.begin();
    };
    const bool join = link.inputs.size() > 1;
    const Fifo& whole = fifo(join ? link.outputs[0] : link.inputs[0]);
    const int depth = join ? whole.producer.depth
                           : whole.consumers[static_cast<size_t>(consumer(link.inputs[0]))].depth;
    std::vector<std::string> producers, consumers;
    for (const int i : link.inputs) producers.push_back("dma " + fifo(i).name);
    for (const int i : link.outputs) consumers.push_back("dma " + fifo(i).name);
    Pool& pool =
        make_pool(whole.name + at(link.tile), depth, whole.element_bytes, producers, consumers);
    const auto part = [&](size_t i) {
      return i < link.offsets_bytes.size() ? link.offsets_bytes[i] : 0;
    };
    for (size_t i = 0; i < link.inputs.size(); ++i) {
      WayEnd& end = sides_[static_cast<size_t>(link.inputs[i])]
                        .to[static_cast<size_t>(consumer(link.inputs[i]))];
      end.pool = &pool;
      end.side = static_cast<int>(i);
      end.part_offset = join ? part(i) : 0;
    }
    for (size_t i = 0; i < link.outputs.size(); ++i) {
      WayEnd& end = sides_[static_cast<size_t>(link.outputs[i])].from;
      end.pool = &pool;
      end.side = static_cast<int>(i);
      end.part_offset = join ? 0 : part(i);
      repeats_[link.outputs[i]] = link.repeat.value(run_.scalars, {});
    }
  }

  void make_fifo(size_t i) {
    const Fifo& fifo = program_.fifos[i];
    Sides& sides = sides_[i];
    const std::string producer = "core " + tile_name(fifo.producer.tile);
    if (fifo.shared) {
      const std::string consumer = "core " + tile_name(fifo.consumers[0].tile);
      Pool& pool =
          make_pool(fifo.name, fifo.producer.depth, fifo.element_bytes, {producer}, {consumer});
      sides.from.pool = sides.to[0].pool = &pool;
      return;
    }
    const std::string dma = "dma " + fifo.name;
    if (!sides.from.pool && fifo.producer.tile.row != 0) {
      sides.from.pool = &make_pool(fifo.name + at(fifo.producer.tile), fifo.producer.depth,
                                   fifo.element_bytes, {producer}, {dma});
    }
    auto way = std::make_unique<Way>();
    way->fifo = &fifo;
    way->statistics = &run_.statistics.fifos[i];
    way->repeat = repeats_.contains(static_cast<int>(i)) ? repeats_[static_cast<int>(i)] : 1;
    finish(sides.from, fifo, fifo.producer);
    way->from = sides.from;
    for (size_t c = 0; c < fifo.consumers.size(); ++c) {
      const End& end = fifo.consumers[c];
      if (!sides.to[c].pool && end.tile.row != 0) {
        sides.to[c].pool = &make_pool(fifo.name + at(end.tile), end.depth, fifo.element_bytes,
                                      {dma}, {"core " + tile_name(end.tile)});
      }
      finish(sides.to[c], fifo, end);
      way->to.push_back(sides.to[c]);
    }
    way->queue.waiting =
        std::make_unique<Semaphore>(run_.simulation, 0, "a move of the sequence into " + fifo.name);
    way->queue.places = std::make_unique<Semaphore>(run_.simulation, run_.machine.shim.queue_depth,
                                                    "a place in the queue of dma " + fifo.name);
    way_of_fifo_[static_cast<int>(i)] = way.get();
    ways_.push_back(std::move(way));
  }

  void finish(WayEnd& end, const Fifo& fifo, const End& declared) {
    end.row = declared.tile.row;
    end.walk = known(declared.walk, fifo.unit_bytes, 0, fifo.element_bytes, {});
  }

  // Everything of the sequence that can be wrong is, before anything has been written.
  void patch_moves() {
    for (const SequenceStep& step : program_.sequence) {
      const auto* move = std::get_if<Move>(&step);
      if (!move) continue;
      const Argument& argument = program_.arguments[static_cast<size_t>(move->argument)];
      const Fifo& fifo = program_.fifos[static_cast<size_t>(move->fifo)];
      const KnownWalk walk = known(move->walk, move->unit_bytes,
                                   move->offset.value(run_.scalars, {}) * move->unit_bytes,
                                   argument.bytes, run_.scalars);
      const std::string what = program_.name + ": move " + move->name;
      if (walk.begin() < 0 || walk.end() > argument.bytes) {
        throw std::out_of_range(what + " wanted bytes 0 to " + std::to_string(argument.bytes) +
                                " of " + argument.name + ", got " + std::to_string(walk.begin()) +
                                " to " + std::to_string(walk.end()));
      }
      const bool writes = fifo.producer.tile.row != 0 && run_.options.functional;
      moves_.push_back({move->name, move->fifo, walk, move->argument,
                        std::make_unique<Gate>(run_.simulation, "move " + move->name),
                        std::vector<std::byte>(writes ? static_cast<size_t>(walk.bytes()) : 0)});
    }
  }

  void make_core(size_t i) {
    auto core = std::make_unique<CoreRun>();
    core->core = &program_.cores[i];
    core->produces.resize(program_.fifos.size());
    core->consumes.resize(program_.fifos.size());
    for (size_t f = 0; f < program_.fifos.size(); ++f) {
      const Fifo& fifo = program_.fifos[f];
      if (fifo.producer.tile == core->core->tile) core->produces[f] = {sides_[f].from.pool, 0};
      for (size_t c = 0; c < fifo.consumers.size(); ++c) {
        if (fifo.consumers[c].tile == core->core->tile)
          core->consumes[f] = {sides_[f].to[c].pool, 0};
      }
    }
    for (const Scratch& scratch : core->core->scratch) {
      core->scratch.emplace_back(run_.options.functional ? static_cast<size_t>(scratch.bytes) : 0);
    }
    core->statistics = &run_.statistics.cores[i];
    core->statistics->tile = core->core->tile;
    cores_.push_back(std::move(core));
  }

  Process sequence() {
    size_t next = 0;
    for (const SequenceStep& step : program_.sequence) {
      if (const auto* move = std::get_if<Move>(&step)) {
        MoveQueue& queue = way_of_fifo_.at(move->fifo)->queue;
        co_await queue.places->take(1);
        queue.moves.push_back(&moves_[next++]);
        queue.waiting->give(1);
        continue;
      }
      const std::string& name = std::get<Await>(step).move;
      const auto& ignored = run_.options.ignored_awaits;
      if (std::find(ignored.begin(), ignored.end(), name) != ignored.end()) continue;
      co_await moves_[index_of(name)].done->wait();
      land(index_of(name));
    }
    run_.statistics.duration = run_.simulation.now();
  }

  size_t index_of(const std::string& name) const {
    size_t i = 0;
    while (moves_.at(i).name != name) ++i;
    return i;
  }

  // What the move and those before it on its channel have written is in L3 now.
  void land(size_t last) {
    for (size_t i = 0; i <= last; ++i) {
      PatchedMove& move = moves_[i];
      if (move.fifo != moves_[last].fifo || move.written.empty()) continue;
      move.walk.scatter(std::exchange(move.written, {}), 0,
                        run_.arguments[static_cast<size_t>(move.argument)].data());
    }
  }

  Run run_;
  const Program& program_;
  std::vector<Sides> sides_;
  std::map<int, int64_t> repeats_;
  std::vector<std::unique_ptr<Pool>> pools_;
  std::vector<std::unique_ptr<Way>> ways_;
  std::map<int, Way*> way_of_fifo_;
  std::vector<PatchedMove> moves_;
  std::vector<std::unique_ptr<CoreRun>> cores_;
};

}  // namespace

Run::Run(const Program& p, const Machine& m, std::span<const std::span<std::byte>> a,
         std::span<const int64_t> s, const RunOptions& o)
    : program(p),
      machine(m),
      arguments(a),
      scalars(s),
      options(o),
      dram(simulation, m.dram_gb_per_s * 1e-3, "DRAM") {}

void Run::trace(const std::string& track, const std::string& name, Picoseconds begin) {
  if (options.trace) options.trace->push_back({track, name, begin, simulation.now()});
}

Statistics run_on_array(const Program& program, const Machine& machine,
                        std::span<const std::span<std::byte>> arguments,
                        std::span<const int64_t> scalars, const RunOptions& options) {
  Array array(program, machine, arguments, scalars, options);
  return array.run();
}

}  // namespace fasttps::npu::sim
