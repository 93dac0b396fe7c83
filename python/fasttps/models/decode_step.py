"""A decoder's next tokens as one op: what `generate` calls a patched model for, token by token.

Knows transformers' calling convention of a causal LM, our cache and the ops; knows no family. A
family makes its class from it and says where the parts lie:
`class LlamaForCausalLM(FusedCausalLM, modeling_llama.LlamaForCausalLM)`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from itertools import chain
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fasttps import _C
from fasttps.models.fused_module import FusedModule, ReadOriginal
from fasttps.models.model_watch import hooks_below, own_forward, watch
from fasttps.models.packed_module import PackedTensor, packing_epoch
from fasttps.ops.decode_step import DecodeStep

MAX_TOKENS = 8  # new tokens of a sequence; more are a prompt, which the layers take one by one
MAX_ROWS = 64  # new tokens of a sequence times query heads of a KV head, as the op has it
TABLE_ROWS = 1024  # the RoPE table grows by so many positions

# Of a causal LM's forward, in this order since long before transformers 5.
_POSITIONAL = (
    "input_ids",
    "attention_mask",
    "position_ids",
    "cache",
    "inputs_embeds",
    "labels",
    "use_cache",
    "logits_to_keep",
)


@dataclass(frozen=True)
class Layer:
    """The parts of one decoder layer."""

    norms: tuple[Tensor, Tensor]
    weights: tuple[PackedTensor | None, ...]  # q, k, v, o, gate_up, down


@dataclass(frozen=True)
class Parts:
    """A model as the op takes it; the family says where each part lies."""

    layers: Sequence[Layer]
    final_norm: Tensor
    embedding: PackedTensor | None  # None: a plain weight, whose rows are taken before the op
    lm_head: PackedTensor | None
    head_dim: int
    num_heads: int
    num_kv_heads: int
    norm_eps: float
    scale: float
    activation: str
    settings: Sequence[tuple[dict[str, Any], str]]  # where those numbers lie: dict, key


@dataclass
class Plan:
    """Arguments of the op that do not change between tokens, and what they rest on."""

    epoch: int  # of packing: packed buffers are replaced when weights are loaded or moved
    watch: _C.ModuleWatch
    hooks: list[dict[Any, Any]]
    lists: tuple[Any, ...] = ()  # weights, norms, biases
    options: dict[str, Any] = field(default_factory=dict)
    obstacle: str | None = None
    max_tokens: int = MAX_TOKENS
    rotary: Any = None
    kind: tuple[Any, ...] = ()  # num_kv_heads, head_dim and dtype of the keys
    # By cache, for as long as it lives: its tensors watched, and the op bound to them.
    bound: WeakKeyDictionary[Any, tuple[_C.ModuleWatch, DecodeStep]] = field(
        default_factory=WeakKeyDictionary
    )

    def is_current(self) -> bool:
        return self.epoch == packing_epoch() and self.watch.is_unchanged()

    def step(self, cache: Any) -> DecodeStep:
        """The op on the plan's weights and the tensors that `cache` has now."""
        found = self.bound.get(cache)
        if found is not None and found[0].is_unchanged():
            return found[1]
        weights, norms, biases = self.lists
        keys, values, k_scales, v_scales = cache.step_buffers()
        scales = {"k_scales": k_scales, "v_scales": v_scales}
        step = DecodeStep(weights, norms, biases, keys, values, **scales, **self.options)
        watch = _C.ModuleWatch(cache.step_entries())
        self.bound[cache] = watch, step
        return step


