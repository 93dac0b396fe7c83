#include "npu/ops/causal_prefill.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>

#include "bf16.h"
#include "npu/call.h"
#include "npu/sim/sim_device.h"
#include "npu/validate.h"

namespace fasttps::npu {
namespace {

using ::testing::HasSubstr;

CausalPrefillSizes sizes_of(int64_t heads, int64_t kv_heads, int64_t tokens, int64_t offset,
                            int64_t slots) {
  return {.num_heads = heads,
          .num_kv_heads = kv_heads,
          .head_dim = 64,
          .tokens = tokens,
          .offset = offset,
          .max_seq_len = slots};
}

// Queries behind the tokens and slots behind the keys hold NaN.
struct Case {
  CausalPrefillSizes sizes;
  int64_t padded;
  std::vector<bfloat16> query, caches[2];

  Case(const CausalPrefillSizes& made_of, int64_t padded_tokens)
      : sizes(made_of),
        padded(padded_tokens),
        query(random_bf16(static_cast<size_t>(padded * sizes.num_heads * 64), 1)) {
    const bfloat16 nan(std::nanf(""));
    std::fill(query.begin() + sizes.tokens * sizes.num_heads * 64, query.end(), nan);
    for (unsigned c = 0; c < 2; ++c) {
      caches[c] =
          random_bf16(static_cast<size_t>(sizes.num_kv_heads * sizes.max_seq_len * 64), 2 + c);
      for (int64_t h = 0; h < sizes.num_kv_heads; ++h) {
        std::fill(caches[c].begin() + (h * sizes.max_seq_len + sizes.offset + sizes.tokens) * 64,
                  caches[c].begin() + (h + 1) * sizes.max_seq_len * 64, nan);
      }
    }
  }

  bool run(sim::SimDevice& device, const Program& program, double times = 1) const {
    std::vector<std::unique_ptr<Buffer>> buffers;
    std::vector<Buffer*> arguments;
    for (const Argument& argument : program.arguments) {
      buffers.push_back(device.allocate(argument.bytes));
      arguments.push_back(buffers.back().get());
    }
    std::copy(query.begin(), query.end(), bf16_of(*buffers[0]));
    for (size_t c = 0; c < 2; ++c) {
      std::copy(caches[c].begin(), caches[c].end(), bf16_of(*buffers[1 + c]));
      buffers[1 + c]->sync_to_device(0, buffers[1 + c]->bytes(), "cache.to_device");
    }
    call(*device.load(program), program, arguments, {});
    const auto [heads, kv_heads, d, tokens, offset, slots, asked, aware, grouped] = sizes;
    const bfloat16* out = bf16_of(*buffers[3]);
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t kv = h / (heads / kv_heads);
      for (int64_t t = 0; t < tokens; ++t) {
        const bfloat16* row = query.data() + (t * heads + h) * d;
        std::vector<double> weights;
        double top = -INFINITY, sum = 0;
        for (int64_t k = 0; k <= offset + t; ++k) {
          double score = 0;
          for (int64_t i = 0; i < d; ++i) {
            score += double{row[i]} * caches[0][static_cast<size_t>((kv * slots + k) * d + i)];
          }
          weights.push_back(score / 8);
          top = std::max(top, weights.back());
        }
        for (double& weight : weights) sum += weight = std::exp(weight - top);
        for (int64_t i = 0; i < d; ++i) {
          double total = 0, size = 0;
          for (int64_t k = 0; k <= offset + t; ++k) {
            const double term = weights[static_cast<size_t>(k)] / sum *
                                caches[1][static_cast<size_t>((kv * slots + k) * d + i)];
            total += term;
            size += std::abs(term);
          }
          // Weights and their sum are rounded to 8 bits, and so is the result.
          const double most = times * std::ldexp(2 * size + std::abs(total), -8);
          if (!(std::abs(out[(t * heads + h) * d + i] - total) <= most)) return false;
        }
      }
    }
    return true;
  }
};

class Prefill : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Machines, Prefill, ::testing::Values("xdna1", "xdna2", "toy"));

