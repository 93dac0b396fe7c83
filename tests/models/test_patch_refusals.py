"""What is not fused stays as it is and is named with its reason; what cannot be is an error."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fasttps
from tests.support.llama import FUSED_MODULES, generate, logits, prompt, tiny_llama

REPORT = """\
LlamaForCausalLM: 18 modules fused, 1 skipped
  model.layers.[0-2].self_attn (LlamaAttention) -> rope_attention_decode, causal_prefill
  model.layers.[0-2].self_attn.q_proj (Linear) -> packed_linear
  model.layers.[0-2].self_attn.k_proj (Linear) -> packed_linear
  model.layers.[0-2].self_attn.v_proj (Linear) -> packed_linear
  model.layers.[0-2].self_attn.o_proj (Linear) -> packed_linear
  model.layers.[0, 2].mlp (LlamaMLP) -> gate_up_silu_mlp
  model.layers.1.mlp (LlamaMLP) skipped: act_fn is a Tanh, which the op does not compute
  lm_head (Linear) -> packed_linear"""


def reasons(model):
    """Module name to reason, of what a patch skips; the model still says the same."""
    theirs = logits(model, prompt(2, 9))
    with fasttps.patch(model) as patch:
        torch.testing.assert_close(logits(model, prompt(2, 9)), theirs, rtol=0, atol=2e-4)
        skipped = {entry.name: entry.reason for entry in patch.report().skipped}
        # Where a part is left out, the model itself is not one op either.
        assert len(skipped) + len(patch.report().fused) == FUSED_MODULES - bool(skipped)
    assert torch.equal(logits(model, prompt(2, 9)), theirs)
    return skipped


def mlp_of(model, layer=1):
    return model.model.layers[layer].mlp


def assert_only_reason(model, name, *words):
    found = reasons(model)
    assert list(found) == [name]
    assert all(word in found[name] for word in words), found


def test_report_reads_well():
    model = tiny_llama()
    mlp_of(model).act_fn = nn.Tanh()
    patch = fasttps.patch(model)
    assert str(patch.report()) == REPORT
    assert patch.report().entries[0].name == "model.layers.0.self_attn"
    assert "18 modules fused" in repr(patch)
    patch.undo()


class LoraLinear(nn.Linear):
    """As adapters wrap a projection: a Linear and something more."""

    def forward(self, x):
        return super().forward(x) + 0.5


def test_wrapped_projection_of_an_mlp():
    model = tiny_llama()
    mlp_of(model).up_proj = LoraLinear(48, 88, bias=False)
    assert_only_reason(model, "model.layers.1.mlp", "up_proj", "LoraLinear")


def test_wrapped_projections_of_an_attention_are_called():
    model = tiny_llama()
    attention = model.model.layers[1].self_attn
    for name in ("q_proj", "o_proj"):
        old = getattr(attention, name)
        setattr(attention, name, LoraLinear(old.in_features, old.out_features, bias=False))
    theirs = generate(model, prompt(1, 9))
    with fasttps.patch(model) as patch:
        skipped = {entry.name: entry.reason for entry in patch.report().skipped}
        assert list(skipped) == [f"model.layers.1.self_attn.{name}_proj" for name in "qo"]
        assert all("LoraLinear" in reason for reason in skipped.values())
        cache = fasttps.StaticKVCache(model.config, 21)
        assert torch.equal(generate(model, prompt(1, 9), cache=cache), theirs)


def test_parametrized_projection():
    model = tiny_llama()
    nn.utils.parametrizations.weight_norm(mlp_of(model).down_proj)
    assert_only_reason(model, "model.layers.1.mlp", "down_proj", "ParametrizedLinear")


def test_weights_of_a_tensor_subclass():
    """As quantisation libraries keep them, in a plain Linear."""

    class Quantised(torch.Tensor):
        pass

    model = tiny_llama()
    linear = mlp_of(model).gate_proj
    linear.weight = nn.Parameter(linear.weight.data.as_subclass(Quantised))
    assert_only_reason(model, "model.layers.1.mlp", "gate_proj", "Quantised")


def test_a_subclass_of_the_known_class():
    from transformers.models.llama.modeling_llama import LlamaMLP

    class ClampedMLP(LlamaMLP):
        def forward(self, x):
            return super().forward(x).clamp(-0.1, 0.1)

    model = tiny_llama()
    mlp_of(model).__class__ = ClampedMLP
    assert_only_reason(model, "model.layers.1.mlp", "subclass of LlamaMLP")


def test_forward_replaced_on_the_instance():
    model = tiny_llama()
    mlp = mlp_of(model)
    mlp.forward = lambda x: -type(mlp).forward(mlp, x)
    assert_only_reason(model, "model.layers.1.mlp", "forward was replaced")


def test_hooks_on_a_projection_would_not_fire():
    model, seen = tiny_llama(), []
    mlp_of(model).down_proj.register_forward_hook(lambda *args: seen.append(1))
    assert_only_reason(model, "model.layers.1.mlp", "down_proj has hooks")
    assert len(seen) == 3


@pytest.mark.parametrize("part", ["mlp", "self_attn"])
def test_accelerate_hooks(part):
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    model = tiny_llama()
    module = getattr(model.model.layers[1], part)
    accelerate.hooks.add_hook_to_module(module, accelerate.hooks.ModelHook())
    found, name = reasons(model), f"model.layers.1.{part}"
    assert "accelerate hook" in found.pop(name)
    assert found == {
        f"{name}.{linear}_proj": "its LlamaAttention is skipped"
        for linear in ("qkvo" if part == "self_attn" else "")
    }


def test_accelerate_hook_on_a_projection():
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    model = tiny_llama()
    accelerate.hooks.add_hook_to_module(mlp_of(model).up_proj, accelerate.hooks.ModelHook())
    assert_only_reason(model, "model.layers.1.mlp", "up_proj has hooks")


def test_offloaded_weights():
    model = tiny_llama()
    mlp_of(model).to("meta")
    model.model.layers[2].self_attn.to("meta")
    patch = fasttps.patch(model)
    found = {entry.name: entry.reason for entry in patch.report().skipped}
    attention = "model.layers.2.self_attn"
    assert "meta" in found.pop("model.layers.1.mlp") and "meta" in found.pop(attention)
    assert list(found) == [f"{attention}.{name}_proj" for name in "qkvo"]
    assert set(found.values()) == {"its LlamaAttention is skipped"}
    patch.undo()
    assert mlp_of(model).gate_proj.weight.is_meta


@pytest.mark.parametrize("owner", ["parameter", "storage"])
def test_shared_weights(owner):
    """Packed once for one, they would be gone for the other."""
    model = tiny_llama()
    weight = mlp_of(model, 0).gate_proj.weight
    other = weight if owner == "parameter" else nn.Parameter(weight.data)
    mlp_of(model, 2).gate_proj.weight = other
    found = reasons(model)
    assert list(found) == ["model.layers.0.mlp", "model.layers.2.mlp"]
    assert all("gate_proj weight: is shared" in reason for reason in found.values())


def test_one_mlp_in_two_layers_is_fused_once():
    model = tiny_llama()
    model.model.layers[2].mlp = mlp_of(model)
    theirs = logits(model, prompt(2, 9))
    with fasttps.patch(model) as patch:
        assert len(patch.report().fused) == FUSED_MODULES - 1
        torch.testing.assert_close(logits(model, prompt(2, 9)), theirs, rtol=0, atol=2e-4)
    assert torch.equal(logits(model, prompt(2, 9)), theirs)


def test_dtypes_that_are_not_packed():
    model = tiny_llama().double()
    with pytest.raises(fasttps.PatchError, match=r"nothing could be fused(.|\n)*float64"):
        fasttps.patch(model)
    model = tiny_llama()
    mlp_of(model).down_proj.bfloat16()
    with fasttps.patch(model) as patch:
        (skipped,) = patch.report().skipped
    assert "differ in dtype" in skipped.reason


def test_a_module_in_training_mode():
    model = tiny_llama()
    mlp_of(model).train()
    assert_only_reason(model, "model.layers.1.mlp", "training mode")


def test_a_weight_with_a_gradient():
    model = tiny_llama()
    logits_with_graph = model(prompt(1, 3)).logits
    logits_with_graph.sum().backward()
    for name, parameter in model.named_parameters():
        if not name.startswith("model.layers.1.mlp"):
            parameter.grad = None
    assert_only_reason(model, "model.layers.1.mlp", "has a gradient")


@pytest.mark.parametrize("hidden_act", ["relu", "gelu_fast", "quick_gelu"])
def test_activations_that_the_op_does_not_compute(hidden_act):
    found = reasons(tiny_llama(hidden_act=hidden_act))
    assert list(found) == [f"model.layers.{at}.mlp" for at in range(3)]


def test_activation_is_judged_by_the_module_not_by_the_config():
    """A field that the module does not use made SiLU out of GELU elsewhere."""
    model = tiny_llama()
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.GELU(approximate="tanh")
        layer.mlp.config.hidden_act = "relu"
    assert reasons(model) == {}


# --- errors: nothing is changed ---


def unchanged_after(model, error, message, **options):
    classes = [type(module) for module in model.modules()]
    config = model.config
    with pytest.raises(error, match=message):
        fasttps.patch(model, **options)
    assert [type(module) for module in model.modules()] == classes
    assert model.config is config


def test_patching_twice():
    model = tiny_llama()
    with fasttps.patch(model):
        unchanged_after(model, fasttps.PatchError, "already patched.*itself")
        tokens = generate(model, prompt(1, 3))
    assert torch.equal(generate(model, prompt(1, 3)), tokens)
    fasttps.patch(model).undo()


@pytest.mark.parametrize(
    "wrong", [{"attention": "no"}, {"mlp": None}, {"mlp": 1}, {"progress": 3}], ids=str
)
def test_arguments_of_another_type(wrong):
    """ "no" was taken for yes."""
    (name,) = wrong
    unchanged_after(tiny_llama(), TypeError, f"^patch: {name} wanted a", **wrong)


def test_training_mode():
    unchanged_after(tiny_llama().train(), fasttps.PatchError, r"training mode.*eval\(\)")


def test_nothing_asked_for():
    unchanged_after(
        tiny_llama(), fasttps.PatchError, "not asked for", attention=False, mlp=False, lm_head=False
    )


def test_a_model_of_no_known_family():
    from transformers import BloomConfig, BloomForCausalLM

    model = BloomForCausalLM(BloomConfig(vocab_size=9, hidden_size=8, n_layer=1, n_head=2)).eval()
    unchanged_after(model, fasttps.PatchError, "BloomForCausalLM has no module.*llama")
    with pytest.raises(fasttps.PatchError, match="Linear has no module"):
        fasttps.patch(nn.Linear(2, 2).eval())


def test_not_a_module():
    with pytest.raises(TypeError, match=r"model wanted an nn\.Module, got str"):
        fasttps.patch("model")


# --- a patched model, used for what it is not for ---


def test_a_gradient_is_refused():
    model = tiny_llama()
    with fasttps.patch(model):
        with pytest.raises(RuntimeError, match=r"inference only.*no_grad"):
            model(prompt(1, 3))
        model.model.embed_tokens.requires_grad_(False)
        for layer in model.model.layers:
            layer.self_attn.requires_grad_(False)
            layer.input_layernorm.requires_grad_(False)
            layer.post_attention_layernorm.requires_grad_(False)
        with pytest.raises(RuntimeError, match=r"FusedLlamaMLP.*inference only"):
            model(prompt(1, 3))  # of the MLP's own weights
    model(prompt(1, 3)).logits.sum().backward()
    assert mlp_of(model).up_proj.weight.grad is not None


def test_training_a_patched_model_is_refused():
    model = tiny_llama()
    with fasttps.patch(model), pytest.raises(RuntimeError, match="undo the patch to train"):
        logits(model.train(), prompt(1, 3))


@pytest.mark.parametrize("name", ["gate_proj", "up_proj", "down_proj", "act_fn"])
def test_replacing_a_fused_projection_is_refused(name):
    """An adapter put in after patching would be skipped without a word."""
    model = tiny_llama()
    refused = pytest.raises(RuntimeError, match=f"{name} is fused and would not run")
    with fasttps.patch(model), refused:
        setattr(mlp_of(model), name, nn.Identity())
    mlp_of(model).act_fn = nn.SiLU()


def test_another_dtype_than_the_weights_is_refused():
    model = tiny_llama()
    with fasttps.patch(model), torch.no_grad(), pytest.raises(TypeError, match="gate_up_silu_mlp"):
        mlp_of(model)(torch.zeros(1, 2, 48, dtype=torch.bfloat16))
