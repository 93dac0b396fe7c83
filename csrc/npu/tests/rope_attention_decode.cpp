#include "npu/ops/rope_attention_decode.h"

#include <gmock/gmock.h>

#include <cmath>

#include "bf16.h"
#include "npu/call.h"
#include "npu/sim/sim_device.h"
#include "npu/validate.h"

namespace fasttps::npu {
namespace {

using ::testing::HasSubstr;

enum { kQuery, kKey, kValue, kCos, kSin, kKCache, kVCache, kOutput };

double rounded(double x) { return nearest_bf16(x); }

// One token's tensors, and what float64 makes of them. Slots behind the token hold NaN.
struct Case {
  RopeAttentionDecodeSizes sizes;
  int64_t position;
  std::vector<std::vector<bfloat16>> in;  // query, key, value
  std::vector<float> cos, sin;
  std::vector<bfloat16> caches[2];

  Case(const RopeAttentionDecodeSizes& made_of, int64_t at) : sizes(made_of), position(at) {
    const auto [heads, kv_heads, d, rotary, slots, interleaved, scale] = sizes;
    in = {random_bf16(static_cast<size_t>(heads * d), 1),
          random_bf16(static_cast<size_t>(kv_heads * d), 2),
          random_bf16(static_cast<size_t>(kv_heads * d), 3)};
    for (int64_t i = 0; i < rotary; ++i) {
      const int64_t pair = interleaved ? i / 2 : i % (rotary / 2);
      const double angle =
          static_cast<double>(position) *
          std::pow(1e4, -2.0 * static_cast<double>(pair) / static_cast<double>(rotary));
      cos.push_back(static_cast<float>(std::cos(angle)));
      sin.push_back(static_cast<float>(std::sin(angle)));
    }
    for (unsigned c = 0; c < 2; ++c) {
      caches[c] = random_bf16(static_cast<size_t>(kv_heads * slots * d), 4 + c);
      for (int64_t h = 0; h < kv_heads; ++h) {
        std::fill(caches[c].begin() + (h * slots + position) * d,
                  caches[c].begin() + (h + 1) * slots * d, bfloat16(std::nanf("")));
      }
    }
  }

  std::vector<double> rotate(const bfloat16* row) const {
    const int64_t half = sizes.rotary_dim / 2;
    std::vector<double> out(row, row + sizes.head_dim);
    for (int64_t i = 0; i < half; ++i) {
      const auto a = static_cast<size_t>(sizes.interleaved ? 2 * i : i);
      const auto b = static_cast<size_t>(sizes.interleaved ? 2 * i + 1 : i + half);
      const double low = row[a], high = row[b];
      out[a] = low * cos[a] - high * sin[a];
      out[b] = high * cos[b] + low * sin[b];
    }
    for (double& x : out) x = rounded(x);
    return out;
  }

  // The caches with the token, and the output, each with what rounding may make of it.
  void expect(std::vector<double>& out, std::vector<double>& most,
              std::vector<bfloat16> (&with)[2]) const {
    const auto [heads, kv_heads, d, rotary, slots, interleaved, asked] = sizes;
    const double scale = asked != 0 ? asked : 1 / std::sqrt(static_cast<double>(d));
    for (size_t c = 0; c < 2; ++c) with[c] = caches[c];
    for (int64_t h = 0; h < kv_heads; ++h) {
      const std::vector<double> key = rotate(in[1].data() + h * d);
      for (int64_t i = 0; i < d; ++i) {
        const auto slot = static_cast<size_t>((h * slots + position) * d + i);
        with[0][slot] = bfloat16(static_cast<float>(key[static_cast<size_t>(i)]));
        with[1][slot] = in[2][static_cast<size_t>(h * d + i)];
      }
    }
    for (int64_t h = 0; h < heads; ++h) {
      const std::vector<double> query = rotate(in[0].data() + h * d);
      const int64_t kv = h / (heads / kv_heads);
      std::vector<double> scores;
      double top = -INFINITY, sum = 0;
      for (int64_t t = 0; t <= position; ++t) {
        double score = 0;
        for (int64_t i = 0; i < d; ++i) {
          score += query[static_cast<size_t>(i)] *
                   with[0][static_cast<size_t>((kv * slots + t) * d + i)];
        }
        scores.push_back(score * scale);
        top = std::max(top, scores.back());
      }
      for (double& score : scores) sum += score = std::exp(score - top);
      for (int64_t i = 0; i < d; ++i) {
        double total = 0, size = 0;
        for (int64_t t = 0; t <= position; ++t) {
          const double term = scores[static_cast<size_t>(t)] / sum *
                              with[1][static_cast<size_t>((kv * slots + t) * d + i)];
          total += term;
          size += std::abs(term);
        }
        out.push_back(total);
        // Weights and their sum are rounded to 8 bits, and so is the result.
        most.push_back(std::ldexp(2 * size + std::abs(total), -8));
      }
    }
  }

