#include "npu/ops/matvec.h"

#include <gmock/gmock.h>

#include <cmath>

#include "bf16.h"
#include "npu/call.h"
#include "npu/ops/gate_up_silu_mlp.h"
#include "npu/ops/matvec_weights.h"
#include "npu/ops/packed_linear.h"
#include "npu/sim/sim_device.h"
#include "npu/validate.h"

// The gated MLP and linear layers of one token.
namespace fasttps::npu {
namespace {

using ::testing::HasSubstr;

// A matrix and its float64 values: bf16, or 4 bits with scales.
struct Matrix {
  int64_t rows, cols;
  std::vector<bfloat16> values;  // bf16
  std::vector<uint8_t> quants;   // int4, two in a byte
  std::vector<bfloat16> scales;
  std::vector<double> exact;

  MatvecWeight weight() const {
    if (quants.empty()) return {std::as_bytes(std::span(values)), {}};
    return {std::as_bytes(std::span(quants)), std::as_bytes(std::span(scales))};
  }
};

Matrix random_matrix(int64_t rows, int64_t cols, TileFormat format, int64_t group, unsigned seed) {
  const float scale = 1.0f / std::sqrt(static_cast<float>(cols));
  Matrix made{rows, cols, {}, {}, {}, std::vector<double>(static_cast<size_t>(rows * cols))};
  if (format == TileFormat::kBf16) {
    made.values = random_bf16(made.exact.size(), seed, scale);
    for (size_t i = 0; i < made.exact.size(); ++i) made.exact[i] = made.values[i];
    return made;
  }
  std::mt19937 generator(seed);
  made.quants.resize(made.exact.size() / 2);
  for (uint8_t& pair : made.quants) pair = static_cast<uint8_t>(generator());
  made.scales = random_bf16(made.exact.size() / static_cast<size_t>(group), seed + 1, scale / 4);
  for (size_t i = 0; i < made.exact.size(); ++i) {
    const uint8_t pair = made.quants[i / 32 * 16 + i % 16];
    const int quant = i % 32 < 16 ? pair & 15 : pair >> 4;
    made.exact[i] = (quant - 8) * double{made.scales[i / static_cast<size_t>(group)]};
  }
  return made;
}

std::vector<double> product(const Matrix& matrix, const std::vector<double>& x) {
  std::vector<double> y(static_cast<size_t>(matrix.rows));
  for (int64_t r = 0; r < matrix.rows; ++r) {
    for (int64_t c = 0; c < matrix.cols; ++c) {
      y[static_cast<size_t>(r)] +=
          matrix.exact[static_cast<size_t>(r * matrix.cols + c)] * x[static_cast<size_t>(c)];
    }
  }
  return y;
}

struct MlpCase {
  GateUpSiluMlpSizes sizes;
  LoweredMatvec lowered;
  std::vector<bfloat16> x;
  Matrix gate_up, down;

  MlpCase(const GateUpSiluMlpSizes& made_of, const Machine& machine)
      : sizes(made_of),
        lowered(lower_gate_up_silu_mlp(sizes, machine)),
        x(random_bf16(static_cast<size_t>(sizes.hidden_size), 1)),
        gate_up(random_matrix(2 * sizes.intermediate_size, sizes.hidden_size, sizes.format,
                              sizes.group_size, 2)),
        down(random_matrix(sizes.hidden_size, sizes.intermediate_size, sizes.format,
                           sizes.group_size, 3)) {}

  MatvecPhase phase(bool is_down) const {
    MatvecPhase made;
    made.rows = is_down ? down.rows : gate_up.rows;
    made.cols = is_down ? down.cols : gate_up.cols;
    made.gated = !is_down;
    return made;
  }

