"""Our attention under the name "fasttps" in transformers, and how its arguments become an op's.

`register_attention()` makes `attn_implementation="fasttps"` a choice for any model that goes
through transformers' attention interface; `register_on_import()` does so once transformers is
imported. Patched models use the same function for every cache but our own.
"""

from __future__ import annotations

import copy
import importlib.abc
import importlib.util
import sys
import warnings
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from fasttps.models.attention_mask import bool_mask, is_within_diagonal

NAME = "fasttps"
DECODE_TOKENS = 8  # up to here a pass over the cache per token group, above it tiles of queries
_MODELING = "transformers.modeling_utils"

_decode = torch.ops.fasttps.rope_attention_decode.default
_prefill = torch.ops.fasttps.causal_prefill.default


def register_attention() -> None:
    """Make `attn_implementation="fasttps"` known to transformers; a second call changes nothing.

    The mask function goes under the same name: without one, transformers passes no mask at all,
    left padding included. Ours is that of sdpa: bool, True = attend.
    """
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(NAME, fasttps_attention_forward)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def register_on_import() -> None:
    """`register_attention()` now if transformers' models are loaded, else once they are.

    So that importing fasttps does not import transformers, which takes seconds.
    """
    if _MODELING in sys.modules:
        register_attention()
    elif not any(isinstance(finder, _Watcher) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watcher())


class _Watcher(importlib.abc.MetaPathFinder):
    """Stands before the finders until `transformers.modeling_utils` is looked for, then leaves."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _MODELING:
            return None
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _RegisteringLoader(spec.loader)
        return spec


class _RegisteringLoader(importlib.abc.Loader):
    """Loads the module as its own loader does, then registers the attention."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        try:
            register_attention()
        except (ImportError, AttributeError) as error:  # transformers itself must still load
            warnings.warn(
                f"fasttps: attention not registered with transformers: {error}", stacklevel=2
            )


def choose_attention(model: nn.Module, attentions: Iterable[nn.Module], changes: ExitStack) -> None:
    """Give the attentions, and every module that shares their config, a copy that names ours.

    The config objects themselves stay as they are: another model may hold them. What the user
    sets on a copy meanwhile goes to its original as `changes` are undone.
    """
    copies: dict[int, Any] = {}
    for attention in attentions:
        config: Any = attention.config
        if id(config) not in copies:
            copies[id(config)] = ours = copy.copy(config)
            ours._attn_implementation_internal = NAME
            changes.callback(_bring_edits, ours, config, dict(vars(ours)))
    for module in model.modules():
        config = module.__dict__.get("config")
        if id(config) in copies:
            changes.callback(setattr, module, "config", config)
            module.config = copies[id(config)]


def _bring_edits(edited: Any, config: Any, before: dict[str, Any]) -> None:
    """To `config`, what was set on `edited` since it was `before`; but not the attention."""
    for name, value in vars(edited).items():
        is_new = name not in before or value is not before[name]
        if is_new and name != "_attn_implementation_internal":
            setattr(config, name, value)