  bool run(sim::SimDevice& device, const Program& program) const {
    std::vector<std::unique_ptr<Buffer>> buffers;
    std::vector<Buffer*> arguments;
    for (const Argument& argument : program.arguments) {
      buffers.push_back(device.allocate(argument.bytes));
      arguments.push_back(buffers.back().get());
    }
    for (size_t i = 0; i < 3; ++i) std::copy(in[i].begin(), in[i].end(), bf16_of(*buffers[i]));
    std::copy(cos.begin(), cos.end(), reinterpret_cast<float*>(buffers[kCos]->host()));
    std::copy(sin.begin(), sin.end(), reinterpret_cast<float*>(buffers[kSin]->host()));
    for (size_t c = 0; c < 2; ++c) {
      Buffer& cache = *buffers[kKCache + c];
      std::copy(caches[c].begin(), caches[c].end(), bf16_of(cache));
      cache.sync_to_device(0, cache.bytes(), "cache.to_device");
    }
    const int64_t scalars[] = {position};
    call(*device.load(program), program, arguments, scalars);
    for (size_t c = 0; c < 2; ++c) {
      buffers[kKCache + c]->sync_from_device(0, buffers[kKCache + c]->bytes(), "cache.from_device");
    }
    std::vector<double> wanted, most;
    std::vector<bfloat16> with[2];
    expect(wanted, most, with);
    for (size_t i = 0; i < wanted.size(); ++i) {
      if (!(std::abs(bf16_of(*buffers[kOutput])[i] - wanted[i]) <= most[i])) return false;
    }
    for (size_t c = 0; c < 2; ++c) {
      for (size_t i = 0; i < with[c].size(); ++i) {
        if (bf16_of(*buffers[kKCache + c])[i].bits != with[c][i].bits) return false;
      }
    }
    return true;
  }
};

RopeAttentionDecodeSizes sizes_of(int64_t heads, int64_t kv_heads, int64_t d, int64_t slots) {
  return {.num_heads = heads,
          .num_kv_heads = kv_heads,
          .head_dim = d,
          .rotary_dim = d,
          .max_seq_len = slots};
}

struct Shape {
  const char* name;
  RopeAttentionDecodeSizes sizes;
};
const Shape kShapes[] = {
    {"SmolLM2-135M", sizes_of(9, 3, 64, 128)}, {"Llama-3.2-1B", sizes_of(32, 8, 64, 64)},
    {"Llama-3-8B", sizes_of(32, 8, 128, 64)},  {"Llama-2-7B", sizes_of(32, 32, 128, 64)},
    {"two waves", sizes_of(80, 80, 32, 64)},   {"one head", sizes_of(1, 1, 64, 64)}};

class Decode : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Machines, Decode, ::testing::Values("xdna1", "xdna2", "toy"));

TEST_P(Decode, IsThatOfFloat64AtEveryLengthAndReadsTheCacheOnce) {
  const Machine machine = named_machine(GetParam());
  for (const Shape& shape : kShapes) {
    const RopeAttentionDecodeSizes& sizes = shape.sizes;
    const LoweredDecode made = lower_rope_attention_decode(sizes, machine);
    const DecodePlacement& at = made.placement;
    EXPECT_EQ(at.waves * at.heads_per_wave(), sizes.num_kv_heads);
    for (const int64_t position : {int64_t{0}, int64_t{17}, sizes.max_seq_len - 1}) {
      sim::SimDevice device(machine);
      EXPECT_TRUE(Case(sizes, position).run(device, made.program))
          << shape.name << ", " << position;
      const sim::Statistics& run = device.runs()[0].statistics;
      // QK^T and PV of every query head over the token and all before it.
      EXPECT_EQ(run.bf16_macs, 2 * sizes.num_heads * sizes.head_dim * (position + 1));
      // Keys and values once for each KV head, in whole blocks, and a block with the token's own.
      const int64_t blocks = (position + at.block_rows) / at.block_rows;
      EXPECT_EQ(run.l3_read_bytes, sizes.num_kv_heads * (2 * blocks + 1) * at.block_bytes);
      EXPECT_EQ(
          run.l3_written_bytes,
          (2 * sizes.num_kv_heads * at.cores_per_head + sizes.num_heads) * sizes.head_dim * 2);
    }
  }
}

TEST(DecodeRope, IsPartialAndInterleavedToo) {
  const Machine machine = named_machine("xdna2");
  for (const bool interleaved : {false, true}) {
    RopeAttentionDecodeSizes sizes = sizes_of(8, 2, 64, 64);
    sizes.rotary_dim = 48;
    sizes.interleaved = interleaved;
    sizes.scale = 0.3;
    sim::SimDevice device(machine);
    EXPECT_TRUE(Case(sizes, 40).run(device, lower_rope_attention_decode(sizes, machine).program));
  }
}

// The cache of a long context decides. FastTPS (paper 000) has 93 % of the bandwidth in a whole
// model.
TEST(DecodeTime, OfALongContextIsThatOfDram) {
  const Machine machine = named_machine("xdna2");
  const LoweredDecode made = lower_rope_attention_decode(sizes_of(32, 32, 128, 2048), machine);
  sim::SimOptions timed;
  timed.functional = false;
  sim::SimDevice device(machine, timed);
  std::vector<std::unique_ptr<Buffer>> buffers;
  std::vector<Buffer*> arguments;
  for (const Argument& argument : made.program.arguments) {
    buffers.push_back(device.allocate(argument.bytes));
    arguments.push_back(buffers.back().get());
  }
  const int64_t scalars[] = {2047};
  call(*device.load(made.program), made.program, arguments, scalars);
  const sim::Statistics& run = device.runs()[0].statistics;
  const double dram_ps = static_cast<double>(run.l3_read_bytes) / (machine.dram_gb_per_s * 1e-3);
  EXPECT_GT(static_cast<double>(run.duration), dram_ps);
  EXPECT_LT(static_cast<double>(run.duration), dram_ps / 0.9);
}

TEST(DecodeFences, EachIsNeeded) {
  const Machine machine = named_machine("toy");
  const RopeAttentionDecodeSizes sizes = sizes_of(8, 4, 64, 64);
  const Program program = lower_rope_attention_decode(sizes, machine).program;
  const Case made(sizes, 20);
  sim::SimDevice whole(machine);
  ASSERT_TRUE(made.run(whole, program));
  // Inputs, caches there and back, the output; new rows and output of two columns.
  EXPECT_EQ(whole.fences().size(), 5 + 2 + 1 + 2 * 2);
  for (const std::string& fence : whole.fences()) {
    sim::SimOptions options;
    options.dropped = {fence};
    sim::SimDevice device(machine, options);
    EXPECT_FALSE(made.run(device, program)) << fence << " is not needed";
  }
}

TEST(DecodeMutants, WrongStridesAndDepthsShow) {
  const Machine machine = named_machine("toy");
  const RopeAttentionDecodeSizes sizes = sizes_of(8, 4, 64, 64);
  const Program right = lower_rope_attention_decode(sizes, machine).program;
  const Case made(sizes, 63);
  const auto bytes_of = [](const Program& program) {
    std::vector<int64_t> bytes;
    for (const TileUse& use : tile_uses(program)) bytes.push_back(use.bytes);
    return bytes;
  };
  sim::SimDevice whole(machine);
  ASSERT_TRUE(made.run(whole, right));
  const auto holds = [&](const Program& program) {
    try {
      sim::SimDevice device(machine);
      return made.run(device, program) && bytes_of(program) == bytes_of(right) &&
             device.runs()[0].statistics.duration == whole.runs()[0].statistics.duration;
    } catch (const std::exception&) {
      return false;
    }
  };
  ASSERT_TRUE(holds(right));
  const int64_t scalars[] = {63};
  for (size_t s = 0; s < right.sequence.size(); ++s) {
    const auto* move = std::get_if<Move>(&right.sequence[s]);
    // What fills up the token's element means nothing.
    if (!move || move->name.starts_with("rest_")) continue;
    for (size_t d = 0; d < move->walk.size(); ++d) {
      if (move->walk[d].size.value(scalars, {}) == 1) continue;
      Program wrong = right;
      auto& stride = std::get<Move>(wrong.sequence[s]).walk[d].stride;
      stride = stride + 1;
      EXPECT_FALSE(holds(wrong)) << move->name << ", dimension " << d;
    }
  }
  for (size_t f = 0; f < right.fifos.size(); ++f) {
    for (const int change : {-1, 1}) {
      Program wrong = right;
      Fifo& fifo = wrong.fifos[f];
      (fifo.producer.tile.row == 0 ? fifo.consumers[0] : fifo.producer).depth += change;
      EXPECT_FALSE(holds(wrong)) << fifo.name << " " << change;
    }
  }
}

TEST(DecodeSizes, WrongOnesAndThoseThatDoNotFitAreRefused) {
  const Machine machine = named_machine("xdna2");
  const auto error = [&](const RopeAttentionDecodeSizes& sizes) -> std::string {
    try {
      lower_rope_attention_decode(sizes, machine);
    } catch (const Incompatible& reason) {
      return std::string("incompatible: ") + reason.what();
    } catch (const std::invalid_argument& wrong) {
      return wrong.what();
    }
    return "(accepted)";
  };
  EXPECT_EQ(error(sizes_of(32, 8, 64, 8192)), "(accepted)");
  EXPECT_THAT(error(sizes_of(32, 8, 64, 16384)),
              HasSubstr("incompatible: rope_attention_decode on xdna2: 1 rows of 16384 scores"));
  EXPECT_THAT(error(sizes_of(9, 2, 64, 64)),
              HasSubstr("num_heads in a multiple of num_kv_heads = 2, got 9"));
  EXPECT_THAT(error(sizes_of(8, 8, 40, 64)), HasSubstr("incompatible"));
  EXPECT_THAT(error(sizes_of(8, 8, 64, 0)), HasSubstr("max_seq_len of 1 to 2^24, got 0"));
  EXPECT_THAT(error(sizes_of(32, 2, 128, 7)), HasSubstr("a block of the cache 256"));
}

}  // namespace
}  // namespace fasttps::npu
