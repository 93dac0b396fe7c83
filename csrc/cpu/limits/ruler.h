#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "limit_table.h"

// Measures what this machine can do at most, on the same OpenMP threads as the ops. Torch-free.
// Wrong arguments throw std::invalid_argument.
namespace fasttps::cpu {

// Memory of its own for reading, `bytes` long (a multiple of 64), cut into one contiguous part a
// thread; each thread has written its part first, so that a part lies in that thread's memory.
// Its 8-byte words are 0, 1, 2, ...
class ReadBuffer {
 public:
  // huge_pages: asks for 2 MiB pages, or for none; the system may do otherwise.
  ReadBuffer(int64_t bytes, int threads, bool huge_pages);
  ~ReadBuffer();
  ReadBuffer(const ReadBuffer&) = delete;
  ReadBuffer& operator=(const ReadBuffer&) = delete;

  int64_t bytes() const { return bytes_; }

  // Reads all of it `sweeps` times, every thread its own part. The XOR of all words of one sweep.
  // hint: none, all_levels or non_temporal.
  uint64_t read(const std::string& isa, int streams, const std::string& hint,
                int64_t prefetch_bytes, int64_t sweeps) const;

 private:
  uint8_t* part(int thread) const;

  int64_t bytes_;
  int64_t mapped_bytes_;
  int threads_;
  uint8_t* data_;
};

std::vector<std::string> read_isas();  // with read loops that run here, widest first

struct PeakInstruction {
  std::string isa;
  std::string instruction;
};
std::vector<PeakInstruction> peak_instructions();  // that run here

// Operations per second (a product and a sum count two) of `threads` threads, each running the
// instruction for about `seconds`.
double peak_operations_per_s(const std::string& instruction, int threads, double seconds);

// Seconds of one OpenMP region of `threads` threads that does nothing, on average.
double region_seconds(int threads, int64_t regions);

// Seconds of one barrier, spun at, between the threads of a region, on average.
double barrier_seconds(int threads, int64_t barriers);

}  // namespace fasttps::cpu
