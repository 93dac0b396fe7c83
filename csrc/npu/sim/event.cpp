#include "event.h"

#include <sstream>

namespace fasttps::npu::sim {

void Simulation::at(Picoseconds time, Action action, void* on, uint64_t argument) {
  if (time < now_) throw std::logic_error("simulation: an event in the past");
  events_.push({time, made_++, action, on, argument});
}

void Simulation::resume_at(Picoseconds time, std::coroutine_handle<> process) {
  const Action resume = [](void* on, uint64_t) {
    std::coroutine_handle<>::from_address(on).resume();
  };
  at(time, resume, process.address());
}

void Simulation::start(std::string name, Process process, bool daemon) {
  Process::promise_type& promise = process.handle().promise();
  promise.name = std::move(name);
  promise.simulation = this;
  resume_at(now_, process.handle());
  processes_.push_back({std::move(process), daemon});
}

void Simulation::run() {
  while (!events_.empty()) {
    const Event event = events_.top();
    events_.pop();
    now_ = event.time;
    event.action(event.on, event.argument);
  }
  std::ostringstream left;
  for (const Started& started : processes_) {
    const Process::Handle handle = started.process.handle();
    if (handle.promise().error) std::rethrow_exception(handle.promise().error);
    if (handle.done() || started.daemon) continue;
    left << "\n  " << handle.promise().name << " waits for "
         << (handle.promise().waits_for ? handle.promise().waits_for->describe() : "nothing known");
  }
  const std::string text = left.str();
  if (text.empty()) return;
  // A daemon that waits is why the others do, where it has begun something.
  for (const Started& started : processes_) {
    const Process::Handle handle = started.process.handle();
    if (!started.daemon || handle.done() || !handle.promise().waits_for) continue;
    left << "\n  " << handle.promise().name << " waits for "
         << handle.promise().waits_for->describe();
  }
  throw Deadlock("deadlock at " + std::to_string(now_) + " ps:" + left.str());
}

bool Semaphore::Take::await_ready() const {
  // Those that came before go first.
  if (!semaphore.waiters_.empty() || semaphore.count_ < count) return false;
  semaphore.count_ -= count;
  return true;
}

void Semaphore::Take::await_suspend(Process::Handle process) const {
  process.promise().waits_for = &semaphore;
  semaphore.waiters_.push_back({count, process});
}

void Semaphore::give(int64_t count) {
  count_ += count;
  while (!waiters_.empty() && waiters_.front().count <= count_) {
    const Waiter waiter = waiters_.front();
    waiters_.pop_front();
    count_ -= waiter.count;
    waiter.process.promise().waits_for = nullptr;
    simulation_.resume_at(simulation_.now(), waiter.process);
  }
}

void Gate::Wait::await_suspend(Process::Handle process) const {
  process.promise().waits_for = &gate;
  gate.waiters_.push_back(process);
}

void Gate::open() {
  open_ = true;
  for (const Process::Handle process : std::exchange(waiters_, {})) {
    process.promise().waits_for = nullptr;
    simulation_.resume_at(simulation_.now(), process);
  }
}

}  // namespace fasttps::npu::sim
