// Included once by each isa/*.cpp, after its Vec. Everything lies in anonymous namespaces, so that
// every instruction set keeps its own copy and none can be picked up by an older CPU.
#include "element.h"
#include "math.h"
//
#include "attention.h"
#include "causal_prefill.h"
#include "causal_prefill_bf16.h"
#include "decode_step.h"
#include "kv_cache_update.h"
#include "merge_attention.h"
#include "pack_weight.h"
#include "prepare.h"
//
#include "packed_linear.h"
#include "quantized_format.h"
//
#include "packed_embedding.h"
#include "quantize_weight.h"
#include "quantized_linear.h"
//
#include "gate_up_silu_mlp.h"
#include "pack_gguf.h"
#include "pack_quants.h"
#include "rope.h"
//
#include "decode_product.h"
//
#include "decode_rows.h"
//
#include "rope_attention_decode.h"

namespace fasttps::cpu {
namespace {

// One line per entry of KernelTable, so no row can miss a kernel.
template <class Vec>
constexpr KernelTable kernel_table_for(const char* isa, uint32_t required_features) {
  return {
      isa,
      required_features,
      map_f32<Vec, exp<Vec>>,
      map_f32<Vec, exp2<Vec>>,
      map_f32<Vec, tanh<Vec>>,
      map_f32<Vec, erf<Vec>>,
      {load_row<Vec, F32>, load_row<Vec, Bf16>, load_row<Vec, F16>},
      {store_row<Vec, F32>, store_row<Vec, Bf16>, store_row<Vec, F16>},
      {rope_row<Vec, F32>, rope_row<Vec, Bf16>, rope_row<Vec, F16>},
      quantize_row<Vec>,
      {rope_attention_decode<Vec, F32>, rope_attention_decode<Vec, Bf16>,
       rope_attention_decode<Vec, F16>, rope_attention_decode<Vec, Int8>},
      {causal_prefill<Vec, F32>, causal_prefill<Vec, Bf16>, causal_prefill<Vec, F16>,
       causal_prefill<Vec, Int8>},
      {causal_prefill<Vec, F32>, causal_prefill_bf16<Vec, Bf16>, causal_prefill<Vec, F16>,
       causal_prefill_bf16<Vec, Int8>},
      merge_attention<Vec>,
      rms_norm_row<Vec>,
      scale_row<Vec>,
      argmax_f32<Vec>,
      {float_linear_kernels<F32Product<Vec>>(), float_linear_kernels<Bf16Linear<Vec>>(),
       float_linear_kernels<WidenedProduct<Vec, F16>>(),
       quantized_linear_kernels<Vec, Int8Weight>(), quantized_linear_kernels<Vec, Int4Weight>(),
       quantized_linear_kernels<Vec, Int4MinWeight>(),
       quantized_linear_kernels<Vec, Int8GroupWeight>(), quantized_linear_kernels<Vec, Q4KWeight>(),
       quantized_linear_kernels<Vec, Q6KWeight>(), quantized_linear_kernels<Vec, Int4ZeroWeight>()},
      float_linear_kernels<WidenedProduct<Vec, Bf16>>(),
      {{prepare_f32<Vec, F32>, prepare_f32<Vec, Bf16>, prepare_f32<Vec, F16>},
       {prepare_bf16<Vec, F32>, prepare_bf16<Vec, Bf16>, prepare_bf16<Vec, F16>},
       {prepare_int8<Vec, F32>, prepare_int8<Vec, Bf16>, prepare_int8<Vec, F16>}},
      {unpack_row<F32>, unpack_row<Bf16>, unpack_row<F16>, unpack_quantized_row<Int8Weight>,
       unpack_quantized_row<Int4Weight>, unpack_quantized_row<Int4MinWeight>,
       unpack_quantized_row<Int8GroupWeight>, unpack_quantized_row<Q4KWeight>,
       unpack_quantized_row<Q6KWeight>, unpack_quantized_row<Int4ZeroWeight>},
      {pack_panel<uint32_t>, pack_panel<uint16_t>, pack_panel<uint16_t>, pack_int8_panel<Vec>,
       pack_int4_panel<Vec, Int4Weight>, pack_int4_panel<Vec, Int4MinWeight>,
       pack_int8_group_panel<Vec>},
      {pack_gguf_panel<Q40Block>, pack_gguf_panel<Q41Block>, pack_gguf_panel<Q80Block>,
       pack_gguf_panel<Q4KBlock>, pack_gguf_panel<Q6KBlock>},
      {pack_quants_panel<Int8Weight>, pack_quants_panel<Int4Weight>,
       pack_quants_panel<Int8GroupWeight>, pack_quants_panel<Int4ZeroWeight>},
      {unpack_panel<uint32_t>, unpack_panel<uint16_t>},
  };
}

}  // namespace
}  // namespace fasttps::cpu