  std::vector<double> run(Device& device, const Program& program) const {
    std::vector<std::unique_ptr<Buffer>> buffers;
    std::vector<Buffer*> arguments;
    for (const Argument& argument : program.arguments) {
      buffers.push_back(device.allocate(argument.bytes));
      std::fill_n(buffers.back()->host(), argument.bytes, std::byte{0});
      arguments.push_back(buffers.back().get());
    }
    std::copy(x.begin(), x.end(), bf16_of(*buffers[0]));
    for (const bool is_down : {false, true}) {
      Buffer& buffer = *buffers[is_down ? 2 : 1];
      pack_matvec(phase(is_down), lowered.tiling, (is_down ? down : gate_up).weight(),
                  {buffer.host(), static_cast<size_t>(buffer.bytes())});
    }
    const auto design = device.load(program);
    call(*design, program, arguments, {});
    std::vector<double> y(static_cast<size_t>(sizes.hidden_size));
    for (size_t i = 0; i < y.size(); ++i) y[i] = bf16_of(*buffers[4])[i];
    return y;
  }

  // silu(gate x) * (up x) is rounded to bf16 on its way through L3, as in any bf16 model.
  std::vector<double> expected() const {
    const std::vector<double> both = product(gate_up, {x.begin(), x.end()});
    std::vector<double> inner(static_cast<size_t>(sizes.intermediate_size));
    for (size_t i = 0; i < inner.size(); ++i) {
      const double gate = both[i], up = both[inner.size() + i];
      inner[i] = nearest_bf16(gate / (1 + std::exp(-gate)) * up);
    }
    return product(down, inner);
  }

