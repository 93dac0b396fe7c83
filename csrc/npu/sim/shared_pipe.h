#pragma once
#include "event.h"

namespace fasttps::npu::sim {

// Bandwidth that transfers share fairly: each gets the same, and what one cannot use for a limit of
// its own goes to the others (max-min fairness, as water fills).
// A transfer of b bytes at rate r takes b / r, rounded up to a picosecond.
class SharedPipe : public Waiting {
 public:
  SharedPipe(Simulation& simulation, double bytes_per_ps, std::string description);
  SharedPipe(const SharedPipe&) = delete;
  SharedPipe& operator=(const SharedPipe&) = delete;

  struct Transfer {
    SharedPipe& pipe;
    double bytes;
    double limit_bytes_per_ps;
    bool await_ready() const { return bytes <= 0; }
    void await_suspend(Process::Handle process) const;
    void await_resume() const noexcept {}
  };
  Transfer transfer(int64_t bytes, double limit_bytes_per_ps) {
    return {*this, static_cast<double>(bytes), limit_bytes_per_ps};
  }
  // Picoseconds in which at least one transfer was under way.
  Picoseconds busy() const { return busy_; }
  std::string describe() const override { return description_; }

 private:
  struct Flow {
    double left_bytes;
    double limit;
    double rate;
    Process::Handle process;
  };

  void add(double bytes, double limit, Process::Handle process);
  void advance();  // what has flowed since the last change
  void share();    // rates, and the event of the next that ends
  void end(uint64_t version);

  Simulation& simulation_;
  double bytes_per_ps_;
  std::string description_;
  std::vector<Flow> flows_;
  Picoseconds last_ = 0;
  Picoseconds busy_ = 0;
  uint64_t version_ = 0;  // of rates: an event of older ones means nothing
};

}  // namespace fasttps::npu::sim
