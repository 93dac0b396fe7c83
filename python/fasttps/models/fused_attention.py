"""The attention of any family: with a StaticKVCache, all between its projections is one op.

Knows transformers' calling convention of an attention, our cache and the ops; knows no family. A
family makes its class from it: `class FusedLlamaAttention(FusedAttention, LlamaAttention)`.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fasttps.kv_cache import StaticKVCache
from fasttps.models import attention_interface, transformers_adapter
from fasttps.models.fused_module import FusedModule, ReadOriginal
from fasttps.models.obstacles import has_kernels
from fasttps.models.packed_linear import PackedLinear
from fasttps.models.packed_weight import PackedTensor
from fasttps.models.patch_options import Options
from fasttps.models.static_attention import Rules, attend_static

# What a caller may pass down to the attention that the one op does not serve.
_LONG_WAY = frozenset({"output_attentions", "position_bias", "softcap", "s_aux", "sliding_window"})
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class FusedAttention(FusedModule):
    """An attention whose projections stay modules, each packed by itself.

    So whatever wraps them keeps working. With another cache the class's own forward runs, and the
    attention alone is ours.

    Attributes:
        inputs, output: names of the projections: q, k and v, or the one that makes all three.
        norms: of the heads of q and of k, before RoPE, where there are some.
        interleaved: whether RoPE turns the pairs (2i, 2i + 1) and not halves.
    """

    part = "attention"
    op = "rope_attention_decode, causal_prefill"
    inputs: ClassVar[tuple[str, ...]] = ("q_proj", "k_proj", "v_proj")
    output: ClassVar[str] = "o_proj"
    norms: ClassVar[tuple[str, str] | None] = None
    interleaved: ClassVar[bool] = False

    # Of every attention of transformers, what is used here:
    config: Any
    layer_idx: int
    head_dim: int
    scaling: float
    is_causal: bool

    @classmethod
    def obstacle(cls, module: nn.Module, shared: frozenset[int]) -> str | None:
        if not transformers_adapter.asks_for_attention(cls.replaces):
            return "does not ask for the attention that its config names in this transformers"
        for name in (*cls.inputs, cls.output, *(cls.norms or ())):
            if module._modules.get(name) is None:
                return f"has no {name}"
        for name, parameter in module.named_parameters():
            if parameter.is_meta:
                return f"{name} is on the meta device (offloaded)"
            if not has_kernels(parameter.device):
                return f"{name} is on {parameter.device}, for which there are no kernels"
            if parameter.is_floating_point() and parameter.dtype not in _DTYPES:
                return f"{name} is {parameter.dtype}, which the ops do not take"
        return None

    def fuse(self, options: Options, **arguments: Any) -> None:
        self.__dict__["kv"] = options.kv

    def unfuse(self, read: ReadOriginal | None = None) -> None:
        del self.__dict__["kv"]

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,  # the name of `cache` before transformers 5.24
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        self.refuse_gradient(hidden_states, self._weight())
        if cache is None:
            cache = past_key_values
        if (
            not isinstance(cache, StaticKVCache)
            or position_embeddings is None
            or any(
                kwargs[name] is not None and kwargs[name] is not False
                for name in _LONG_WAY & kwargs.keys()
            )
            or self.config._attn_implementation != attention_interface.NAME
            or self.config.output_attentions
        ):
            # The class's own way, with the attention that its config names: ours, unless the user
            # has set another.
            own: Any = super().forward
            kwargs[transformers_adapter.cache_argument(self.replaces.forward)] = cache
            return own(
                hidden_states,
                position_embeddings=position_embeddings,
                attention_mask=attention_mask,
                **kwargs,
            )
        is_causal = kwargs.get("is_causal")
        out = attend_static(
            *self.project(hidden_states),
            cache.layers[self.layer_idx],
            self.rope(position_embeddings),
            attention_mask,
            self.rules(self.is_causal if is_causal is None else is_causal),
        )
        return self.project_out(out), None

    def forward_last(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        cache: StaticKVCache,
        count: int,
    ) -> Tensor:
        """The output for the last `count` tokens; keys and values of all enter the cache."""
        query, key, value = self.project(hidden_states, count)
        layer: Any = cache.layers[self.layer_idx]
        rope = self.rope(position_embeddings)
        return self.project_out(
            attend_static(query, key, value, layer, rope, None, self.rules(True))
        )

    def project(self, x: Tensor, last: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """q of the `last` tokens (None: all), k and v: [batch, tokens, heads, head_dim]."""
        of_query = x if last is None else x[:, -last:]
        q, k, v = (self._modules[name] for name in self.inputs)
        heads = (-1, self.head_dim)
        query, key, value = (
            project(of).unflatten(-1, heads)  # type: ignore[misc]
            for project, of in ((q, of_query), (k, x), (v, x))
        )
        return (*self.normalize(query, key), value)

    def normalize(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """q and k after the norms of their heads."""
        if self.norms is None:
            return query, key
        of_query, of_key = (self._modules[name] for name in self.norms)
        return of_query(query), of_key(key)  # type: ignore[misc]

    def project_out(self, out: Tensor) -> Tensor:
        return self._modules[self.output](out.flatten(2))  # type: ignore[misc]

    def rope(self, position_embeddings: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor] | None:
        """cos and sin as the op takes them; None: this layer does not rotate."""
        return position_embeddings

    @property
    def rope_table(self) -> int:
        """Which of the tables of its model this layer rotates by, -1: none."""
        return 0

    def packed_projections(self) -> tuple[PackedTensor, ...] | str:
        """q, k, v and o as `decode_step` takes them, or why they are not there."""
        packed = []
        for name in (*self.inputs, self.output):
            linear: Any = self._modules[name]
            if type(linear) is not PackedLinear:
                return f"{name} is a {type(linear).__name__}, not a PackedLinear"
            if linear.packed_weight is None:
                return f"{name} is not packed"
            packed.append(linear.packed_weight)
        return tuple(packed)

    def rules(self, is_causal: bool) -> Rules:
        """What this attention does besides softmax(q k^T) v."""
        return Rules(
            self.scaling,
            is_causal,
            self.interleaved,
            self.window,
            self.softcap,
            self.sink_logits,
        )

    # As most attentions of transformers keep them; a family says otherwise where that differs.

    @property
    def window(self) -> int | None:
        return getattr(self, "sliding_window", None)

    @property
    def softcap(self) -> float | None:
        return None

    @property
    def sink_logits(self) -> Tensor | None:
        return None

    def _weight(self) -> Tensor | None:
        first: Any = self._modules[self.inputs[0]]
        return first._parameters.get("weight")


# Here, not in the patch: a patched model that is loaded from a file brings this module alone.
attention_interface.register_attention()