  // The result's own rounding, half a unit of 8 bits, and one of inner's elements rounded the other
  // way now and then: sums of float32 in another order differ by less than that.
  bool right(const std::vector<double>& y) const {
    const std::vector<double> wanted = expected();
    double norm = 0;
    for (const double value : wanted) norm += value * value / static_cast<double>(wanted.size());
    for (size_t i = 0; i < y.size(); ++i) {
      const double most = std::ldexp(std::abs(wanted[i]), -8) + 2e-3 * std::sqrt(norm);
      if (!(std::abs(y[i] - wanted[i]) <= most)) return false;
    }
    return true;
  }
};

struct Shape {
  const char* machine;
  int64_t hidden_size, intermediate_size;
  TileFormat format;
  int64_t group_size;
};

class Mlp : public ::testing::TestWithParam<Shape> {};
INSTANTIATE_TEST_SUITE_P(Shapes, Mlp,
                         ::testing::Values(Shape{"xdna2", 576, 1536, TileFormat::kBf16,
                                                 0},  // SmolLM2-135M
                                           Shape{"xdna2", 576, 1536, TileFormat::kInt4, 32},
                                           Shape{"xdna2", 512, 1024, TileFormat::kInt4, 128},
                                           Shape{"xdna1", 640, 960, TileFormat::kBf16, 0},
                                           Shape{"xdna1", 640, 1280, TileFormat::kInt4, 64},
                                           Shape{"toy", 64, 128, TileFormat::kBf16, 0},
                                           Shape{"toy", 256, 384, TileFormat::kInt4, 128}));

TEST_P(Mlp, IsThatOfFloat64AndMovesEachWeightOnce) {
  const Shape& shape = GetParam();
  const Machine machine = named_machine(shape.machine);
  const MlpCase made({.hidden_size = shape.hidden_size,
                      .intermediate_size = shape.intermediate_size,
                      .format = shape.format,
                      .group_size = shape.group_size},
                     machine);
  sim::SimDevice device(machine);
  EXPECT_TRUE(made.right(made.run(device, made.lowered.program)));
  const sim::Statistics& run = device.runs()[0].statistics;
  const int64_t weights = 3 * shape.hidden_size * shape.intermediate_size;
  EXPECT_EQ(run.bf16_macs, weights);
  const int64_t weight_bytes = shape.format == TileFormat::kBf16
                                   ? 2 * weights
                                   : weights / 2 + weights / shape.group_size * 2;
  // The vectors come once for every core, in whole elements.
  const MatvecTiling& tiling = made.lowered.tiling;
  const int64_t vectors = tiling.cores() * (tiling.vector_bytes(shape.hidden_size) +
                                            tiling.vector_bytes(shape.intermediate_size));
  EXPECT_EQ(run.l3_read_bytes, weight_bytes + vectors);
  EXPECT_EQ(run.l3_written_bytes, 2 * (shape.hidden_size + shape.intermediate_size));
  // No faster than DRAM and than the multipliers.
  const double dram_ps = static_cast<double>(run.l3_read_bytes) / (machine.dram_gb_per_s * 1e-3);
  EXPECT_GE(static_cast<double>(run.duration), dram_ps);
  const double macs_per_ps =
      static_cast<double>(tiling.cores() * machine.core.bf16_macs_per_cycle) * machine.clock_mhz *
      1e-6;
  EXPECT_GE(static_cast<double>(run.duration), static_cast<double>(weights) / macs_per_ps);
}

TEST(MlpTime, IsTheSameTwiceAndWithoutData) {
  const Machine machine = named_machine("xdna2");
  const MlpCase made({.hidden_size = 576, .intermediate_size = 1536}, machine);
  sim::SimOptions timed;
  timed.functional = false;
  sim::SimDevice once(machine), again(machine), without(machine, timed);
  made.run(once, made.lowered.program);
  made.run(again, made.lowered.program);
  made.run(without, made.lowered.program);
  EXPECT_EQ(once.runs()[0].statistics.duration, again.runs()[0].statistics.duration);
  EXPECT_EQ(once.runs()[0].statistics.duration, without.runs()[0].statistics.duration);
}

// A Llama-2-7B layer in 4 bits is bound by DRAM: 56 GB/s of its 68 MB of weights.
TEST(MlpTime, OfALargeModelIsThatOfDram) {
  const Machine machine = named_machine("xdna2");
  const LoweredMatvec made = lower_gate_up_silu_mlp({.hidden_size = 4096,
                                                     .intermediate_size = 11008,
                                                     .format = TileFormat::kInt4,
                                                     .group_size = 128},
                                                    machine);
  sim::SimOptions timed;
  timed.functional = false;
  sim::SimDevice device(machine, timed);
  std::vector<std::unique_ptr<Buffer>> buffers;
  std::vector<Buffer*> arguments;
  for (const Argument& argument : made.program.arguments) {
    buffers.push_back(device.allocate(argument.bytes));
    arguments.push_back(buffers.back().get());
  }
  call(*device.load(made.program), made.program, arguments, {});
  const sim::Statistics& run = device.runs()[0].statistics;
  const double dram_ps = static_cast<double>(run.l3_read_bytes) / (machine.dram_gb_per_s * 1e-3);
  EXPECT_LT(static_cast<double>(run.duration), 1.1 * dram_ps);
}

TEST(MlpFences, EachIsNeeded) {
  const Machine machine = named_machine("toy");
  const MlpCase made({.hidden_size = 64, .intermediate_size = 128}, machine);
  sim::SimDevice whole(machine);
  ASSERT_TRUE(made.right(made.run(whole, made.lowered.program)));
  EXPECT_EQ(whole.fences().size(), 3 + 2 * 2 + 1);  // inputs, columns of two phases, output
  for (const std::string& fence : whole.fences()) {
    sim::SimOptions options;
    options.dropped = {fence};
    sim::SimDevice device(machine, options);
    EXPECT_FALSE(made.right(made.run(device, made.lowered.program))) << fence << " is not needed";
  }
}

TEST(MlpMutants, WrongStridesDepthsAndKernelsShow) {
  const Machine machine = named_machine("toy");
  const MlpCase made({.hidden_size = 64, .intermediate_size = 128}, machine);
  sim::SimDevice whole(machine);
  const Program& right = made.lowered.program;
  ASSERT_TRUE(made.right(made.run(whole, right)));
  const auto bytes_of = [](const Program& program) {
    std::vector<int64_t> bytes;
    for (const TileUse& use : tile_uses(program)) bytes.push_back(use.bytes);
    return bytes;
  };
  const auto holds = [&](const Program& program) {
    try {
      sim::SimDevice device(machine);
      return made.right(made.run(device, program)) && bytes_of(program) == bytes_of(right) &&
             device.runs()[0].statistics.duration == whole.runs()[0].statistics.duration;
    } catch (const std::exception&) {
      return false;
    }
  };
  ASSERT_TRUE(holds(right));
  for (size_t s = 0; s < right.sequence.size(); ++s) {
    const auto* move = std::get_if<Move>(&right.sequence[s]);
    for (size_t d = 0; move && d < move->walk.size(); ++d) {
      // A step that is never taken has no stride.
      if (move->walk[d].size.constant() == 1) continue;
      Program wrong = right;
      auto& stride = std::get<Move>(wrong.sequence[s]).walk[d].stride;
      stride = stride + 1;
      EXPECT_FALSE(holds(wrong)) << move->name << ", dimension " << d;
    }
  }
  for (size_t f = 0; f < right.fifos.size(); ++f) {
    for (const int change : {-1, 1}) {
      for (const bool producer : {true, false}) {
        Program wrong = right;
        Fifo& fifo = wrong.fifos[f];
        End& end = producer ? fifo.producer : fifo.consumers[0];
        if (end.tile.row == 0) continue;
        end.depth += change;
        EXPECT_FALSE(holds(wrong)) << fifo.name << " " << producer << " " << change;
      }
    }
  }
}

class Linear : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Machines, Linear, ::testing::Values("xdna1", "xdna2", "toy"));

TEST_P(Linear, IsThatOfFloat64) {
  const Machine machine = named_machine(GetParam());
  for (const TileFormat format : {TileFormat::kBf16, TileFormat::kInt4}) {
    const int64_t group = format == TileFormat::kInt4 ? 32 : 0;
    const int64_t rows = 320, cols = 96;
    const LoweredMatvec made = lower_packed_linear(
        {.rows = rows, .cols = cols, .format = format, .group_size = group}, machine);
    const Matrix matrix = random_matrix(rows, cols, format, group, 7);
    const auto x = random_bf16(cols, 8);
    sim::SimDevice device(machine);
    std::vector<std::unique_ptr<Buffer>> buffers;
    std::vector<Buffer*> arguments;
    for (const Argument& argument : made.program.arguments) {
      buffers.push_back(device.allocate(argument.bytes));
      arguments.push_back(buffers.back().get());
    }
    std::fill_n(buffers[0]->host(), buffers[0]->bytes(), std::byte{0});
    std::copy(x.begin(), x.end(), bf16_of(*buffers[0]));
    MatvecPhase phase;
    phase.rows = rows;
    phase.cols = cols;
    pack_matvec(phase, made.tiling, matrix.weight(),
                {buffers[1]->host(), static_cast<size_t>(buffers[1]->bytes())});
    call(*device.load(made.program), made.program, arguments, {});
    const std::vector<double> wanted = product(matrix, {x.begin(), x.end()});
    for (size_t i = 0; i < wanted.size(); ++i) {
      // Half a unit of bf16's 8 bits, and float32's sums of 96 terms of about 1.
      EXPECT_NEAR(bf16_of(*buffers[2])[i], wanted[i], std::ldexp(std::abs(wanted[i]), -8) + 1e-5);
    }
  }
}

TEST(MatvecTiling, WhatDoesNotDivideIsIncompatibleWithTheReason) {
  const Machine machine = named_machine("xdna2");
  const auto reason = [&](int64_t rows, int64_t cols) -> std::string {
    try {
      lower_packed_linear({.rows = rows, .cols = cols}, machine);
    } catch (const Incompatible& error) {
      return error.what();
    }
    return "(accepted)";
  };
  EXPECT_EQ(reason(64, 64), "(accepted)");
  EXPECT_THAT(reason(63, 64), HasSubstr("rows in a multiple of twice the cores of a column"));
  EXPECT_THAT(reason(64, 65), HasSubstr("columns in a multiple of 32 wanted, got 65"));
  EXPECT_THAT(reason(64, 1 << 15), HasSubstr("a vector of 32768 and two tiles take"));
  EXPECT_THROW(lower_packed_linear({.rows = 64, .cols = 64, .format = TileFormat::kInt4}, machine),
               std::invalid_argument);
}

}  // namespace
}  // namespace fasttps::npu
