#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>

#include "program.h"

namespace fasttps::npu {

// A program, or a shape, that this machine cannot run, with the reason. Only this may send an op to
// another device; a wrong call is a std::invalid_argument.
class Incompatible : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Memory in DRAM that both host and array reach, each through caches of its own: what one wrote,
// the other sees after the sync between, and not before it.
class Buffer {
 public:
  virtual ~Buffer() = default;
  virtual int64_t bytes() const = 0;
  // What the host sees.
  virtual std::byte* host() = 0;
  // `id` names the sync in reports; FASTTPS_SIM_DROP=<id> makes the simulator ignore it.
  virtual void sync_to_device(int64_t offset_bytes, int64_t bytes, const std::string& id) = 0;
  virtual void sync_from_device(int64_t offset_bytes, int64_t bytes, const std::string& id) = 0;
};

// A program that was loaded.
class Design {
 public:
  virtual ~Design() = default;
  // One call, done on return. arguments: in the program's order, each of its size at least.
  // Throws std::invalid_argument, before anything is written, where they do not fit the program.
  virtual void run(std::span<Buffer* const> arguments, std::span<const int64_t> scalars) = 0;
};

// Where programs run: the simulator, or an NPU through XRT.
class Device {
 public:
  virtual ~Device() = default;
  virtual std::unique_ptr<Buffer> allocate(int64_t bytes) = 0;
  // Throws Incompatible where the program breaks a limit of the machine.
  virtual std::unique_ptr<Design> load(const Program& program) = 0;
};

}  // namespace fasttps::npu