class FusedCausalLM(FusedModule):
    """A causal LM whose next tokens are one op, where cache and arguments allow; same results.

    With a StaticKVCache that holds the prompt, up to eight new tokens a sequence, left padding or
    none, and nothing asked for but logits. Every other call goes module by module, as it would
    without this class; `why_not` of the last such call says why. A prompt of which the last logits
    are wanted (`logits_to_keep`) saves most of its last layer on the way.
    """

    part = "decode_step"
    op = "decode_step"
    why_not: str | None = None

    dtype: torch.dtype

    # For the family to give:
    output_class: ClassVar[Any]
    own_attention: ClassVar[str]

    def decoder_parts(self) -> Parts | str:
        """The parts, or why the op cannot run them."""
        raise NotImplementedError

    def decoder(self) -> Any:
        """The module that holds embed_tokens, layers and rotary_emb."""
        raise NotImplementedError

    def unfuse(self, read: ReadOriginal | None = None) -> None:
        for name in ("_step_plan", "_rope_table", "why_not"):
            self.__dict__.pop(name, None)

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        for name in ("_step_plan", "_rope_table", "why_not"):
            state.pop(name, None)
        return state

    def forward_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The output of one step through the op; None where the layers must be called.

        Then nothing has changed.
        """
        named = dict(zip(_POSITIONAL, args)) | kwargs
        cache = named.pop("cache", None)
        if cache is None:
            cache = named.pop("past_key_values", None)
        ids = named.pop("input_ids", None)
        mask = named.pop("attention_mask", None)
        positions = named.pop("position_ids", None)
        keep = named.pop("logits_to_keep", 0)
        reason = None
        if named.pop("use_cache", None) is False:
            reason = "use_cache is False"
        elif not isinstance(keep, int):
            reason = "logits_to_keep is a tensor"
        elif named.pop("return_dict", None) is False:
            reason = "return_dict is False"
        elif any(value is not None and value is not False for value in named.values()):
            reason = f"{', '.join(named)} was given"
        else:
            logits: Tensor | str | None = self.decode(
                ids, cache, attention_mask=mask, position_ids=positions
            )
            if isinstance(logits, str):
                reason = logits
                logits = self.prompt(ids, cache, mask, positions, keep) if keep > 0 else None
            if logits is not None:
                self.__dict__["why_not"] = reason
                logits = logits[:, -keep:] if keep else logits
                fields = {"logits": logits.to(self.dtype), self.cache_name(): cache}
                return self.output_class(**fields)
        self.__dict__["why_not"] = reason
        return None

    def decode(
        self,
        input_ids: Any,
        cache: Any,
        *,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        kv_start: Tensor | str | None = None,
        argmax: bool = False,
    ) -> Tensor | str:
        """Append `input_ids` [batch, new_tokens] to the cache.

        `kv_start` [batch]: the first token of each sequence that is none of padding, for who
        knows it without an attention mask.

        Returns:
            float32 logits [batch, new_tokens, vocab_size], with `argmax` int64 [batch,
            new_tokens]; or why the op cannot do it, and then nothing has changed.
        """
        plan = self._runnable_plan(input_ids)
        if isinstance(plan, str):
            return plan
        batch, new_tokens = input_ids.shape
        if not 1 <= new_tokens <= plan.max_tokens:
            return f"{new_tokens} new tokens"
        start = None
        if hasattr(cache, "step_start"):
            start = cache.step_start(batch, new_tokens, *plan.kind)
        if start is None:
            return "not a StaticKVCache that holds tokens of this batch and has room for more"
        if kv_start is None:
            kv_start = _kv_start(attention_mask, batch, start + new_tokens)
        if isinstance(kv_start, str):
            return kv_start
        rope = self._rope(plan, position_ids, start, new_tokens, cache.max_seq_len)
        if isinstance(rope, str):
            return rope
        if "embedding" not in plan.options:
            input_ids = self.decoder().embed_tokens(input_ids)
        seq_lens = cache.seq_lens
        out = plan.step(cache)(input_ids, seq_lens, *rope, kv_start=kv_start, argmax=argmax)
        cache.end_step(new_tokens)
        return out

    def prompt(
        self,
        input_ids: Any,
        cache: Any,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        count: int,
    ) -> Tensor | None:
        """Append a prompt [batch, new_tokens] module by module, the last layer for its end alone.

        Of the last layer only keys and values are wanted of every token.

        Returns:
            Logits of the last `count` tokens; None where that is not possible, or saves nothing.
        """
        plan = self._runnable_plan(input_ids)
        if isinstance(plan, str) or not hasattr(cache, "step_start"):
            return None
        batch, new_tokens = input_ids.shape
        start = int(cache.get_seq_length())
        if count >= new_tokens or _kv_start(attention_mask, batch, start + new_tokens) is not None:
            return None
        if position_ids is None:
            position_ids = torch.arange(start, start + new_tokens)[None]
        return self.prompt_logits(input_ids, cache, position_ids, count)

    def prompt_logits(
        self, input_ids: Tensor, cache: Any, position_ids: Tensor, count: int
    ) -> Tensor:
        """What `prompt` does, by the family, where nothing is padded."""
        raise NotImplementedError

    def cache_name(self) -> str:
        """Of the argument and the field, which changed in transformers 5.24."""
        fields = self.output_class.__dataclass_fields__
        return "cache" if "cache" in fields else "past_key_values"

    def _runnable_plan(self, input_ids: Any) -> Plan | str:
        """The plan, or why this model cannot run by it now."""
        if not isinstance(input_ids, Tensor) or input_ids.dim() != 2:
            return "no input_ids [batch, new_tokens]"
        if torch.is_grad_enabled() or self.training:
            return "gradients are enabled"
        if torch.is_autocast_enabled("cpu"):
            return "autocast"
        config: Any = self.config
        if config._attn_implementation != self.own_attention or config.output_attentions:
            return f"the config asks for {config._attn_implementation} attention or its weights"
        if getattr(config, "output_hidden_states", False):
            return "the config asks for hidden states"
        plan = self.step_plan()
        if plan.obstacle is not None:
            return plan.obstacle
        hooks = chain(*(own.values() for own in plan.hooks)) if plan.watch.has_hooks() else ()
        if not all(map(_is_idle, hooks)):
            return "a module has hooks"
        return plan

    def step_plan(self) -> Plan:
        """The plan, made anew where the model has changed since."""
        plan: Plan | None = self.__dict__.get("_step_plan")
        if plan is None or not plan.is_current():
            plan = self.__dict__["_step_plan"] = self._make_plan()
        return plan

    def _make_plan(self) -> Plan:
        hooks, parts = hooks_below(self), self.decoder_parts()
        settings = () if isinstance(parts, str) else parts.settings
        plan = Plan(packing_epoch(), watch(self, hooks, settings), hooks)
        if isinstance(parts, str):
            plan.obstacle = parts
            return plan
        if (changed := own_forward(self)) is not None:
            plan.obstacle = f"{changed} has a forward of its own"
            return plan
        weights = [w for layer in parts.layers for w in layer.weights if w is not None]
        if parts.lm_head is None or len(weights) < sum(len(x.weights) for x in parts.layers):
            plan.obstacle = "not every weight is packed"
            return plan
        int8 = {w.int8_activation for w in (*weights, parts.lm_head)}
        if len(int8) > 1:
            plan.obstacle = "some weights take int8 activations and some do not"
            return plan
        biases = [bias for w in weights for bias in (w.bias if _is_pair(w.bias) else (w.bias,))]
        norms = [norm for layer in parts.layers for norm in layer.norms]
        plan.lists = (
            [w.packed for w in weights],
            [*norms, parts.final_norm],
            biases if any(bias is not None for bias in biases) else [],
        )
        plan.options = {
            "formats": [int(w.format) for w in weights],
            "group_sizes": [w.group_size for w in weights],
            "num_heads": parts.num_heads,
            "intermediate_size": weights[4].rows,  # of gate_up
            "norm_eps": parts.norm_eps,
            "int8_activation": int8.pop(),
            "activation": parts.activation,
            "scale": parts.scale,
            "vocab_size": parts.lm_head.rows,
        }
        for name, packed in (("lm_head", parts.lm_head), ("embedding", parts.embedding)):
            if packed is not None:
                plan.options[name] = packed.packed
                plan.options[f"{name}_format"] = int(packed.format)
                plan.options[f"{name}_group_size"] = packed.group_size
        plan.rotary = self.decoder().rotary_emb
        plan.kind = (parts.num_kv_heads, parts.head_dim, self.dtype)
        plan.max_tokens = min(MAX_TOKENS, MAX_ROWS * parts.num_kv_heads // parts.num_heads)
        return plan

    def _rope(
        self,
        plan: Plan,
        position_ids: Tensor | None,
        start: int,
        new_tokens: int,
        max_seq_len: int,
    ) -> tuple[Tensor, Tensor] | str:
        """cos and sin [1 or batch, new_tokens, rotary_dim] in the model's dtype, from a table."""
        rotary, dtype = plan.rotary, plan.kind[-1]
        kind = getattr(rotary, "rope_type", None)
        if kind not in STATIC_ROPE:
            return f"RoPE of type {kind} changes with the length"
        first = start
        rows: Tensor | None = None
        if position_ids is not None:
            if position_ids.dim() != 2 or position_ids.size(1) != new_tokens:
                return f"position_ids of shape {tuple(position_ids.shape)}"
            if position_ids.numel() == 1:
                first = int(position_ids)
            else:
                rows = position_ids
        last = int(rows.max()) if rows is not None else first + new_tokens - 1
        if first < 0 or (rows is not None and int(rows.min()) < 0):
            return "a negative position"
        table: RopeTable | None = self.__dict__.get("_rope_table")
        if table is None or not table.serves(rotary, dtype) or last >= table.rows:
            table = RopeTable(rotary, dtype, max(last + 1, max_seq_len))
            self.__dict__["_rope_table"] = table
        if rows is None:
            return table.cos.narrow(1, first, new_tokens), table.sin.narrow(1, first, new_tokens)
        return table.cos[0][rows], table.sin[0][rows]


