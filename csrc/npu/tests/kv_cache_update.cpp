#include "npu/ops/kv_cache_update.h"

#include <gmock/gmock.h>

#include <algorithm>

#include "bf16.h"
#include "npu/call.h"
#include "npu/sim/sim_device.h"
#include "npu/validate.h"

namespace fasttps::npu {
namespace {

using ::testing::HasSubstr;

constexpr KvCacheUpdateSizes kLlama{
    .batch = 2, .new_tokens = 3, .num_kv_heads = 8, .head_dim = 64, .max_seq_len = 40};

int64_t new_elements(const KvCacheUpdateSizes& sizes) {
  return sizes.batch * sizes.new_tokens * sizes.num_kv_heads * sizes.head_dim;
}
int64_t cache_elements(const KvCacheUpdateSizes& sizes) {
  return sizes.batch * sizes.max_seq_len * sizes.num_kv_heads * sizes.head_dim;
}

// Caches and new rows on a device, and what the caches must hold afterwards.
struct Case {
  KvCacheUpdateSizes sizes;
  std::vector<int64_t> positions;
  std::vector<std::unique_ptr<Buffer>> buffers;
  std::vector<std::vector<bfloat16>> expected;

  Case(Device& device, const KvCacheUpdateSizes& made_of, std::vector<int64_t> at)
      : sizes(made_of), positions(std::move(at)) {
    for (unsigned i = 0; i < 4; ++i) {
      const auto data =
          random_bf16(static_cast<size_t>(i < 2 ? new_elements(sizes) : cache_elements(sizes)), i);
      buffers.push_back(device.allocate(static_cast<int64_t>(data.size()) * 2));
      std::copy(data.begin(), data.end(), bf16_of(*buffers[i]));
      if (i >= 2) expected.push_back(data);
      if (i >= 2) buffers[i]->sync_to_device(0, buffers[i]->bytes(), "cache.to_device");
    }
    const auto [batch, tokens, heads, dim, slots] = sizes;
    for (int64_t b = 0; b < batch; ++b) {
      for (int64_t t = 0; t < tokens; ++t) {
        for (int64_t h = 0; h < heads; ++h) {
          for (size_t c = 0; c < 2; ++c) {
            const bfloat16* from = bf16_of(*buffers[c]) + ((b * tokens + t) * heads + h) * dim;
            const int64_t slot = positions[static_cast<size_t>(b)] + t;
            std::copy(from, from + dim,
                      expected[c].begin() + ((b * heads + h) * slots + slot) * dim);
          }
        }
      }
    }
  }

  void run(Device& device, const Program& program) {
    const auto design = device.load(program);
    std::vector<Buffer*> arguments;
    for (const auto& buffer : buffers) arguments.push_back(buffer.get());
    call(*design, program, arguments, positions);
    for (size_t c : {2, 3})
      buffers[c]->sync_from_device(0, buffers[c]->bytes(), "cache.from_device");
  }

