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

}  // namespace

Process serve_way(Run& run, Way& way) {
  const int64_t bytes = way.fifo->element_bytes;
  const bool functional = run.options.functional;
  std::vector<std::byte> stream(functional ? static_cast<size_t>(bytes) : 0);
  const bool with_l3 = in_l3(way.from) || in_l3(way.to.front());
  const Picoseconds first_byte =
      run.cycles(run.machine.stream_latency_cycles) +
      (with_l3 ? static_cast<Picoseconds>(run.machine.dram_latency_ns * 1e3 + 0.5) : 0);
  for (;;) {
    // Moves tell of L3 what to do and how much; elsewhere a DMA goes on for ever.
    PatchedMove* move = nullptr;
    int64_t elements = 1;
    if (with_l3) {
      co_await way.queue.waiting->take(1);
      move = way.queue.moves.front();
      elements = move->walk.bytes() / bytes;
      co_await run.simulation.delay(first_byte);
    }
    for (int64_t e = 0; e < elements; ++e) {
      if (!in_l3(way.from)) co_await way.from.pool->full(way.from.side).take(1);
      for (int64_t sent = 0; sent < way.repeat; ++sent) {
        for (WayEnd& to : way.to) {
          if (!in_l3(to)) co_await to.pool->free(to.side).take(1);
        }
        const Picoseconds begin = run.simulation.now();
        if (functional && in_l3(way.from)) {
          move->walk.gather(run.arguments[static_cast<size_t>(move->argument)].data(), e * bytes,
                            stream);
        } else if (functional) {
          way.from.walk->gather(part(way.from, way.from.pool->emptied(way.from.side)), 0, stream);
        }
        if (with_l3) {
          co_await run.dram.transfer(bytes, channel_bytes_per_ps(run));
        } else {
          co_await run.simulation.delay(first_byte + on_the_way(run, bytes));
        }
        for (WayEnd& to : way.to) {
          if (in_l3(to)) {
            if (functional) {
              std::copy(stream.begin(), stream.end(), move->written.begin() + e * bytes);
            }
            continue;
          }
          if (functional) to.walk->scatter(stream, 0, part(to, to.pool->filled(to.side)));
          to.pool->fill(to.side, 1);
        }
        count(run, way);
        way.statistics->sending += run.simulation.now() - begin;
        run.trace("dma " + way.fifo->name, move ? move->name : way.fifo->name, begin);
      }
      if (!in_l3(way.from)) way.from.pool->empty(way.from.side, 1);
    }
    if (with_l3) {
      move->done->open();
      way.queue.moves.pop_front();
      way.queue.places->give(1);
    }
  }
}

}  // namespace fasttps::npu::sim