TEST_P(Prefill, IsThatOfFloat64InEveryPlacement) {
  const Machine machine = named_machine(GetParam());
  for (const bool aware : {true, false}) {
    for (const bool grouped : {true, false}) {
      // Not in whole blocks, on an empty cache and behind 70 tokens, several rounds on the toy.
      for (CausalPrefillSizes sizes : {sizes_of(2, 1, 100, 0, 128), sizes_of(3, 3, 330, 70, 448)}) {
        sizes.sparsity_aware = aware;
        sizes.broadcast_to_groups = grouped;
        const LoweredPrefill made = lower_causal_prefill(sizes, machine);
        sim::SimDevice device(machine);
        EXPECT_TRUE(Case(sizes, made.placement.padded_tokens).run(device, made.program))
            << sizes.tokens << " " << aware << grouped;
        const sim::Statistics& run = device.runs()[0].statistics;
        // Two products of every block that a token sees.
        const PrefillPlacement& at = made.placement;
        int64_t blocks = 0;
        for (int64_t i = 0; i * 64 < sizes.tokens; ++i) {
          blocks += std::min((sizes.offset + i * 64 + 63) / 64 + 1, at.key_blocks);
        }
        EXPECT_EQ(run.bf16_macs, sizes.num_heads * blocks * 2 * 64 * 64 * 64);
        // Queries once; keys and values once a round and stream.
        const auto pipelines = static_cast<int64_t>(at.pipelines.size());
        const int64_t streams = grouped ? pipelines / at.group : 1;
        const int64_t block = 64 * 64 * 2;
        EXPECT_EQ(run.l3_read_bytes,
                  sizes.num_heads * block *
                      (at.padded_tokens / 64 + 2 * streams * at.rounds * at.key_blocks));
        EXPECT_EQ(run.l3_written_bytes, sizes.num_heads * block * at.padded_tokens / 64);
      }
    }
  }
}

sim::Statistics timed(const CausalPrefillSizes& sizes, const Machine& machine) {
  const LoweredPrefill made = lower_causal_prefill(sizes, machine);
  sim::SimOptions options;
  options.functional = false;
  sim::SimDevice device(machine, options);
  std::vector<std::unique_ptr<Buffer>> buffers;
  std::vector<Buffer*> arguments;
  for (const Argument& argument : made.program.arguments) {
    buffers.push_back(device.allocate(argument.bytes));
    arguments.push_back(buffers.back().get());
  }
  call(*device.load(made.program), made.program, arguments, {});
  return device.runs()[0].statistics;
}

// STEEL (paper 002): 10 pipelines on 30 cores of XDNA 2; on XDNA 1 one a column and one along the
// last cores of the first three.
TEST(PrefillPlacement, IsThatOfThePaper) {
  const LoweredPrefill strix =
      lower_causal_prefill(sizes_of(32, 8, 4096, 0, 4096), named_machine("xdna2"));
  EXPECT_EQ(strix.placement.pipelines.size(), 10);
  EXPECT_EQ(strix.placement.group, 5);
  EXPECT_EQ(strix.program.cores.size(), 30);
  const LoweredPrefill phoenix =
      lower_causal_prefill(sizes_of(12, 12, 1024, 0, 1024), named_machine("xdna1"));
  EXPECT_EQ(phoenix.placement.pipelines.size(), 6);
  EXPECT_EQ(phoenix.placement.pipelines.back(),
            (std::array<Tile, 3>{Tile{0, 5}, Tile{1, 5}, Tile{2, 5}}));
}

// Section IV-B: one port of each pipeline for Q, one for O, two for P, and two for K and V.
TEST(PrefillPorts, AreThe42OfThePaper) {
  CausalPrefillSizes sizes = sizes_of(32, 8, 4096, 0, 4096);
  sizes.broadcast_to_groups = false;
  int64_t ports = 0;
  for (const TileUse& use :
       tile_uses(lower_causal_prefill(sizes, named_machine("xdna2")).program)) {
    if (use.tile.row == 1) ports += use.core_ports;
  }
  EXPECT_EQ(ports, 42);
}

// Products through blocks that share an exponent: 8 bits of the largest of 8, so an error of up to
// 2^-7 of each factor; scores of 64 terms and weights near the mean stay within a few of them.
TEST(PrefillNumerics, Bfp16IsCoarserAndStillAttention) {
  const Machine machine = named_machine("xdna2");
  const CausalPrefillSizes sizes = sizes_of(1, 1, 128, 0, 128);
  const LoweredPrefill made = lower_causal_prefill(sizes, machine);
  const Case one(sizes, made.placement.padded_tokens);
  sim::SimOptions options;
  options.numerics.bfp16_products = true;
  sim::SimDevice exact(machine), coarse(machine, options), also(machine, options);
  EXPECT_TRUE(one.run(exact, made.program));
  EXPECT_FALSE(one.run(coarse, made.program));
  EXPECT_TRUE(one.run(also, made.program, 16));
}

// Figure 6: 0.5 GB at 4096 tokens of 32 heads, which needs keys and values once for 5 blocks of
// queries.
TEST(PrefillTraffic, IsThatOfThePaper) {
  const sim::Statistics run = timed(sizes_of(32, 32, 4096, 0, 4096), named_machine("xdna2"));
  EXPECT_NEAR(static_cast<double>(run.l3_read_bytes + run.l3_written_bytes) * 1e-9, 0.5,
              0.15 * 0.5);
}