def fasttps_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """transformers' attention interface over our ops; no cache is written.

    Without a mask it follows sdpa: one query sees all keys; several are causal from the first
    key on, unless `is_causal` (or else the module's) is False.

    Args:
        query: [batch, num_heads, new_tokens, head_dim], rotated; key, value: [batch,
            num_kv_heads, kv_len, head_dim]; any strides.
        attention_mask: bool, True = attend, or additive with 0 and -inf; broadcast to [batch,
            num_heads, new_tokens, kv_len]. It alone decides: it holds causality and window.
        sliding_window: heeded where there is no mask.
        softcap, s_aux: as in `fasttps.ops` (`s_aux` are its sinks).

    Returns:
        out [batch, new_tokens, num_heads, head_dim], and the attention's weights if
        `output_attentions` asks for them.

    Raises:
        ValueError: dropout, a position bias or a bidirectional window: ours has none of them.
    """
    if dropout:
        raise ValueError(f"fasttps attention: dropout wanted 0 (inference only), got {dropout}")
    if position_bias is not None:
        raise ValueError("fasttps attention: position_bias is not supported; use sdpa or eager")
    new_tokens, kv_len = query.size(2), key.size(2)
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    mask = bool_mask(attention_mask, new_tokens)
    query_start = None  # all keys
    window = None
    if mask is not None:
        if kv_len >= new_tokens > 1 and is_within_diagonal(mask, kv_len - new_tokens):
            query_start = kv_len - new_tokens
    elif new_tokens > 1 and is_causal:
        kv_len = min(kv_len, new_tokens)  # an empty static cache has slots past the new tokens
        query_start, window = 0, sliding_window
    elif new_tokens == 1:
        query_start, window = kv_len - 1, sliding_window
    elif sliding_window is not None and kv_len > sliding_window:
        raise ValueError("fasttps attention: a bidirectional sliding window wants a mask")
    scale = query.size(3) ** -0.5 if scaling is None else scaling
    value_dim = value.size(3)
    query, key, value = _operands(query, key, value)
    out = attend(
        query.transpose(1, 2),
        None,
        None,
        key,
        value,
        torch.full((), kv_len),
        query_start=query_start,
        attn_mask=mask,
        scale=scale,
        window=window,
        softcap=softcap or None,
        sinks=s_aux,
    )
    weights = None
    if kwargs.get("output_attentions") or _config_wants_weights(module):
        visible = _visible(new_tokens, kv_len, query_start, window, key.device)
        if mask is not None:
            visible = visible & mask[..., :kv_len]
        weights = attention_weights(
            query, key[:, :, :kv_len], visible, scale=scale, softcap=softcap, sinks=s_aux
        )
    return out if value_dim == out.size(3) else out[..., :value_dim], weights


def attend(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    seq_lens: Tensor,
    *rope: Tensor,
    query_start: int | Tensor | None = None,
    **options: Any,
) -> Tensor:
    """The op for this many new tokens: both compute the same, each is made for its own count.

    Called without `fasttps.ops` and with no argument that says nothing: for a small model each of
    them can be told from the time of a token.
    """
    options = {name: option for name, option in options.items() if option is not None}
    if query_start is not None:
        if not isinstance(query_start, Tensor):
            query_start = torch.full((), query_start)
        options["query_start"] = query_start
    op = _decode if query.size(1) <= DECODE_TOKENS else _prefill
    return op(query, key, value, k_cache, v_cache, seq_lens, *rope, **options)


def attention_weights(
    query: Tensor,
    key: Tensor,
    visible: Tensor,
    *,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """softmax(query key^T * scale) over the visible keys, [batch, num_heads, new_tokens, kv_len].

    For `output_attentions`, which the ops do not keep. A row that may see nothing is zeros.
    """
    groups = query.size(1) // key.size(1)
    scores = (query.float() @ key.float().repeat_interleave(groups, dim=1).mT) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        column = sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, column), dim=-1)
    weights = scores.softmax(-1)[..., : key.size(2)]
    return weights.masked_fill(~visible, 0).to(query.dtype)


def _visible(
    new_tokens: int,
    kv_len: int,
    query_start: int | None,
    window: int | None,
    device: torch.device,
) -> Tensor:
    """bool [new_tokens, kv_len]: the keys that each query may see, without a mask."""
    if query_start is None:
        return torch.ones(new_tokens, kv_len, dtype=torch.bool, device=device)
    query = query_start + torch.arange(new_tokens, device=device)[:, None]
    key = torch.arange(kv_len, device=device)
    visible = key <= query
    return visible if window is None else visible & (key > query - window)


def _config_wants_weights(module: nn.Module) -> bool:
    return bool(getattr(getattr(module, "config", None), "output_attentions", False))


def _operands(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As the ops take them: one dtype (autocast mixes them), one head_dim, a dense last dimension.

    Zeros at the end of query and key leave the scores alone; those of value are cut off after.
    """
    if not query.dtype == key.dtype == value.dtype and torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    head_dim = max(key.size(3), value.size(3))
    if key.size(3) != value.size(3):
        query, key, value = (pad(x, (0, head_dim - x.size(3))) for x in (query, key, value))
    dense = (
        x if x.stride(3) == 1 or head_dim == 1 else x.contiguous() for x in (query, key, value)
    )
    return tuple(dense)  # type: ignore[return-value]
