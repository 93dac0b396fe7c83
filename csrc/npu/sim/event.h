#pragma once
#include <coroutine>
#include <cstdint>
#include <deque>
#include <exception>
#include <queue>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

// A discrete-event kernel that knows no machine. What happens is written as coroutines:
//   Process dma(Simulation& sim, Semaphore& full, Semaphore& free, SharedPipe& link) {
//     for (;;) {
//       co_await full.take(1);
//       co_await link.transfer(bytes, rate);
//       free.give(1);
//     }
//   }
// Events of the same time happen in the order in which they were made, so a run repeats exactly.
namespace fasttps::npu::sim {

using Picoseconds = int64_t;

class Simulation;

// A coroutine that a simulation owns once it is started.
class Process {
 public:
  struct promise_type {
    std::string name;
    // What it waits for, where it does not merely let time pass; for reports of deadlocks.
    const class Waiting* waits_for = nullptr;
    Simulation* simulation = nullptr;
    std::exception_ptr error;

    Process get_return_object() { return Process(Handle::from_promise(*this)); }
    std::suspend_always initial_suspend() noexcept { return {}; }
    std::suspend_always final_suspend() noexcept { return {}; }
    void return_void() {}
    void unhandled_exception() { error = std::current_exception(); }
  };
  using Handle = std::coroutine_handle<promise_type>;

  Process(Process&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Process& operator=(Process&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;
  ~Process() {
    if (handle_) handle_.destroy();
  }
  Handle handle() const { return handle_; }

 private:
  explicit Process(Handle handle) : handle_(handle) {}
  Handle handle_;
};

// Something that processes wait for, and who is to bring it about.
class Waiting {
 public:
  virtual ~Waiting() = default;
  virtual std::string describe() const = 0;
};

// Processes are left that nothing will ever wake; says of each what it waits for.
class Deadlock : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class Simulation {
 public:
  // What an event calls.
  using Action = void (*)(void* on, uint64_t argument);

  Picoseconds now() const { return now_; }
  void at(Picoseconds time, Action action, void* on, uint64_t argument = 0);
  void resume_at(Picoseconds time, std::coroutine_handle<> process);

  // `daemon`: one that serves others for ever, and that no deadlock is made of.
  void start(std::string name, Process process, bool daemon = false);
  // Until nothing is left to happen. Rethrows what a process threw; throws Deadlock.
  void run();

  struct Delay {
    Simulation& simulation;
    Picoseconds duration;
    bool await_ready() const noexcept { return duration <= 0; }
    void await_suspend(std::coroutine_handle<> process) const {
      simulation.resume_at(simulation.now() + duration, process);
    }
    void await_resume() const noexcept {}
  };
  Delay delay(Picoseconds duration) { return {*this, duration}; }

 private:
  struct Event {
    Picoseconds time;
    uint64_t order;
    Action action;
    void* on;
    uint64_t argument;
    bool operator>(const Event& other) const {
      return time != other.time ? time > other.time : order > other.order;
    }
  };
  struct Started {
    Process process;
    bool daemon;
  };

  Picoseconds now_ = 0;
  uint64_t made_ = 0;
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  std::vector<Started> processes_;
};

// A count that processes take from, in the order in which they came, and give to.
class Semaphore : public Waiting {
 public:
  // description: what one unit is and who gives it, as in "a full element of K, from dma K".
  Semaphore(Simulation& simulation, int64_t count, std::string description)
      : simulation_(simulation), count_(count), description_(std::move(description)) {}
  Semaphore(const Semaphore&) = delete;
  Semaphore& operator=(const Semaphore&) = delete;

  struct Take {
    Semaphore& semaphore;
    int64_t count;
    bool await_ready() const;
    void await_suspend(Process::Handle process) const;
    void await_resume() const noexcept {}
  };
  Take take(int64_t count) { return {*this, count}; }
  void give(int64_t count);
  int64_t count() const { return count_; }
  std::string describe() const override { return description_; }

 private:
  struct Waiter {
    int64_t count;
    Process::Handle process;
  };
  Simulation& simulation_;
  int64_t count_;
  std::string description_;
  std::deque<Waiter> waiters_;
};

// Closed until it is opened, once.
class Gate : public Waiting {
 public:
  Gate(Simulation& simulation, std::string description)
      : simulation_(simulation), description_(std::move(description)) {}
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;

  struct Wait {
    Gate& gate;
    bool await_ready() const { return gate.open_; }
    void await_suspend(Process::Handle process) const;
    void await_resume() const noexcept {}
  };
  Wait wait() { return {*this}; }
  void open();
  bool is_open() const { return open_; }
  std::string describe() const override { return description_; }

 private:
  Simulation& simulation_;
  std::string description_;
  bool open_ = false;
  std::vector<Process::Handle> waiters_;
};

}  // namespace fasttps::npu::sim
