#include <torch/library.h>

// The whole interface of fasttps, one op a declaration. A trailing `_` and `(a!)` mark what is
// written. Shapes, units and errors: the header of each op beside this file.

// Both attention ops take the same arguments and both have an overload that returns (out, lse).
#define FASTTPS_ATTENTION_ARGS                                                                   \
  "(Tensor query, Tensor? key, Tensor? value, Tensor(a!) k_cache, Tensor(b!) v_cache, "          \
  "Tensor seq_lens, Tensor? cos=None, Tensor? sin=None, *, bool interleaved=False, "             \
  "float? scale=None, Tensor? attn_mask=None, Tensor? kv_start=None, Tensor? query_start=None, " \
  "int? window=None, float? softcap=None, Tensor? sinks=None, bool ring=False, "                 \
  "Tensor(c!)? k_scale=None, Tensor(d!)? v_scale=None)"

#define FASTTPS_DECODE_STEP_ARGS                                                               \
  "(Tensor input, Tensor[] weights, Tensor?[] norms, Tensor?[] biases, Tensor?[] head_norms, " \
  "Tensor?[] out_norms, Tensor(a!)[] k_caches, Tensor(b!)[] v_caches, Tensor seq_lens, "       \
  "Tensor cos, Tensor sin, *, int[] formats, int[] group_sizes, int num_heads, "               \
  "int intermediate_size, float norm_eps, bool int8_activation=False, str activation='silu', " \
  "bool interleaved=False, float? scale=None, int[] windows=[], bool ring=False, "             \
  "Tensor? kv_start=None, Tensor(c!)[]? k_scales=None, Tensor(d!)[]? v_scales=None, "          \
  "float norm_offset=0., int[] ropes=[], Tensor[]? orders=None, int[] columns=[], "            \
  "float? softcap=None, float residual_scale=1., "                                             \
  "Tensor? embedding=None, int embedding_format=0, int embedding_group_size=0, "               \
  "float embedding_scale=1., Tensor? lm_head=None, int lm_head_format=0, "                     \
  "int lm_head_group_size=0, int vocab_size=0, float logits_scale=1., "                        \
  "float? logits_softcap=None)"

TORCH_LIBRARY(fasttps, m) {
  m.def(
      "kv_cache_update_(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor key, Tensor value, "
      "Tensor seq_lens, *, bool ring=False, Tensor(c!)? k_scale=None, Tensor(d!)? v_scale=None) "
      "-> ()");
  m.def("rope_attention_decode" FASTTPS_ATTENTION_ARGS " -> Tensor");
  m.def("rope_attention_decode.lse" FASTTPS_ATTENTION_ARGS " -> (Tensor out, Tensor lse)");
  m.def("causal_prefill" FASTTPS_ATTENTION_ARGS " -> Tensor");
  m.def("causal_prefill.lse" FASTTPS_ATTENTION_ARGS " -> (Tensor out, Tensor lse)");
  m.def("merge_attention(Tensor[] outs, Tensor[] lses) -> (Tensor out, Tensor lse)");
  m.def(
      "gate_up_silu_mlp(Tensor x, Tensor gate_up, Tensor down, *, int gate_up_format, "
      "int down_format, int intermediate_size, int gate_up_group_size=0, int down_group_size=0, "
      "str activation='silu', Tensor? gate_bias=None, Tensor? up_bias=None, "
      "Tensor? down_bias=None, bool int8_activation=False) -> Tensor");
  m.def(
      "packed_linear(Tensor x, Tensor packed, *, int format, int rows, int group_size=0, "
      "bool int8_activation=False, Tensor? bias=None) -> Tensor");
  m.def(
      "packed_embedding(Tensor ids, Tensor packed, *, int format, int rows, int cols, "
      "ScalarType dtype, int group_size=0) -> Tensor");
  m.def("pack_weight(Tensor weight, *, int format, int group_size=0) -> Tensor");
  m.def(
      "unpack_weight(Tensor packed, *, int format, int rows, int cols, int group_size=0) -> "
      "Tensor");
  m.def("pack_gate_up(Tensor gate, Tensor up, *, int format, int group_size=0) -> Tensor");
  m.def(
      "pack_quants(Tensor quants, Tensor scales, Tensor? zeros=None, *, int format, "
      "int group_size=0) -> Tensor");
  m.def("pack_gguf(Tensor blocks, *, int format, int rows, int cols) -> Tensor");
  m.def("pack_gguf.out(Tensor blocks, *, int format, int rows, int cols, Tensor(a!) out) -> ()");
  m.def(
      "unpack_gate_up(Tensor packed, *, int format, int rows, int cols, int group_size=0) -> "
      "(Tensor gate, Tensor up)");
  m.def("decode_step" FASTTPS_DECODE_STEP_ARGS " -> Tensor");
  m.def("decode_step.argmax" FASTTPS_DECODE_STEP_ARGS " -> Tensor");
}

#undef FASTTPS_DECODE_STEP_ARGS

#undef FASTTPS_ATTENTION_ARGS
