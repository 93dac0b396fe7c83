#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "../program.h"
#include "event.h"

// What a run did and how long it took: apart from the machine's parameters, which do not change.
namespace fasttps::npu::sim {

struct CoreStatistics {
  Tile tile;
  Picoseconds computing = 0;
  std::map<std::string, Picoseconds> stalled;  // by what it waited for: "K full", "O free"
  std::map<std::string, int64_t> calls;        // of each kernel
};

struct FifoStatistics {
  std::string name;
  int64_t elements = 0;  // sent; to several consumers at once, once
  int64_t bytes = 0;
  Picoseconds sending = 0;
};

struct Statistics {
  Picoseconds duration = 0;
  int64_t l3_read_bytes = 0;
  int64_t l3_written_bytes = 0;
  int64_t l2_read_bytes = 0;  // by DMAs of mem tiles, as often as an element is sent
  int64_t l2_written_bytes = 0;
  int64_t l1_read_bytes = 0;  // by DMAs of cores
  int64_t l1_written_bytes = 0;
  int64_t stream_bytes = 0;  // over all links: a broadcast to n tiles counts n times
  int64_t bf16_macs = 0;
  int64_t int8_macs = 0;
  Picoseconds dram_busy = 0;
  double energy_uj = 0;
  std::vector<CoreStatistics> cores;
  std::vector<FifoStatistics> fifos;
};

// An interval of a tile or channel, for Chrome's and Perfetto's trace viewer.
struct TraceEvent {
  std::string track;
  std::string name;
  Picoseconds begin;
  Picoseconds end;
};

// The JSON of Chrome's trace format: complete events, times in microseconds.
std::string trace_json(const std::vector<TraceEvent>& events);

}  // namespace fasttps::npu::sim
