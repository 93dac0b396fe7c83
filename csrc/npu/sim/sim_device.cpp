#include "sim_device.h"

#include <cmath>
#include <cstdlib>
#include <cstring>

#include "../validate.h"

namespace fasttps::npu::sim {
namespace {

Picoseconds from_us(double us) { return std::llround(us * 1e6); }

double energy_uj(const EnergySpec& spec, const Statistics& run) {
  const auto bytes = [](int64_t count) { return static_cast<double>(count); };
  const double pj = spec.dram_pj_per_byte * bytes(run.l3_read_bytes + run.l3_written_bytes) +
                    spec.stream_pj_per_byte * bytes(run.stream_bytes) +
                    spec.memory_pj_per_byte * bytes(run.l2_read_bytes + run.l2_written_bytes +
                                                    run.l1_read_bytes + run.l1_written_bytes) +
                    spec.mac_bf16_pj * static_cast<double>(run.bf16_macs) +
                    spec.mac_int8_pj * static_cast<double>(run.int8_macs) +
                    spec.static_mw * 1e-3 * static_cast<double>(run.duration);  // mW ps = 1e-3 pJ
  return pj * 1e-6;
}

class SimBuffer : public Buffer {
 public:
  // What a host or a device has never been given is no zero to rely on.
  static constexpr unsigned char kUnwritten = 0xcd;

  SimBuffer(SimDevice& device, int64_t bytes)
      : device_(device),
        host_(static_cast<size_t>(bytes), std::byte{kUnwritten}),
        array_(device.options().functional ? static_cast<size_t>(bytes) : 0,
               std::byte{kUnwritten}) {}

  int64_t bytes() const override { return static_cast<int64_t>(host_.size()); }
  std::byte* host() override { return host_.data(); }
  std::span<std::byte> array() { return array_; }

  void sync_to_device(int64_t offset_bytes, int64_t bytes, const std::string& id) override {
    copy(host_.data(), array_.data(), offset_bytes, bytes, id);
  }
  void sync_from_device(int64_t offset_bytes, int64_t bytes, const std::string& id) override {
    copy(array_.data(), host_.data(), offset_bytes, bytes, id);
  }

 private:
  void copy(const std::byte* from, std::byte* to, int64_t offset_bytes, int64_t bytes,
            const std::string& id) {
    if (offset_bytes < 0 || bytes < 0 || offset_bytes > this->bytes() - bytes) {
      throw std::invalid_argument("sync " + id + ": wanted bytes within 0 to " +
                                  std::to_string(this->bytes()) + ", got " + std::to_string(bytes) +
                                  " from " + std::to_string(offset_bytes) + " on");
    }
    if (!device_.meets(id)) return;
    device_.synced(bytes);
    if (device_.options().functional && bytes > 0) {
      std::memcpy(to + offset_bytes, from + offset_bytes, static_cast<size_t>(bytes));
    }
  }

  SimDevice& device_;
  std::vector<std::byte> host_;
  std::vector<std::byte> array_;
};

class SimDesign : public Design {
 public:
  SimDesign(SimDevice& device, const Program& program) : device_(device), program_(program) {}

  void run(std::span<Buffer* const> arguments, std::span<const int64_t> scalars) override {
    if (arguments.size() != program_.arguments.size()) {
      throw std::invalid_argument(program_.name + ": wanted " +
                                  std::to_string(program_.arguments.size()) + " buffers, got " +
                                  std::to_string(arguments.size()));
    }
    if (scalars.size() != program_.scalars.size()) {
      throw std::invalid_argument(program_.name + ": wanted " +
                                  std::to_string(program_.scalars.size()) + " scalars, got " +
                                  std::to_string(scalars.size()));
    }
    std::vector<std::span<std::byte>> memory;
    for (size_t i = 0; i < arguments.size(); ++i) {
      auto* buffer = dynamic_cast<SimBuffer*>(arguments[i]);
      const Argument& wanted = program_.arguments[i];
      if (!buffer) {
        throw std::invalid_argument(program_.name + ": " + wanted.name +
                                    " wanted a buffer of the simulator, got another");
      }
      if (buffer->bytes() < wanted.bytes) {
        throw std::invalid_argument(program_.name + ": " + wanted.name + " wanted " +
                                    std::to_string(wanted.bytes) + " bytes, got " +
                                    std::to_string(buffer->bytes()));
      }
      memory.push_back(buffer->array());
    }
    device_.ran(program_, memory, scalars);
  }

 private:
  SimDevice& device_;
  Program program_;
};

}  // namespace

SimDevice::SimDevice(Machine machine, SimOptions options)
    : machine_(std::move(machine)), options_(std::move(options)) {
  options_.numerics.generation =
      machine_.core.exp_in_hardware ? Generation::kAie2p : Generation::kAie2;
  if (const char* drop = std::getenv("FASTTPS_SIM_DROP")) options_.dropped.insert(drop);
}

std::unique_ptr<Buffer> SimDevice::allocate(int64_t bytes) {
  if (bytes < 0) {
    throw std::invalid_argument("allocate: wanted 0 bytes or more, got " + std::to_string(bytes));
  }
  return std::make_unique<SimBuffer>(*this, bytes);
}

std::unique_ptr<Design> SimDevice::load(const Program& program) {
  validate(program, machine_);
  return std::make_unique<SimDesign>(*this, program);
}

void SimDevice::host_copies(int64_t bytes) {
  now_ +=
      static_cast<Picoseconds>(static_cast<double>(bytes) / (machine_.host_copy_gb_per_s * 1e-3));
}

bool SimDevice::meets(const std::string& fence) {
  fences_.insert(fence);
  return !options_.dropped.contains(fence);
}

void SimDevice::synced(int64_t bytes) {
  now_ += from_us(machine_.sync_us_per_mb * static_cast<double>(bytes) * 1e-6);
}

void SimDevice::ran(const Program& program, std::span<const std::span<std::byte>> arguments,
                    std::span<const int64_t> scalars) {
  RunOptions options;
  options.functional = options_.functional;
  options.numerics = options_.numerics;
  std::vector<TraceEvent> events;
  if (options_.trace) options.trace = &events;
  for (const SequenceStep& step : program.sequence) {
    const auto* await = std::get_if<Await>(&step);
    if (await && !meets(program.name + "." + await->move)) {
      options.ignored_awaits.push_back(await->move);
    }
  }
  RunRecord record;
  record.design = program.name;
  record.begin = now_;
  record.switched = last_design_ != program.name;
  record.statistics = run_on_array(program, machine_, arguments, scalars, options);
  record.statistics.energy_uj = energy_uj(machine_.energy, record.statistics);
  record.dispatched =
      now_ + from_us(machine_.dispatch_us + (record.switched ? machine_.design_switch_us : 0));
  record.end = record.dispatched + record.statistics.duration;
  for (TraceEvent& event : events) {
    event.begin += record.dispatched;
    event.end += record.dispatched;
    trace_.push_back(std::move(event));
  }
  if (options_.trace) trace_.push_back({"host", program.name, record.begin, record.end});
  now_ = record.end;
  last_design_ = program.name;
  runs_.push_back(std::move(record));
}

}  // namespace fasttps::npu::sim
