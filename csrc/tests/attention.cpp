#include <cmath>
#include <limits>

#include "emulated_amx.h"
#include "kernel_tables.h"

namespace fasttps::cpu {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// One KV head whose buffers end where the arguments say.
struct Case {
  int64_t rows, positions, head_dim;
  ElementType type = kF32;
  float softcap = 0.0f;
  bool causal = false;               // row r sees positions up to positions - rows + r
  std::vector<uint8_t> hidden = {};  // positions that a mask hides from all rows
  bool bf16_query = false;           // round query to bf16, and let kernels do so
};

struct Attention {
  const KernelTable& kernels;
  Case c;
  int64_t padded = (c.head_dim + 15) / 16 * 16;
  std::vector<float> query = std::vector<float>(static_cast<size_t>(c.rows * padded), 0.0f);
  std::vector<float> k_values, v_values;  // as the cache holds them
  std::vector<float> out, sum, max;

  Attention(const KernelTable& table, const Case& wanted) : kernels(table), c(wanted) {
    const std::vector<float> q = normal(static_cast<size_t>(c.rows * c.head_dim), 1);
    for (int64_t r = 0; r < c.rows; ++r) {
      for (int64_t d = 0; d < c.head_dim; ++d) query[r * padded + d] = q[r * c.head_dim + d];
    }
    if (c.bf16_query) query = store(kernels, kBf16, query).values;
    k_values = normal(static_cast<size_t>(c.positions * c.head_dim), 2);
    v_values = normal(static_cast<size_t>(c.positions * c.head_dim), 3);
  }

  int64_t last(int64_t row) const {
    return c.causal ? c.positions - c.rows + row : c.positions - 1;
  }
  bool sees(int64_t row, int64_t position) const {
    return position <= last(row) && (c.hidden.empty() || c.hidden[position] == 0);
  }

  void run(void (*const* kernel)(const AttentionTask&)) {
    const auto rows = static_cast<size_t>(c.rows);
    Stored k, v;
    std::vector<float> scale(static_cast<size_t>(c.positions), 1.0f), v_scale = scale;
    if (c.type == kInt8) {
      k.bytes.resize(k_values.size());
      v.bytes.resize(v_values.size());
      for (int64_t p = 0; p < c.positions; ++p) {
        quantize(k_values, k.bytes, scale, p);
        quantize(v_values, v.bytes, v_scale, p);
      }
    } else {
      k = store(kernels, c.type, k_values);
      v = store(kernels, c.type, v_values);
      k_values = k.values;
      v_values = v.values;
    }
    std::vector<int64_t> first(rows, 0), limit(rows);
    std::vector<uint8_t> shown(static_cast<size_t>(c.positions), 1), attended(rows, 0);
    for (size_t p = 0; p < c.hidden.size(); ++p) shown[p] = c.hidden[p] == 0;
    std::vector<const uint8_t*> mask(rows, shown.data());
    for (int64_t r = 0; r < c.rows; ++r) limit[r] = last(r);
    std::vector<float> scratch(static_cast<size_t>(attention_scratch_floats(padded)), kNaN);
    max.assign(rows, -kInf);
    sum.assign(rows, 0.0f);
    out.assign(static_cast<size_t>(c.rows * padded), 0.0f);
    AttentionTask task{};
    task.query = query.data();
    task.rows = c.rows;
    task.head_dim = c.head_dim;
    task.padded_dim = padded;
    task.k = k.bytes.data();
    task.v = v.bytes.data();
    task.k_stride = task.v_stride = c.head_dim;
    task.k_scale = scale.data();
    task.v_scale = v_scale.data();
    task.k_scale_stride = task.v_scale_stride = 1;
    task.end = c.positions;
    task.first = first.data();
    task.last = limit.data();
    task.mask = c.hidden.empty() ? nullptr : mask.data();
    task.mask_stride = 1;
    task.softcap_log2 = c.softcap;
    task.bf16_factor = c.bf16_query ? 1.0f : 0.0f;
    task.max = max.data();
    task.sum = sum.data();
    task.out = out.data();
    task.attended = attended.data();
    task.scratch = scratch.data();
    kernel[c.type](task);
  }

  void quantize(std::vector<float>& values, std::vector<uint8_t>& bytes, std::vector<float>& scales,
                int64_t position) {
    float* row = values.data() + position * c.head_dim;
    auto* q = reinterpret_cast<int8_t*>(bytes.data()) + position * c.head_dim;
    kernels.quantize_row(row, q, &scales[position], c.head_dim);
    for (int64_t d = 0; d < c.head_dim; ++d) row[d] = static_cast<float>(q[d]) * scales[position];
  }

