#pragma once
#include <algorithm>
#include <cstddef>
#include <memory>
#include <vector>

#include "event.h"

namespace fasttps::npu::sim {

// The memory in which elements of a FIFO lie at a tile, and the locks on it. An element is full
// when each of its producers (several at a join) has filled its part, and free again when each of
// its consumers (several at a distribute) has released it.
class Pool {
 public:
  // names: of producers and consumers, for reports. with_memory: false where only time counts.
  Pool(Simulation& simulation, std::string name, int depth, int64_t element_bytes,
       const std::vector<std::string>& producers, const std::vector<std::string>& consumers,
       bool with_memory)
      : name_(std::move(name)),
        depth_(depth),
        element_bytes_(element_bytes),
        filled_(producers.size()),
        emptied_(consumers.size()) {
    for (const std::string& producer : producers) {
      free_.push_back(std::make_unique<Semaphore>(
          simulation, depth,
          "a free element of " + name_ + " (" + std::to_string(depth) + " deep), which " +
              joined(consumers) + " must release; it is " + producer + "'s to fill"));
    }
    for (size_t i = 0; i < consumers.size(); ++i) {
      full_.push_back(std::make_unique<Semaphore>(
          simulation, 0,
          "a full element of " + name_ + ", which " + joined(producers) + " must fill"));
    }
    if (with_memory) memory_.resize(static_cast<size_t>(depth * element_bytes));
  }

  Semaphore& free(int producer) { return *free_[static_cast<size_t>(producer)]; }
  Semaphore& full(int consumer) { return *full_[static_cast<size_t>(consumer)]; }

  // Element number `index` since the beginning; null without memory.
  std::byte* element(int64_t index) {
    if (memory_.empty()) return nullptr;
    return memory_.data() + index % depth_ * element_bytes_;
  }
  int64_t filled(int producer) const { return filled_[static_cast<size_t>(producer)]; }
  int64_t emptied(int consumer) const { return emptied_[static_cast<size_t>(consumer)]; }

  void fill(int producer, int64_t count) { advance(filled_, producer, count, full_); }
  void empty(int consumer, int64_t count) { advance(emptied_, consumer, count, free_); }

  int64_t element_bytes() const { return element_bytes_; }
  int64_t bytes() const { return depth_ * element_bytes_; }
  const std::string& name() const { return name_; }

 private:
  // What all of them have done is handed to each of the other side.
  static void advance(std::vector<int64_t>& done, int by, int64_t count,
                      std::vector<std::unique_ptr<Semaphore>>& others) {
    const int64_t before = *std::min_element(done.begin(), done.end());
    done[static_cast<size_t>(by)] += count;
    const int64_t more = *std::min_element(done.begin(), done.end()) - before;
    if (more == 0) return;
    for (const auto& other : others) other->give(more);
  }
  static std::string joined(const std::vector<std::string>& names) {
    std::string text;
    for (const std::string& name : names) text += (text.empty() ? "" : " and ") + name;
    return text;
  }

  std::string name_;
  int64_t depth_;
  int64_t element_bytes_;
  std::vector<std::unique_ptr<Semaphore>> free_;  // of each producer
  std::vector<std::unique_ptr<Semaphore>> full_;  // of each consumer
  std::vector<int64_t> filled_;
  std::vector<int64_t> emptied_;
  std::vector<std::byte> memory_;
};

}  // namespace fasttps::npu::sim
