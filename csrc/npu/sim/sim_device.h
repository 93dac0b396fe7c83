#pragma once
#include <functional>
#include <map>
#include <set>

#include "../device.h"
#include "array.h"

namespace fasttps::npu::sim {

struct SimOptions {
  bool functional = true;
  Numerics numerics;  // generation: as the machine's
  bool trace = false;
  // Ids of syncs and awaits that are ignored; the environment's FASTTPS_SIM_DROP adds one.
  std::set<std::string> dropped;
};

// One call of a design, as the host sees it.
struct RunRecord {
  std::string design;
  Picoseconds begin;       // when the host called
  Picoseconds dispatched;  // when the first move began: after dispatch, and a design's switch
  Picoseconds end = 0;
  bool switched = false;
  Statistics statistics;
};

// The machine of a JSON file as a Device. Host and array each see memory of their own until a sync
// copies between them. Time passes as calls and syncs say, not as the host's clock does.
class SimDevice : public Device {
 public:
  explicit SimDevice(Machine machine, SimOptions options = {});

  std::unique_ptr<Buffer> allocate(int64_t bytes) override;
  std::unique_ptr<Design> load(const Program& program) override;

  // Work of the host between calls, as Concat on the CPU: `bytes` read and written.
  void host_copies(int64_t bytes);

  Picoseconds now() const { return now_; }
  const std::vector<RunRecord>& runs() const { return runs_; }
  const std::vector<TraceEvent>& trace() const { return trace_; }
  // Every sync and await that was met, whether ignored or not: <sync's id>, <program>.<move>.
  const std::set<std::string>& fences() const { return fences_; }
  const Machine& machine() const { return machine_; }
  const SimOptions& options() const { return options_; }

  // For buffers and designs: whether the fence counts, and the time of what they do.
  bool meets(const std::string& fence);
  void synced(int64_t bytes);
  void ran(const Program& program, std::span<const std::span<std::byte>> arguments,
           std::span<const int64_t> scalars);

 private:
  Machine machine_;
  SimOptions options_;
  Picoseconds now_ = 0;
  std::string last_design_;
  std::vector<RunRecord> runs_;
  std::vector<TraceEvent> trace_;
  std::set<std::string> fences_;
};

}  // namespace fasttps::npu::sim
