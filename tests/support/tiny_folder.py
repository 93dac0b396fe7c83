"""Tiny random models on disk, with a tokenizer, as HuggingFace folders and as GGUF files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported

CHAT_TEMPLATE = "{% for m in messages %}<user>{{ m['content'] }}{% endfor %}<answer>"
SPECIAL_TOKENS = ("<end>", "<user>", "<answer>")
MAX_POSITIONS = 128


def tokenizer() -> Any:
    """Bytes, a few merges and the special tokens; with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("l", "l"), ("he", "ll")]
    tokens = [*SPECIAL_TOKENS, *alphabet, *("".join(pair) for pair in merges)]
    bpe = Tokenizer(models.BPE({token: at for at, token in enumerate(tokens)}, merges))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens(list(SPECIAL_TOKENS))
    made = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<end>", bos_token="<end>", pad_token="<end>"
    )
    made.chat_template = CHAT_TEMPLATE
    return made


def llama_config(vocab_size: int) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_POSITIONS,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        tie_word_embeddings=False,
    )


def save_llama(folder: Path) -> Any:
    """Save a tiny Llama with its tokenizer, logits far apart so that greedy is sure; return it."""
    from transformers import LlamaForCausalLM

    words = tokenizer()
    torch.manual_seed(0)
    model = LlamaForCausalLM(llama_config(len(words))).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                weight.mul_(8 if "lm_head" in name else 4)
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return model


def save_gpt2(folder: Path) -> None:
    """Save a tiny GPT-2, a model that FastTPS does not patch."""
    from transformers import GPT2Config, GPT2LMHeadModel

    words = tokenizer()
    config = GPT2Config(
        vocab_size=len(words),
        n_embd=32,
        n_layer=1,
        n_head=2,
        n_positions=MAX_POSITIONS,
        bos_token_id=0,
        eos_token_id=0,
    )
    GPT2LMHeadModel(config).save_pretrained(folder)
    words.save_pretrained(folder)


def save_gguf(path: Path, model: Any) -> None:
    """Write a Llama as a float32 GGUF file, its query and key rows interleaved as GGUF has them."""
    import gguf

    config, words = model.config, tokenizer()
    head_dim = config.hidden_size // config.num_attention_heads
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    tokens = [words.convert_ids_to_tokens(at) for at in range(len(words))]
    kinds = [3 if token in SPECIAL_TOKENS else 1 for token in tokens]  # 3 control, 1 normal
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(["h e", "l l", "he ll"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_pad_token_id(0)
    writer.add_chat_template(CHAT_TEMPLATE)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, weight in model.state_dict().items():
        rows = weight.float()
        for projection, count in heads.items():
            if projection in name:  # the halves of RoPE's pairs, [2, D/2] rows, to pairs, [D/2, 2]
                paired = rows.reshape(count, 2, head_dim // 2, -1).transpose(1, 2)
                rows = paired.reshape(weight.shape)
        stored = names.get_name(name, try_suffixes=(".weight",))
        writer.add_tensor(stored, rows.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