  // One row in float64.
  std::vector<double> exact(int64_t row) const {
    std::vector<double> weights(static_cast<size_t>(c.positions), 0.0);
    double max_score = -std::numeric_limits<double>::infinity(), total = 0.0;
    for (int64_t p = 0; p < c.positions; ++p) {
      if (!sees(row, p)) continue;
      double score = 0.0;
      for (int64_t i = 0; i < c.head_dim; ++i) {
        score += static_cast<double>(query[row * padded + i]) * k_values[p * c.head_dim + i];
      }
      weights[p] = c.softcap > 0.0f ? c.softcap * std::tanh(score) : score;
      max_score = std::max(max_score, weights[p]);
    }
    std::vector<double> y(static_cast<size_t>(c.head_dim), 0.0);
    for (int64_t p = 0; p < c.positions; ++p) {
      if (!sees(row, p)) continue;
      const double weight = std::exp2(weights[p] - max_score);
      total += weight;
      for (int64_t d = 0; d < c.head_dim; ++d) y[d] += weight * v_values[p * c.head_dim + d];
    }
    for (double& value : y) value = total == 0.0 ? 0.0 : value / total;
    return y;
  }

  double largest_error() const {
    double worst = 0.0;
    for (int64_t r = 0; r < c.rows; ++r) {
      const std::vector<double> wanted = exact(r);
      for (int64_t d = 0; d < c.head_dim; ++d) {
        const double got = sum[r] == 0.0f ? out[r * padded + d] : out[r * padded + d] / sum[r];
        const double error = std::abs(got - wanted[d]);
        if (!(error <= worst)) worst = error;  // NaN too
      }
    }
    return worst;
  }
};

using Kernel = void (*const*)(const AttentionTask&);

class AttentionKernel : public EveryIsa {
 protected:
  // f32 sums of up to 200 terms of size 1: scores of size sqrt(head_dim) are exact to 2^-20 up to
  // head_dim 128, which is also the relative error of a weight, and sums of more terms lose more. A
  // weight as bf16 is off by 2^-9, values reach 4.5.
  static double tolerance(const Case& c) {
    if (c.bf16_query) return 1e-2;
    return c.head_dim > 128 ? 4e-5 : 2e-5;
  }

  std::vector<Kernel> kernels_for(const Case& c) const {
    if (c.bf16_query) return {kernels().rope_attention_decode, kernels().causal_prefill_bf16};
    return {kernels().rope_attention_decode, kernels().causal_prefill,
            kernels().causal_prefill_bf16};
  }

