#include <algorithm>
#include <cmath>

#include "fabric.h"

// DMAs: from memory over streams to memory.
namespace fasttps::npu::sim {
namespace {

bool in_l3(const WayEnd& end) { return end.pool == nullptr; }

void count_read(Statistics& statistics, const WayEnd& end, int64_t bytes) {
  (end.row == 0   ? statistics.l3_read_bytes
   : end.row == 1 ? statistics.l2_read_bytes
                  : statistics.l1_read_bytes) += bytes;
}

void count_written(Statistics& statistics, const WayEnd& end, int64_t bytes) {
  (end.row == 0   ? statistics.l3_written_bytes
   : end.row == 1 ? statistics.l2_written_bytes
                  : statistics.l1_written_bytes) += bytes;
}

void count(Run& run, Way& way) {
  const int64_t bytes = way.fifo->element_bytes;
  Statistics& statistics = run.statistics;
  count_read(statistics, way.from, bytes);
  for (const WayEnd& to : way.to) count_written(statistics, to, bytes);
  statistics.stream_bytes += bytes * static_cast<int64_t>(way.to.size());
  ++way.statistics->elements;
  way.statistics->bytes += bytes;
}

std::byte* part(const WayEnd& end, int64_t element) {
  std::byte* memory = end.pool->element(element);
  return memory ? memory + end.part_offset : nullptr;
}

// Between L3 and a pool, at the rate of the stream or less where others want the DRAM too.
double channel_bytes_per_ps(const Run& run) {
  return std::min(run.stream_bytes_per_ps(), run.machine.dram_gb_per_s_per_channel * 1e-3);
}

Picoseconds on_the_way(const Run& run, int64_t bytes) {
  return static_cast<Picoseconds>(
      std::ceil(static_cast<double>(bytes) / run.stream_bytes_per_ps() - 1e-6));
}

// What has come, into every consumer's memory.
void deliver(Run& run, Way& way, std::span<const std::byte> stream) {
  for (WayEnd& to : way.to) {
    if (run.options.functional) to.walk->scatter(stream, 0, part(to, to.pool->filled(to.side)));
    to.pool->fill(to.side, 1);
  }
}

void finish_element(Run& run, Way& way, Picoseconds begin) {
  count(run, way);
  way.statistics->sending += run.simulation.now() - begin;
  run.trace("dma " + way.fifo->name, way.fifo->name, begin);
}

// Between memories of tiles: an element after the other, for ever.
Process serve_stream(Run& run, Way& way) {
  const int64_t bytes = way.fifo->element_bytes;
  const bool functional = run.options.functional;
  std::vector<std::byte> stream(functional ? static_cast<size_t>(bytes) : 0);
  const Picoseconds first_byte = run.cycles(run.machine.stream_latency_cycles);
  for (;;) {
    co_await way.from.pool->full(way.from.side).take(1);
    for (int64_t sent = 0; sent < way.repeat; ++sent) {
      for (WayEnd& to : way.to) co_await to.pool->free(to.side).take(1);
      const Picoseconds begin = run.simulation.now();
      if (functional) {
        way.from.walk->gather(part(way.from, way.from.pool->emptied(way.from.side)), 0, stream);
      }
      co_await run.simulation.delay(first_byte + on_the_way(run, bytes));
      deliver(run, way, stream);
      finish_element(run, way, begin);
    }
    way.from.pool->empty(way.from.side, 1);
  }
}

// From or to L3: elements are cut from the bytes of all moves, one move after the other.
Process serve_moves(Run& run, Way& way) {
  const int64_t bytes = way.fifo->element_bytes;
  const bool functional = run.options.functional, reads = in_l3(way.from);
  std::vector<std::byte> stream(functional ? static_cast<size_t>(bytes) : 0);
  const Picoseconds first_byte = run.cycles(run.machine.stream_latency_cycles) +
                                 std::llround(run.machine.dram_latency_ns * 1e3);
  PatchedMove* move = nullptr;
  int64_t moved = 0;  // of the move
  for (;;) {
    Picoseconds begin = -1;
    for (int64_t done = 0; done < bytes;) {
      if (move == nullptr) {
        co_await way.queue.waiting->take(1);
        move = way.queue.moves.front();
        moved = 0;
        co_await run.simulation.delay(first_byte);
      }
      if (begin < 0) {
        if (!reads) co_await way.from.pool->full(way.from.side).take(1);
        for (WayEnd& to : way.to) {
          if (!in_l3(to)) co_await to.pool->free(to.side).take(1);
        }
        begin = run.simulation.now();
        if (functional && !reads) {
          way.from.walk->gather(part(way.from, way.from.pool->emptied(way.from.side)), 0, stream);
        }
      }
      const int64_t count = std::min(bytes - done, move->walk.bytes() - moved);
      const auto chunk = functional ? std::span(stream).subspan(static_cast<size_t>(done),
                                                                static_cast<size_t>(count))
                                    : std::span<std::byte>();
      if (functional && reads) {
        move->walk.gather(run.arguments[static_cast<size_t>(move->argument)].data(), moved, chunk);
      }
      co_await run.dram.transfer(count, channel_bytes_per_ps(run));
      if (functional && !reads) {
        std::copy(chunk.begin(), chunk.end(), move->written.begin() + moved);
      }
      done += count;
      moved += count;
      if (moved < move->walk.bytes()) continue;
      move->done->open();
      way.queue.moves.pop_front();
      way.queue.places->give(1);
      move = nullptr;
    }
    if (reads) deliver(run, way, stream);
    finish_element(run, way, begin);
    if (!reads) way.from.pool->empty(way.from.side, 1);
  }
}

}  // namespace

Process serve_way(Run& run, Way& way) {
  const bool with_l3 = in_l3(way.from) || in_l3(way.to.front());
  return with_l3 ? serve_moves(run, way) : serve_stream(run, way);
}

}  // namespace fasttps::npu::sim