// Section IV-C: placement by sparsity saves about 38 % where sequences are long.
TEST(PrefillTime, SparsityAwarePlacementSavesWhatThePaperSays) {
  const Machine machine = named_machine("xdna2");
  CausalPrefillSizes sizes = sizes_of(1, 1, 8192, 0, 8192);
  const auto aware = static_cast<double>(timed(sizes, machine).duration);
  sizes.sparsity_aware = false;
  const auto uniform = static_cast<double>(timed(sizes, machine).duration);
  EXPECT_NEAR(1 - aware / uniform, 0.38, 0.15 * 0.38);
}

TEST(PrefillFences, EachIsNeeded) {
  const Machine machine = named_machine("toy");
  const CausalPrefillSizes sizes = sizes_of(2, 1, 200, 0, 256);
  const LoweredPrefill made = lower_causal_prefill(sizes, machine);
  const Case one(sizes, made.placement.padded_tokens);
  sim::SimDevice whole(machine);
  ASSERT_TRUE(one.run(whole, made.program));
  EXPECT_EQ(whole.fences().size(), 2 + 1 + 1);
  for (const std::string& fence : whole.fences()) {
    sim::SimOptions options;
    options.dropped = {fence};
    sim::SimDevice device(machine, options);
    EXPECT_FALSE(one.run(device, made.program)) << fence << " is not needed";
  }
}

TEST(PrefillMutants, WrongStridesWalksAndDepthsShow) {
  const Machine machine = named_machine("toy");
  const CausalPrefillSizes sizes = sizes_of(2, 1, 200, 0, 256);
  const LoweredPrefill made = lower_causal_prefill(sizes, machine);
  const Program& right = made.program;
  const Case one(sizes, made.placement.padded_tokens);
  const auto bytes_of = [](const Program& program) {
    std::vector<int64_t> bytes;
    for (const TileUse& use : tile_uses(program)) bytes.push_back(use.bytes);
    return bytes;
  };
  sim::SimDevice whole(machine);
  ASSERT_TRUE(one.run(whole, right));
  const auto holds = [&](const Program& program) {
    try {
      sim::SimDevice device(machine);
      return one.run(device, program) && bytes_of(program) == bytes_of(right) &&
             device.runs()[0].statistics.duration == whole.runs()[0].statistics.duration;
    } catch (const std::exception&) {
      return false;
    }
  };
  ASSERT_TRUE(holds(right));
  for (size_t s = 0; s < right.sequence.size(); ++s) {
    const auto* move = std::get_if<Move>(&right.sequence[s]);
    for (size_t d = 0; move && d < move->walk.size(); ++d) {
      if (move->walk[d].size.constant() == 1) continue;
      Program wrong = right;
      auto& stride = std::get<Move>(wrong.sequence[s]).walk[d].stride;
      stride = stride + 1;
      EXPECT_FALSE(holds(wrong)) << move->name << ", dimension " << d;
    }
  }
  for (size_t f = 0; f < right.fifos.size(); ++f) {
    for (size_t d = 0; d < right.fifos[f].producer.walk.size(); ++d) {
      Program wrong = right;
      auto& stride = wrong.fifos[f].producer.walk[d].stride;
      stride = stride + 1;
      EXPECT_FALSE(holds(wrong)) << right.fifos[f].name << ", dimension " << d;
    }
    for (const int change : {-1, 1}) {
      Program wrong = right;
      Fifo& fifo = wrong.fifos[f];
      (fifo.producer.tile.row == 0 ? fifo.consumers[0] : fifo.producer).depth += change;
      EXPECT_FALSE(holds(wrong)) << fifo.name << " " << change;
    }
  }
}

TEST(PrefillSizes, WrongOnesAndThoseThatDoNotFitAreRefused) {
  const Machine machine = named_machine("xdna2");
  const auto error = [&](const CausalPrefillSizes& sizes) -> std::string {
    try {
      lower_causal_prefill(sizes, machine);
    } catch (const Incompatible& reason) {
      return std::string("incompatible: ") + reason.what();
    } catch (const std::invalid_argument& wrong) {
      return wrong.what();
    }
    return "(accepted)";
  };
  EXPECT_EQ(error(sizes_of(32, 8, 128, 0, 128)), "(accepted)");
  EXPECT_THAT(error(sizes_of(32, 8, 128, 10, 128)),
              HasSubstr("wanted a max_seq_len of 192, got 128"));
  EXPECT_THAT(error(sizes_of(9, 2, 64, 0, 64)),
              HasSubstr("num_heads in a multiple of num_kv_heads = 2, got 9"));
  CausalPrefillSizes wide = sizes_of(8, 8, 64, 0, 64);
  wide.head_dim = 128;
  EXPECT_THAT(error(wide),
              HasSubstr("incompatible: causal_prefill on xdna2: a head_dim of 64 wanted"));
}

}  // namespace
}  // namespace fasttps::npu
