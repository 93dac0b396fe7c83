"""What a patch changes of a model besides its modules. Knows transformers; knows no family."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, NoReturn

from torch import nn

from fasttps.models.attention_interface import NAME, choose_attention, register_attention
from fasttps.models.packed_linear import PackedEmbedding, PackedLinear
from fasttps.models.patch_plan import Step, family_of
from fasttps.models.patch_report import ReportEntry


def change_model(
    model: nn.Module, steps: Sequence[Step], others: Iterable[nn.Module], changes: ExitStack
) -> None:
    """The configs through which attentions ask for theirs, and what would read empty Parameters.

    others: attentions of classes that no family knows.
    """
    attentions = [s.module for s in steps if getattr(s.fused, "part", None) == "attention"]
    attentions += others
    if attentions:
        register_attention()
    choose_attention(model, attentions, changes)
    packed = {s.name for s in steps if issubclass(s.fused, (PackedLinear, PackedEmbedding))}
    for name, module in model.named_modules():
        if not hasattr(module, "resize_token_embeddings"):
            continue
        prefix = f"{name}." if name else ""
        if packed & {f"{prefix}{own}" for own in ("lm_head", "embed_tokens", "model.embed_tokens")}:
            module.__dict__["resize_token_embeddings"] = resize_token_embeddings
            changes.callback(module.__dict__.pop, "resize_token_embeddings")


def resize_token_embeddings(*args: Any, **kwargs: Any) -> NoReturn:
    """In the place of the model's own method, which would take the weights to be empty.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(
        "resize_token_embeddings: the weights of lm_head are packed; undo the patch first, or "
        "patch with lm_head=False"
    )


def other_attentions(model: nn.Module) -> dict[str, nn.Module]:
    """Attentions of classes that no family knows, and that ask transformers for theirs."""
    found = {}
    for name, module in model.named_modules():
        if _is_attention(module) and family_of(module) is None and _asks(model, name):
            found[name] = module
    return found


def notes(model: nn.Module, others: dict[str, nn.Module]) -> Iterator[ReportEntry]:
    """What the report says of modules that no class of ours takes the place of."""
    for name, module in model.named_modules():
        kind = type(module).__name__
        family = family_of(module)
        if family is not None:
            reason = getattr(family, "LEFT_ALONE", {}).get(type(module))
            if reason is not None:
                yield ReportEntry(name, kind, None, reason)
        elif name in others:
            yield ReportEntry(name, kind, f"transformers' attention interface, {NAME!r}")
        elif _is_attention(module):
            yield ReportEntry(name, kind, None, "does not ask transformers for its attention")


def _is_attention(module: nn.Module) -> bool:
    return type(module).__name__.endswith("Attention") and hasattr(module, "config")


def _asks(model: nn.Module, name: str) -> bool:
    """Whether the model of transformers that a module is in goes by its attention interface."""
    owners = [model]
    for part in name.split("."):
        owners.append(getattr(owners[-1], part))
    models = [owner for owner in owners if hasattr(owner, "_supports_attention_backend")]
    return bool(models) and bool(models[-1]._supports_attention_backend)
