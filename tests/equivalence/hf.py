"""transformers' models as they come, small, with seeded weights: no plan, hook or patch for any of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.equivalence.zoo import Batch, masked

VOCABULARY = 131
SIZES: dict[str, Any] = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, vocab_size=VOCABULARY,
    use_cache=False, max_position_embeddings=32,
)  # fmt: skip
GROUPED: dict[str, Any] = SIZES | dict(num_key_value_heads=2, head_dim=8)
KV: dict[str, Any] = SIZES | dict(num_key_value_heads=2, pad_token_id=0)
EXPERTS: dict[str, Any] = GROUPED | dict(num_local_experts=4, num_experts_per_tok=2)
BALANCED: dict[str, Any] = dict(output_router_logits=True, router_aux_loss_coef=0.02)
NO_DROPOUT: dict[str, Any] = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
ENCODER: dict[str, Any] = SIZES | NO_DROPOUT | dict(pad_token_id=1)
DECODER: dict[str, Any] = SIZES | dict(attention_dropout=0.0, hidden_dropout=0.0)
FEW: dict[str, Any] = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)


def _gpt2(dropout: float) -> dict[str, Any]:
    sizes: dict[str, Any] = dict(n_embd=32, n_layer=3, n_head=4, n_positions=32, vocab_size=VOCABULARY, use_cache=False)
    return sizes | dict(resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, bos_token_id=1, eos_token_id=2)


def _t5(dropout: float) -> dict[str, Any]:
    sizes: dict[str, Any] = dict(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=VOCABULARY)
    return sizes | dict(dropout_rate=dropout, decoder_start_token_id=0, pad_token_id=0, use_cache=False)


def _resnet(layer: str) -> dict[str, Any]:
    return dict(embedding_size=16, hidden_sizes=[16, 32], depths=[2, 2], layer_type=layer, num_labels=5)


CONFIGS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "GPT-2": ("GPT2LMHeadModel", "GPT2Config", _gpt2(0.0)),
    "GPT-2 with dropout": ("GPT2LMHeadModel", "GPT2Config", _gpt2(0.1)),
    "GPT-2 over 50,257": ("GPT2LMHeadModel", "GPT2Config", _gpt2(0.1) | dict(n_embd=8, vocab_size=50257)),
    "Llama, one KV head": ("LlamaForCausalLM", "LlamaConfig", GROUPED | dict(num_key_value_heads=1)),
    "Qwen3": ("Qwen3ForCausalLM", "Qwen3Config", GROUPED),
    "Mistral": ("MistralForCausalLM", "MistralConfig", GROUPED | dict(sliding_window=4)),
    "Phi-3": ("Phi3ForCausalLM", "Phi3Config", SIZES | dict(num_key_value_heads=2, pad_token_id=0, eos_token_id=2)),
    "Gemma-2": ("Gemma2ForCausalLM", "Gemma2Config", GROUPED | dict(num_hidden_layers=6, sliding_window=4)),
    "Mixtral": ("MixtralForCausalLM", "MixtralConfig", EXPERTS),
    "Mixtral, balanced": ("MixtralForCausalLM", "MixtralConfig", EXPERTS | BALANCED),
    "Mixtral, balanced, padded": ("MixtralForCausalLM", "MixtralConfig", EXPERTS | BALANCED),
    "Qwen3-MoE": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", GROUPED | FEW | BALANCED),
    "Qwen2-MoE": (
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        KV | FEW | BALANCED | dict(shared_expert_intermediate_size=40),
    ),
    "OLMoE": ("OlmoeForCausalLM", "OlmoeConfig", KV | BALANCED | dict(num_experts=4, num_experts_per_tok=2)),
    "GraniteMoE": ("GraniteMoeForCausalLM", "GraniteMoeConfig", KV | BALANCED | dict(num_local_experts=4)),
    "GPT-OSS": ("GptOssForCausalLM", "GptOssConfig", EXPERTS | BALANCED | dict(sliding_window=4, pad_token_id=0)),
    "DeepSeek-V3": (
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        SIZES
        | dict(num_key_value_heads=4, moe_intermediate_size=24, n_routed_experts=8, n_group=2, topk_group=1)
        | dict(num_experts_per_tok=2, first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16, pad_token_id=0)
        | dict(qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8),
    ),
    "Llama-4": (
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        EXPERTS | dict(num_experts_per_tok=1, intermediate_size_mlp=40, attention_chunk_size=4, pad_token_id=0),
    ),
    "Mamba": (
        "MambaForCausalLM",
        "MambaConfig",
        dict(hidden_size=32, num_hidden_layers=2, vocab_size=VOCABULARY, state_size=8, use_cache=False),
    ),
    "OLMo-2": ("Olmo2ForCausalLM", "Olmo2Config", KV),
    "GPT-NeoX": ("GPTNeoXForCausalLM", "GPTNeoXConfig", DECODER),
    "GPT-J": ("GPTJForCausalLM", "GPTJConfig", _gpt2(0.0) | dict(rotary_dim=4)),
    "GPT-BigCode": ("GPTBigCodeForCausalLM", "GPTBigCodeConfig", _gpt2(0.0)),
    "OPT": ("OPTForCausalLM", "OPTConfig", SIZES | dict(ffn_dim=48, dropout=0.0, word_embed_proj_dim=32)),
    "BLOOM": ("BloomForCausalLM", "BloomConfig", DECODER | dict(n_layer=2, n_head=4)),
    "Falcon": ("FalconForCausalLM", "FalconConfig", DECODER),
    "Falcon, grouped": (
        "FalconForCausalLM",
        "FalconConfig",
        DECODER | dict(new_decoder_architecture=True, num_kv_heads=2),
    ),
    "GPT-Neo": (
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        SIZES | dict(attention_types=[[["global", "local"], 2]], num_hidden_layers=4, window_size=4),
    ),
    "Cohere": ("CohereForCausalLM", "CohereConfig", KV),
    "Cohere-2": ("Cohere2ForCausalLM", "Cohere2Config", KV | dict(sliding_window=4)),
    "StableLM": ("StableLmForCausalLM", "StableLmConfig", KV),
    "SmolLM3": ("SmolLM3ForCausalLM", "SmolLM3Config", KV | dict(num_hidden_layers=4)),
    "Granite": ("GraniteForCausalLM", "GraniteConfig", KV),
    "Gemma": ("GemmaForCausalLM", "GemmaConfig", GROUPED),
    "Gemma-3": ("Gemma3ForCausalLM", "Gemma3TextConfig", GROUPED | dict(sliding_window=4)),
    "Starcoder2": ("Starcoder2ForCausalLM", "Starcoder2Config", KV | dict(sliding_window=4)),
    "Phi": ("PhiForCausalLM", "PhiConfig", SIZES),
    "Qwen2": ("Qwen2ForCausalLM", "Qwen2Config", KV),
    "GLM-4": ("Glm4ForCausalLM", "Glm4Config", GROUPED | dict(pad_token_id=0)),
    "Nemotron": ("NemotronForCausalLM", "NemotronConfig", KV),
    "RoBERTa": ("RobertaForMaskedLM", "RobertaConfig", ENCODER),
    "MPNet": ("MPNetForMaskedLM", "MPNetConfig", ENCODER),
    "ELECTRA": ("ElectraForMaskedLM", "ElectraConfig", ENCODER | dict(embedding_size=16)),
    "DistilBERT": (
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        SIZES | dict(dim=32, hidden_dim=48, n_layers=2, n_heads=4, dropout=0.0, attention_dropout=0.0),
    ),
    "DeBERTa-v2": (
        "DebertaV2ForMaskedLM",
        "DebertaV2Config",
        ENCODER | dict(relative_attention=True, pos_att_type=["c2p", "p2c"], position_buckets=8),
    ),
    "ModernBERT": (
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        ENCODER | dict(local_attention=4, global_attn_every_n_layers=2, cls_token_id=1, sep_token_id=2),
    ),
    "BERT": ("BertForMaskedLM", "BertConfig", SIZES | NO_DROPOUT),
    "BERT, padded": ("BertForMaskedLM", "BertConfig", SIZES | NO_DROPOUT),
    "ALBERT": ("AlbertForMaskedLM", "AlbertConfig", SIZES | NO_DROPOUT | dict(embedding_size=16)),
    "T5": ("T5ForConditionalGeneration", "T5Config", _t5(0.0)),
    "T5, shorter targets": ("T5ForConditionalGeneration", "T5Config", _t5(0.0)),
    "T5 with dropout": ("T5ForConditionalGeneration", "T5Config", _t5(0.1)),
    "ResNet": ("ResNetForImageClassification", "ResNetConfig", _resnet("basic")),
    "ResNet, bottlenecks": ("ResNetForImageClassification", "ResNetConfig", _resnet("bottleneck")),
    "ViT": (
        "ViTForImageClassification",
        "ViTConfig",
        {k: SIZES[k] for k in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")}
        | NO_DROPOUT
        | dict(image_size=16, patch_size=4, num_labels=5),
    ),
}
"""Name → model class, config class, config: a model is a line here, and one in `BATCHES` if it takes other inputs."""


def _tokens(size: int) -> Batch:
    return masked("input_ids", VOCABULARY, size)


def _padded(size: int) -> Batch:
    """Sample i has 8 − i % 8 tokens; the rest is padding, without labels."""
    batch = _tokens(size)
    there = torch.arange(8) < (8 - torch.arange(size) % 8)[:, None]
    return batch | dict(attention_mask=there.long(), labels=batch["input_ids"].where(there, -100))


def _images(size: int, width: int = 16) -> Batch:
    return {"pixel_values": torch.randn(size, 3, width, width), "labels": torch.randint(5, (size,))}


def _shorter(size: int) -> Batch:
    """Targets of six tokens for inputs of eight."""
    batch = _tokens(size)
    return batch | dict(labels=batch["labels"][:, 2:].contiguous())


BATCHES: dict[str, Callable[[int], Batch]] = {
    "T5, shorter targets": _shorter,
    "ViT": _images,
    **dict.fromkeys(("ResNet", "ResNet, bottlenecks"), lambda size: _images(size, 32)),
    "BERT, padded": _padded,
    "Mixtral, balanced, padded": _padded,
}


def maker(name: str) -> Callable[[int], tuple[nn.Module, Batch]]:
    def make(size: int) -> tuple[nn.Module, Batch]:
        import transformers

        model, config, sizes = CONFIGS[name]
        torch.manual_seed(5)
        made = getattr(transformers, model)(getattr(transformers, config)(**sizes))
        return made, BATCHES.get(name, _tokens)(size)

    return make


MODELS = {name: maker(name) for name in CONFIGS}
