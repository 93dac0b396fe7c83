#include "../tile_name.h"
#include "fabric.h"

// A core: its body, statement after statement.
namespace fasttps::npu::sim {
namespace {

// A body without its nesting: loops and conditions jump.
struct Instruction {
  enum class Kind { kAcquire, kRelease, kCall, kLoop, kAgain, kIf };
  Kind kind;
  const Acquire* acquire = nullptr;
  const Release* release = nullptr;
  const Call* call = nullptr;
  const Kernel* kernel = nullptr;
  const Expression* expression = nullptr;  // count of a loop, condition of an if
  int index = 0;                           // of a loop
  size_t jump = 0;  // behind the loop or the if; of kAgain: to the loop's first statement
};

void flatten(const Body& body, std::vector<Instruction>& code) {
  using Kind = Instruction::Kind;
  for (const Statement& statement : body) {
    if (const auto* acquire = std::get_if<Acquire>(&statement.what)) {
      code.push_back({.kind = Kind::kAcquire, .acquire = acquire});
    } else if (const auto* release = std::get_if<Release>(&statement.what)) {
      code.push_back({.kind = Kind::kRelease, .release = release});
    } else if (const auto* call = std::get_if<Call>(&statement.what)) {
      code.push_back({.kind = Kind::kCall, .call = call, .kernel = &kernel(call->kernel)});
    } else if (const auto* loop = std::get_if<Loop>(&statement.what)) {
      const size_t at = code.size();
      code.push_back({.kind = Kind::kLoop, .expression = &loop->count, .index = loop->index});
      flatten(loop->body, code);
      code.push_back({.kind = Kind::kAgain, .index = loop->index, .jump = at + 1});
      code[at].jump = code.size();
    } else {
      const auto& condition = std::get<If>(statement.what);
      const size_t at = code.size();
      code.push_back({.kind = Kind::kIf, .expression = &condition.condition});
      flatten(condition.body, code);
      code[at].jump = code.size();
    }
  }
}

template <class T>
T& grown(std::vector<T>& list, int at) {
  if (list.size() <= static_cast<size_t>(at)) list.resize(static_cast<size_t>(at) + 1);
  return list[static_cast<size_t>(at)];
}

}  // namespace

Process run_core(Run& run, CoreRun& core) {
  using Kind = Instruction::Kind;
  std::vector<Instruction> code;
  flatten(core.core->body, code);
  const std::string track = "core " + tile_name(core.core->tile);
  std::vector<int64_t> indices, counts;  // of loops
  std::vector<std::byte*> acquired;
  // Elements of each FIFO that are held, by port.
  std::vector<int64_t> held_produced(core.produces.size()), held_consumed(core.consumes.size());
  std::vector<KernelValue> values;
  const Picoseconds lock = run.cycles(run.machine.core.acquire_cycles);

  for (size_t at = 0; at < code.size(); ++at) {
    const Instruction& now = code[at];
    switch (now.kind) {
      case Kind::kAcquire: {
        const Acquire& what = *now.acquire;
        const auto fifo = static_cast<size_t>(what.fifo);
        const bool produce = what.port == Port::kProduce;
        const CoreSide& side = produce ? core.produces[fifo] : core.consumes[fifo];
        int64_t& held = produce ? held_produced[fifo] : held_consumed[fifo];
        co_await run.simulation.delay(lock);
        const Picoseconds begin = run.simulation.now();
        Semaphore& wanted = produce ? side.pool->free(side.side) : side.pool->full(side.side);
        co_await wanted.take(what.count);
        if (run.simulation.now() > begin) {
          core.statistics->stalled[run.program.fifos[fifo].name + (produce ? " free" : " full")] +=
              run.simulation.now() - begin;
        }
        const int64_t done = produce ? side.pool->filled(side.side) : side.pool->emptied(side.side);
        for (int i = 0; i < what.count; ++i) {
          grown(acquired, what.acquired + i) = side.pool->element(done + held + i);
        }
        held += what.count;
        break;
      }
      case Kind::kRelease: {
        const Release& what = *now.release;
        const auto fifo = static_cast<size_t>(what.fifo);
        co_await run.simulation.delay(lock);
        if (what.port == Port::kProduce) {
          core.produces[fifo].pool->fill(core.produces[fifo].side, what.count);
          held_produced[fifo] -= what.count;
        } else {
          core.consumes[fifo].pool->empty(core.consumes[fifo].side, what.count);
          held_consumed[fifo] -= what.count;
        }
        break;
      }
      case Kind::kCall: {
        values.clear();
        for (const KernelArgument& argument : now.call->arguments) {
          KernelValue value{.memory = nullptr};
          if (const auto* held = std::get_if<Held>(&argument)) {
            std::byte* memory = acquired[static_cast<size_t>(held->acquired)];
            value.memory =
                memory ? memory + held->offset_bytes.value(run.scalars, indices) : nullptr;
          } else if (const auto* scratch = std::get_if<OfScratch>(&argument)) {
            auto& memory = core.scratch[static_cast<size_t>(scratch->scratch)];
            value.memory = memory.empty()
                               ? nullptr
                               : memory.data() + scratch->offset_bytes.value(run.scalars, indices);
          } else {
            value.number = std::get<Expression>(argument).value(run.scalars, indices);
          }
          values.push_back(value);
        }
        const Picoseconds begin = run.simulation.now();
        co_await run.simulation.delay(run.cycles(kernel_cycles(run.machine, *now.kernel, values)));
        if (run.options.functional) now.kernel->run(run.options.numerics, values);
        const Work work = now.kernel->work(values);
        run.statistics.bf16_macs += work.bf16_macs;
        run.statistics.int8_macs += work.int8_macs;
        core.statistics->computing += run.simulation.now() - begin;
        ++core.statistics->calls[now.kernel->name];
        run.trace(track, now.kernel->name, begin);
        break;
      }
      case Kind::kLoop:
        grown(indices, now.index) = 0;
        grown(counts, now.index) = now.expression->value(run.scalars, indices);
        if (counts[static_cast<size_t>(now.index)] <= 0) at = now.jump - 1;
        break;
      case Kind::kAgain: {
        const auto loop = static_cast<size_t>(now.index);
        if (++indices[loop] < counts[loop]) at = now.jump - 1;
        break;
      }
      case Kind::kIf:
        if (now.expression->value(run.scalars, indices) == 0) at = now.jump - 1;
        break;
    }
  }
}

}  // namespace fasttps::npu::sim
