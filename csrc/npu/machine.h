#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

// What is known of an array of tiles. Every number stands in machines/<name>.json with its unit and
// its source; a missing or unknown key throws.
namespace fasttps::npu {

// The DMA and the memory of one kind of tile.
struct TileSpec {
  int64_t memory_bytes;
  int64_t channels_in;   // stream to memory (S2MM)
  int64_t channels_out;  // memory to stream (MM2S)
  int64_t buffer_descriptors;
  int64_t locks;
  int64_t dimensions;  // of a walk
};

struct CoreSpec : TileSpec {
  int64_t program_bytes;
  int64_t bf16_macs_per_cycle;
  int64_t int8_macs_per_cycle;
  int64_t vector_lanes;    // elementwise bf16 operations a cycle
  int64_t exp_lanes;       // exponentials a cycle
  bool exp_in_hardware;    // else two tables
  int64_t call_cycles;     // of a kernel's call: prologue, pipeline's fill and drain
  int64_t acquire_cycles;  // of a lock
};

struct ShimSpec : TileSpec {
  int64_t queue_depth;  // moves that wait at a channel
};

// Picojoules an event. Estimates: see the source of each.
struct EnergySpec {
  double dram_pj_per_byte;
  double stream_pj_per_byte;  // a hop between two tiles
  double memory_pj_per_byte;  // read or written in L1 or L2
  double mac_bf16_pj;
  double mac_int8_pj;
  double static_mw;
};

struct Machine {
  std::string name;
  std::string title;
  int columns;
  int shim_columns;  // columns 0 and up whose shims have DMAs
  int core_rows;     // rows 2 and up
  double clock_mhz;  // of cores, streams and DMAs
  CoreSpec core;
  TileSpec mem_tile;
  ShimSpec shim;
  int64_t stream_bytes_per_cycle;
  int64_t stream_latency_cycles;  // a hop, first byte
  double dram_gb_per_s;           // 1e9 bytes; of all shims together
  double dram_gb_per_s_per_channel;
  double dram_latency_ns;
  double dispatch_us;         // from the host's call to the first move
  double design_switch_us;    // to another design than the last
  double sync_us_per_mb;      // host cache flush or invalidate
  double host_copy_gb_per_s;  // bytes read and written by the CPU, as Concat does

  EnergySpec energy;
  // Cycles of one call that somebody measured, instead of what the rates say.
  std::map<std::string, int64_t> kernel_cycles;

  bool is_core(int row) const { return row >= 2 && row < 2 + core_rows; }
};

// The text of a machine's JSON; overlay: numbers of machines/fits that replace it, in the same
// form. Throws std::invalid_argument that names the key.
Machine parse_machine(std::string_view json, std::string_view overlay = "");

// One that comes with the library: xdna1, xdna2, toy. Throws std::invalid_argument with their
// names.
Machine named_machine(const std::string& name, const std::string& fit = "");
std::vector<std::string> machine_names();

}  // namespace fasttps::npu