  bool right() const {
    for (size_t c = 0; c < 2; ++c) {
      const bfloat16* found = bf16_of(*buffers[2 + c]);
      for (size_t i = 0; i < expected[c].size(); ++i) {
        if (found[i].bits != expected[c][i].bits) return false;
      }
    }
    return true;
  }
};

class KvCacheUpdate : public ::testing::TestWithParam<std::string> {
 protected:
  Machine machine() const { return named_machine(GetParam()); }
};
INSTANTIATE_TEST_SUITE_P(Machines, KvCacheUpdate, ::testing::Values("xdna1", "xdna2", "toy"));

TEST_P(KvCacheUpdate, MovesNewRowsToTheirSlotsAndNothingElse) {
  const std::vector<std::vector<int64_t>> places{{0, 0}, {5, 37}, {37, 1}};
  for (const auto& positions : places) {
    sim::SimDevice device(machine());
    Case made(device, kLlama, positions);
    made.run(device, lower_kv_cache_update(kLlama, machine()));
    EXPECT_TRUE(made.right()) << positions[0] << ", " << positions[1];
    // Every new byte is read once and written once: nothing of the cache is.
    const sim::Statistics& run = device.runs()[0].statistics;
    EXPECT_EQ(run.l3_read_bytes, 2 * new_elements(kLlama) * 2);
    EXPECT_EQ(run.l3_written_bytes, 2 * new_elements(kLlama) * 2);
    EXPECT_EQ(run.l2_read_bytes, run.l3_written_bytes);
    EXPECT_EQ(run.bf16_macs, 0);
  }
}

TEST_P(KvCacheUpdate, OneDesignServesEveryPosition) {
  sim::SimDevice device(machine());
  const KvCacheUpdateSizes one{
      .batch = 1, .new_tokens = 1, .num_kv_heads = 3, .head_dim = 64, .max_seq_len = 6};
  const Program program = lower_kv_cache_update(one, machine());
  for (int64_t position = 0; position < one.max_seq_len; ++position) {
    Case made(device, one, {position});
    made.run(device, program);
    EXPECT_TRUE(made.right()) << position;
  }
  EXPECT_TRUE(device.runs()[0].switched);
  EXPECT_FALSE(device.runs()[1].switched);
}

TEST_P(KvCacheUpdate, PastTheCacheIsRefusedBeforeAnythingIsWritten) {
  sim::SimDevice device(machine());
  Case made(device, kLlama, {0, 0});
  made.positions = {0, 38};
  EXPECT_THROW(made.run(device, lower_kv_cache_update(kLlama, machine())), std::out_of_range);
  made.positions = {0, 0};
  EXPECT_FALSE(made.right());
}

// On the toy, a token of 3 heads has 384 bytes: 96 ns on a stream. Keys and values have columns of
// their own, so DRAM's 16 GB/s are no limit: 5 tokens in, the last one out 96 ns later.
TEST(KvCacheUpdateTime, IsThatOfItsBytesOnTheToy) {
  const KvCacheUpdateSizes sizes{
      .batch = 1, .new_tokens = 5, .num_kv_heads = 3, .head_dim = 64, .max_seq_len = 8};
  sim::SimDevice device(named_machine("toy"));
  Case made(device, sizes, {2});
  made.run(device, lower_kv_cache_update(sizes, device.machine()));
  EXPECT_EQ(device.runs()[0].statistics.duration, 6 * 96 * 1000);
}

// Every sync and await is needed: without it, numbers are wrong.
TEST(KvCacheUpdateFences, EachIsNeeded) {
  sim::SimDevice whole(named_machine("xdna2"));
  Case all(whole, kLlama, {5, 9});
  const Program program = lower_kv_cache_update(kLlama, whole.machine());
  all.run(whole, program);
  ASSERT_TRUE(all.right());
  EXPECT_EQ(whole.fences().size(), 2 + 2 + 2);
  for (const std::string& fence : whole.fences()) {
    sim::SimOptions options;
    options.dropped = {fence};
    sim::SimDevice device(named_machine("xdna2"), options);
    Case made(device, kLlama, {5, 9});
    made.run(device, program);
    EXPECT_FALSE(made.right()) << fence << " is not needed";
  }
}

// A stride that is wrong in any move, or a FIFO of another depth, shows.
TEST(KvCacheUpdateMutants, WrongStridesAndDepthsShow) {
  const Machine machine = named_machine("toy");
  const auto holds = [&](const Program& program) {
    try {
      sim::SimDevice device(machine);
      Case made(device, kLlama, {5, 9});
      made.run(device, program);
      int64_t l2_bytes = 0;
      for (const TileUse& use : tile_uses(program)) l2_bytes += use.bytes;
      // 2 batches of 3 tokens of 1024 bytes, one behind: 7 x 256 ns. Two columns of two tokens.
      return made.right() && device.runs()[0].statistics.duration == 7 * 256 * 1000 &&
             l2_bytes == 2 * 2 * 1024;
    } catch (const std::exception&) {
      return false;
    }
  };
  const Program right = lower_kv_cache_update(kLlama, machine);
  ASSERT_TRUE(holds(right));
  for (size_t s = 0; s < right.sequence.size(); ++s) {
    const auto* move = std::get_if<Move>(&right.sequence[s]);
    for (size_t d = 0; move && d < move->walk.size(); ++d) {
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
      const bool in = fifo.producer.tile.row == 0;
      (in ? fifo.consumers[0] : fifo.producer).depth += change;
      EXPECT_FALSE(holds(wrong)) << fifo.name << " " << change;
    }
  }
}

TEST(KvCacheUpdateSizesOf, WrongOnesAreRefused) {
  const Machine machine = named_machine("xdna2");
  const auto error = [&](KvCacheUpdateSizes sizes) -> std::string {
    try {
      lower_kv_cache_update(sizes, machine);
    } catch (const Incompatible& reason) {
      return std::string("incompatible: ") + reason.what();
    } catch (const std::invalid_argument& wrong) {
      return wrong.what();
    }
    return "(accepted)";
  };
  KvCacheUpdateSizes sizes = kLlama;
  sizes.batch = 0;
  EXPECT_THAT(error(sizes), HasSubstr("wanted a batch of 1 to 2^24, got 0"));
  sizes = kLlama;
  sizes.new_tokens = 41;
  EXPECT_THAT(error(sizes), HasSubstr("wanted at most max_seq_len = 40 new_tokens, got 41"));
  sizes = kLlama;
  sizes.head_dim = 33;
  EXPECT_THAT(error(sizes), HasSubstr("incompatible: kv_cache_update on xdna2: DMAs move words"));
  sizes = kLlama;
  sizes.num_kv_heads = 4096;
  EXPECT_THAT(error(sizes), HasSubstr("1048576 bytes, a mem tile 524288"));
}

}  // namespace
}  // namespace fasttps::npu
