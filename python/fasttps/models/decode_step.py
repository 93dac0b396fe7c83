"""A decoder's next tokens as one op: what `generate` calls a patched model for, token by token.

Knows transformers' calling convention of a causal LM, our cache and the ops; knows no family. A
family makes its class from it and gives its anatomy:
`class LlamaForCausalLM(FusedCausalLM, modeling_llama.LlamaForCausalLM)`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, wraps
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor

from fasttps.models import attention_interface, transformers_adapter
from fasttps.models.decode_plan import Plan, make_plan
from fasttps.models.decoder_parts import Anatomy, parts_of
from fasttps.models.fused_module import FusedModule, ReadOriginal
from fasttps.models.rope_table import RopeTable, rope_obstacle

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


@lru_cache(maxsize=1)
def _output_class() -> Any:
    """Of a causal LM; transformers is there where a model is."""
    from transformers.modeling_outputs import CausalLMOutputWithPast

    return CausalLMOutputWithPast


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
    config: Any
    model: Any
    lm_head: Any

    # For the family to give:
    anatomy: ClassVar[Anatomy]
    config_keys: ClassVar[tuple[str, ...]] = ()  # of its own numbers, which the op is told

    def decoder(self) -> Any:
        """The module that holds embed_tokens, layers, norm and rotary_emb."""
        return self.model

    def embed(self, input_ids: Tensor) -> Tensor:
        """What enters the first layer."""
        return self.decoder().embed_tokens(input_ids)

    def rotaries(self) -> Sequence[Any]:
        """The modules that compute RoPE's angles."""
        return (self.decoder().rotary_emb,)

    def angles(self, x: Tensor, position_ids: Tensor) -> Sequence[tuple[Tensor, Tensor]]:
        """cos and sin as the layers take them: a pair for each `FusedAttention.rope_table`."""
        return (self.decoder().rotary_emb(x, position_ids),)

    def factors(self) -> dict[str, Any]:
        """Of residual, embedding and logits, where they are not 1, by the op's names."""
        return {}

    def unfuse(self, read: ReadOriginal | None = None) -> None:
        for name in ("_step_plan", "_table", "why_not"):
            self.__dict__.pop(name, None)

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        for name in ("_step_plan", "_table", "why_not"):
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
                return _output_class()(**fields)
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
            start = cache.step_start(batch, new_tokens, plan.windows, *plan.kind)
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
            input_ids = self.embed(input_ids)
        step = plan.step(cache)
        seq_lens = cache.begin_step(new_tokens)
        out = step(input_ids, seq_lens, *rope, kv_start=kv_start, argmax=argmax)
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
        """What `prompt` does, where nothing is padded: no layer needs a mask."""
        decoder, anatomy, factors = self.decoder(), self.anatomy, self.factors()
        residual = factors.get("residual_scale", 1.0)
        x = self.embed(input_ids)
        pairs = self.angles(x, position_ids)
        *layers, last = decoder.layers
        for layer in layers:
            x = layer(
                x,
                position_ids=position_ids,
                use_cache=True,
                position_embeddings=pairs[max(0, layer.self_attn.rope_table)],
                **{self.cache_name(): cache},
            )
            x = x[0] if isinstance(x, tuple) else x  # of some families before transformers 5
        before, after = anatomy.norms_of(last), anatomy.out_norms_of(last) or (None, None)
        x, rows = x[:, -count:], _norm(before[0], x)
        pair = pairs[max(0, last.self_attn.rope_table)]
        added = last.self_attn.forward_last(rows, pair, cache, count)
        x = x + _norm(after[0], added) * residual
        x = x + _norm(after[1], last.mlp(_norm(before[1], x))) * residual
        logits = self.lm_head(decoder.norm(x)) * factors.get("logits_scale", 1.0)
        if (softcap := factors.get("logits_softcap")) is not None:
            logits = softcap * torch.tanh(logits / softcap)
        return logits

    def cache_name(self) -> str:
        """Of the argument and the field."""
        return transformers_adapter.cache_field(_output_class())

    def _runnable_plan(self, input_ids: Any) -> Plan | str:
        """The plan, or why this model cannot run by it now."""
        if not isinstance(input_ids, Tensor) or input_ids.dim() != 2:
            return "no input_ids [batch, new_tokens]"
        if torch.is_grad_enabled() or self.training:
            return "gradients are enabled"
        if torch.is_autocast_enabled("cpu"):
            return "autocast"
        config: Any = self.config
        if config._attn_implementation != attention_interface.NAME or config.output_attentions:
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
        decoder = self.decoder()
        heads = self.config.num_attention_heads
        parts = parts_of(self.anatomy, decoder, self.lm_head, heads)
        if isinstance(parts, str):
            return make_plan(self, parts, ())
        if (reason := rope_obstacle(self.rotaries())) is not None:
            return make_plan(self, reason, ())
        own = (vars(decoder.config), vars(self.config))
        keys = ("sliding_window", *self.config_keys)
        parts.settings += [(config, key) for config in own for key in keys if key in config]
        parts.options |= self.factors()
        attention = decoder.layers[0].self_attn
        rows = parts.weights[1].rows  # of k
        return make_plan(self, parts, (rows // attention.head_dim, attention.head_dim, self.dtype))

    def _rope(
        self,
        plan: Plan,
        position_ids: Tensor | None,
        start: int,
        new_tokens: int,
        max_seq_len: int,
    ) -> tuple[Tensor, Tensor] | str:
        """cos and sin of the new tokens as the op takes them, in the model's dtype."""
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
        cos, sin = self._rope_table(plan.kind[-1], max(last + 1, max_seq_len)).of(last)
        if rows is None:
            return cos.narrow(-2, first, new_tokens), sin.narrow(-2, first, new_tokens)
        return cos.squeeze(-3)[..., rows, :], sin.squeeze(-3)[..., rows, :]

    def _rope_table(self, dtype: torch.dtype, rows: int) -> RopeTable:
        table: RopeTable | None = self.__dict__.get("_table")
        rotaries = self.rotaries()
        if table is None or not table.serves(rotaries, dtype) or rows > table.rows:
            table = RopeTable(rotaries, self._angles_of_op, dtype, rows)
            self.__dict__["_table"] = table
        return table

    def _angles_of_op(self, position_ids: Tensor) -> list[tuple[Tensor, Tensor]]:
        x = torch.zeros(1, dtype=self.dtype)
        attentions = [layer.self_attn for layer in self.decoder().layers]
        turning = next(a for a in attentions if a.rope_table >= 0)
        return [turning.rope(pair) for pair in self.angles(x, position_ids)]


def _is_idle(hook: Any) -> bool:
    """Whether a hook is one of those that transformers leaves after `output_hidden_states`.

    They record where a later call asks for it, and such a call goes module by module.
    """
    return getattr(hook, "__module__", None) == "transformers.utils.output_capturing"


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


def _norm(norm: Any, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)


def forward_of(original: Callable[..., Any]) -> Callable[..., Any]:
    """`forward` with the original's signature: the op where it can run, else the original."""

    @wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = None if torch.compiler.is_compiling() else self.forward_step(args, kwargs)
        return original(self, *args, **kwargs) if out is None else out

    return forward