  void expect_exact(Case c) {
    for (const bool bf16_query : {false, true}) {
      c.bf16_query = bf16_query;
      for (const Kernel kernel : kernels_for(c)) {
        Attention attention(kernels(), c);
        attention.run(kernel);
        EXPECT_LT(attention.largest_error(), tolerance(c))
            << c.rows << " rows, " << c.positions << " positions, head_dim " << c.head_dim
            << ", type " << c.type << (bf16_query ? ", bf16 query" : "");
      }
    }
  }
};

TEST_P(AttentionKernel, MatchesFloat64AtOddSizes) {
  for (const int64_t head_dim : {1, 8, 20, 64, 80, 96, 256}) {
    for (const int64_t rows : {1, 2, 3, 7, 16, 23, 64}) {
      for (const int64_t positions : {1, 63, 64, 65, 200}) {
        for (const ElementType type : {kF32, kBf16}) {
          expect_exact({.rows = rows, .positions = positions, .head_dim = head_dim, .type = type});
        }
      }
    }
  }
}

TEST_P(AttentionKernel, MatchesFloat64ForEveryCacheType) {
  for (const ElementType type : {kF32, kBf16, kF16, kInt8}) {
    for (const int64_t head_dim : {20, 21, 96, 128}) {
      for (const int64_t rows : {1, 2, 4, 5, 6, 40}) {
        expect_exact({.rows = rows, .positions = 130, .head_dim = head_dim, .type = type});
      }
    }
  }
}

TEST_P(AttentionKernel, MatchesFloat64UnderCausalLimitsMasksAndSoftcap) {
  std::vector<uint8_t> hidden(150, 0);
  for (size_t p = 0; p < hidden.size(); p += 3) hidden[p] = 1;
  for (const ElementType type : {kF32, kBf16, kInt8}) {
    expect_exact({.rows = 23, .positions = 150, .head_dim = 64, .type = type, .causal = true});
    expect_exact({.rows = 64, .positions = 64, .head_dim = 24, .type = type, .causal = true});
    expect_exact({.rows = 48,
                  .positions = 150,
                  .head_dim = 48,
                  .type = type,
                  .causal = true,
                  .hidden = hidden});
    expect_exact({.rows = 9,
                  .positions = 150,
                  .head_dim = 64,
                  .type = type,
                  .causal = true,
                  .hidden = hidden});
    expect_exact({.rows = 6, .positions = 100, .head_dim = 64, .type = type, .softcap = 5.0f});
  }
}

TEST_P(AttentionKernel, HiddenPositionsDoNotContribute) {
  for (const float poison : {kNaN, kInf, -kInf}) {
    for (const bool causal : {false, true}) {
      for (const bool bf16_query : {false, true}) {
        const Case c{.rows = 7,
                     .positions = 100,
                     .head_dim = 20,
                     .type = kBf16,
                     .causal = causal,
                     .hidden = std::vector<uint8_t>(100),
                     .bf16_query = bf16_query};
        for (const Kernel kernel : kernels_for(c)) {
          Attention attention(kernels(), c);
          for (int64_t p = 5; p < 100; p += 7) {
            attention.c.hidden[p] = 1;
            for (int64_t d = 0; d < 20; ++d) {
              attention.k_values[p * 20 + d] = attention.v_values[p * 20 + d] = poison;
            }
          }
          attention.run(kernel);
          EXPECT_LT(attention.largest_error(), tolerance(c)) << poison;
        }
      }
    }
  }
}

TEST_P(AttentionKernel, NaNOfAVisiblePositionPropagates) {
  for (const ElementType type : {kBf16, kInt8}) {
    for (const bool bf16_query : {false, true}) {
      const Case c{.rows = 3,
                   .positions = 80,
                   .head_dim = 16,
                   .type = type,
                   .causal = true,
                   .bf16_query = bf16_query};
      for (const Kernel kernel : kernels_for(c)) {
        for (const bool in_key : {true, false}) {
          Attention attention(kernels(), c);
          // Row 0 sees up to position 77, row 1 up to 78, row 2 up to 79.
          (in_key ? attention.k_values : attention.v_values)[78 * 16 + 3] = kNaN;
          attention.run(kernel);
          EXPECT_FALSE(std::isnan(attention.out[0] / attention.sum[0]));
          for (int64_t r : {1, 2}) {
            EXPECT_TRUE(std::isnan(attention.out[r * 16 + 3] / attention.sum[r])) << r;
          }
        }
      }
    }
  }
}

// Where all rows see all of a block, values may be multiplied another way.
TEST_P(AttentionKernel, NaNShowsInWhatAllRowsSee) {
  for (const bool bf16_query : {false, true}) {
    const Case c{
        .rows = 3, .positions = 128, .head_dim = 64, .type = kInt8, .bf16_query = bf16_query};
    for (const Kernel kernel : kernels_for(c)) {
      for (const int where : {0, 1, 2}) {  // query, key, value
        Attention attention(kernels(), c);
        if (where == 0) attention.query[64 + 5] = kNaN;
        if (where > 0) (where == 1 ? attention.k_values : attention.v_values)[70 * 64 + 5] = kNaN;
        attention.run(kernel);
        EXPECT_TRUE(std::isnan(attention.out[64 + 5] / attention.sum[1])) << where;
        EXPECT_EQ(std::isnan(attention.out[5] / attention.sum[0]), where > 0) << where;
      }
    }
  }
}

TEST(TiledPrefill, MultipliesByTilesWhereItMay) {
  const KernelTable& table = kEmulatedAmxKernels;
  const auto products = [&](Case c) {
    const int64_t before = emulated_tile_products();
    Attention(table, c).run(table.causal_prefill);
    EXPECT_FALSE(emulated_tiles_are_configured());
    return emulated_tile_products() - before;
  };
  Case c{.rows = 48, .positions = 100, .head_dim = 64, .type = kBf16, .bf16_query = true};
  // 64 keys, then 36: 4 and 3 tiles of keys and twice 4 of values, by 3 of rows and 2 steps.
  EXPECT_EQ(products(c), (4 + 3 + 2 * 4) * 3 * 2);
  c.bf16_query = false;
  EXPECT_EQ(products(c), 0);
  c.bf16_query = true;
  c.head_dim = 20;
  EXPECT_EQ(products(c), 0);
}

FASTTPS_EVERY_ISA(AttentionKernel);
INSTANTIATE_TEST_SUITE_P(Emulated, AttentionKernel, testing::Values(&kEmulatedAmxKernels),
                         isa_name);

}  // namespace
}  // namespace fasttps::cpu
