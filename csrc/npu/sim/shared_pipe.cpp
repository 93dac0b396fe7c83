#include "shared_pipe.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace fasttps::npu::sim {
namespace {

// Less than a byte that may be left of a transfer when its last picosecond is over.
constexpr double kNothing = 1e-6;

}  // namespace

SharedPipe::SharedPipe(Simulation& simulation, double bytes_per_ps, std::string description)
    : simulation_(simulation), bytes_per_ps_(bytes_per_ps), description_(std::move(description)) {
  if (!(bytes_per_ps > 0)) throw std::invalid_argument("SharedPipe: wanted a bandwidth above 0");
}

void SharedPipe::Transfer::await_suspend(Process::Handle process) const {
  process.promise().waits_for = &pipe;
  pipe.add(bytes, limit_bytes_per_ps, process);
}

void SharedPipe::add(double bytes, double limit, Process::Handle process) {
  if (!(limit > 0)) throw std::invalid_argument("SharedPipe: wanted a limit above 0");
  advance();
  flows_.push_back({bytes, limit, 0, process});
  share();
}

void SharedPipe::advance() {
  const Picoseconds passed = simulation_.now() - last_;
  last_ = simulation_.now();
  if (flows_.empty() || passed == 0) return;
  busy_ += passed;
  for (Flow& flow : flows_) flow.left_bytes -= flow.rate * static_cast<double>(passed);
}

void SharedPipe::share() {
  ++version_;
  if (flows_.empty()) return;
  // Those with the least limit first: what they leave is shared by the rest.
  std::vector<Flow*> order;
  order.reserve(flows_.size());
  for (Flow& flow : flows_) order.push_back(&flow);
  std::stable_sort(order.begin(), order.end(),
                   [](const Flow* a, const Flow* b) { return a->limit < b->limit; });
  double left = bytes_per_ps_;
  double first = std::numeric_limits<double>::infinity();
  for (size_t i = 0; i < order.size(); ++i) {
    Flow& flow = *order[i];
    flow.rate = std::min(flow.limit, left / static_cast<double>(order.size() - i));
    left -= flow.rate;
    first = std::min(first, std::max(flow.left_bytes, 0.0) / flow.rate);
  }
  const auto wait = static_cast<Picoseconds>(std::ceil(first - kNothing));
  simulation_.at(
      simulation_.now() + std::max<Picoseconds>(wait, 0),
      [](void* on, uint64_t version) { static_cast<SharedPipe*>(on)->end(version); }, this,
      version_);
}

void SharedPipe::end(uint64_t version) {
  if (version != version_) return;
  advance();
  std::vector<Process::Handle> done;
  std::erase_if(flows_, [&](const Flow& flow) {
    const bool ended = flow.left_bytes <= kNothing + flow.rate * 1e-3;
    if (ended) done.push_back(flow.process);
    return ended;
  });
  share();
  for (const Process::Handle process : done) {
    process.promise().waits_for = nullptr;
    simulation_.resume_at(simulation_.now(), process);
  }
}

}  // namespace fasttps::npu::sim