def _is_idle(hook: Any) -> bool:
    """Whether a hook is one of those that transformers leaves after `output_hidden_states`.

    They record where a later call asks for it, and such a call goes module by module.
    """
    return getattr(hook, "__module__", None) == "transformers.utils.output_capturing"


# The kinds of transformers' RoPE whose angles depend on the position alone.
STATIC_ROPE = frozenset({"default", "linear", "llama3", "yarn"})


class RopeTable:
    """cos and sin [1, rows, rotary_dim] of one rotary module, as it computes them itself."""

    def __init__(self, rotary: Any, dtype: torch.dtype, rows: int) -> None:
        self.rows = -(-rows // TABLE_ROWS) * TABLE_ROWS
        self._rotary, self._dtype = rotary, dtype
        self._frequencies = rotary.inv_freq
        self._state = _state(rotary)
        with torch.inference_mode(False), torch.no_grad():
            positions = torch.arange(self.rows)[None]
            self.cos, self.sin = rotary(torch.zeros(1, dtype=dtype), positions)

    def serves(self, rotary: Any, dtype: torch.dtype) -> bool:
        """Whether the table is that of `rotary` as it is now."""
        return (
            rotary is self._rotary
            and rotary._buffers.get("inv_freq") is self._frequencies
            and _state(rotary) == self._state
            and dtype == self._dtype
        )


def _state(rotary: Any) -> tuple[Any, ...]:
    """What changes with the values of a rotary module, but for inference tensors' own."""
    frequencies: Tensor = rotary._buffers["inv_freq"]
    version = 0 if frequencies.is_inference() else frequencies._version
    return frequencies.data_ptr(), version, rotary.__dict__.get("attention_scaling")


def _is_pair(bias: Any) -> bool:
    return isinstance(bias, tuple)


def _kv_start(mask: Tensor | None, batch: int, kv_len: int) -> Tensor | str | None:
    """The first position of each sequence that a left-padding mask [batch, kv_len] shows.

    None where it shows all; a string where it is no such mask.
    """
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.shape != (batch, kv_len):
        return "an attention mask that is not [batch, tokens so far]"
    shown = mask.bool() if mask.dtype != torch.bool else mask
    if bool(shown.all()):
        return None
    count = shown.sum(-1)
    first = kv_len - count
    if not bool((shown == (torch.arange(kv_len) >= first[:, None])).all()):
        return "an attention mask with holes"
    return first


def forward_of(original: Callable[..., Any]) -> Callable[..., Any]:
    """`forward` with the original's signature: the op where it can run, else the original."""

    @wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = None if torch.compiler.is_compiling() else self.forward_step(args, kwargs)
        return original(self, *args, **kwargs) if out is None else out

    return forward
