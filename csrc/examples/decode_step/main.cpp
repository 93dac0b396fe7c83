// One decode step: attention over a static cache, a packed MLP, then a whole decoder layer as one
// op, each with an answer that is known by hand. Exits with 1 if an answer is wrong.
#include <ATen/ATen.h>
#include <fasttps/fasttps.h>

#include <cmath>
#include <cstdio>

namespace {

bool is_near(const char* what, double got, double wanted) {
  const bool ok = std::abs(got - wanted) < 1e-5;
  std::printf("%-10s %.6f, wanted %.6f%s\n", what, got, wanted, ok ? "" : "  WRONG");
  return ok;
}

}  // namespace

int main() {
  // Four query heads share two KV heads; seven tokens are in the cache, the eighth is new. A query
  // of zeros weighs all keys alike, and row j of V holds j: the answer is the mean of 0..7.
  const int64_t heads = 4, kv_heads = 2, head_dim = 64, max_seq_len = 16, filled = 7;
  at::Tensor k_cache = at::randn({1, kv_heads, max_seq_len, head_dim});
  at::Tensor v_cache = at::arange(max_seq_len, at::kFloat)
                           .view({1, 1, max_seq_len, 1})
                           .expand({1, kv_heads, max_seq_len, head_dim})
                           .contiguous();
  const at::Tensor query = at::zeros({1, 1, heads, head_dim});
  const at::Tensor key = at::randn({1, 1, kv_heads, head_dim});
  const at::Tensor value = at::full({1, 1, kv_heads, head_dim}, 7.0);
  const at::Tensor seq_lens = at::scalar_tensor(filled, at::kLong);
  const at::Tensor all =
      fasttps::rope_attention_decode(query, key, value, k_cache, v_cache, seq_lens);
  // The same token again, now seeing only itself and three before it: the mean of 4..7.
  const at::Tensor windowed =
      fasttps::rope_attention_decode(query, key, value, k_cache, v_cache, seq_lens, {.window = 4});

  // Identity weights: every element of the answer is silu(1) * 1.
  const int64_t hidden = 32;
  const at::Tensor identity = at::eye(hidden);
  const auto format = fasttps::PackedFormat::kF32;
  const at::Tensor mlp = fasttps::gate_up_silu_mlp(
      at::ones({1, 1, hidden}), fasttps::pack_gate_up(identity, identity, format),
      fasttps::pack_weight(identity, format),
      {.gate_up_format = format, .down_format = format, .intermediate_size = hidden});

  // A layer: x = 1, so its norm is 1; v hands it on, and o adds it: 2, whose norm is 1 again; the
  // MLP adds silu(1).
  const auto packed = [&](const at::Tensor& weight) {
    return fasttps::PackedWeight{fasttps::pack_weight(weight, format), format};
  };
  const at::Tensor nothing = at::zeros({2 * hidden, hidden});
  const fasttps::DecoderLayerWeights layer{
      .input_norm = at::ones(hidden),
      .post_norm = at::ones(hidden),
      .q = packed(nothing),
      .k = packed(nothing.slice(0, 0, hidden)),
      .v = packed(identity),
      .o = packed(at::cat({identity, at::zeros({hidden, hidden})}, 1)),
      .gate_up = {fasttps::pack_gate_up(identity, identity, format), format},
      .down = packed(identity),
      .k_cache = at::zeros({1, 2, max_seq_len, hidden / 2}),
      .v_cache = at::zeros({1, 2, max_seq_len, hidden / 2})};
  const at::Tensor step =
      fasttps::decode_step(at::ones({1, 1, hidden}), layer, at::scalar_tensor(0, at::kLong),
                           at::ones({1, 1, hidden / 2}), at::zeros({1, 1, hidden / 2}),
                           {.num_heads = 4, .intermediate_size = hidden, .norm_eps = 0.0});

  const bool ok = is_near("attention", all.mean().item<double>(), 3.5) &
                  is_near("window 4", windowed.mean().item<double>(), 5.5) &
                  is_near("mlp", mlp.mean().item<double>(), 0.731059) &
                  is_near("layer", step.mean().item<double>(), 2.731059);
  return ok ? 0 : 1;
}
