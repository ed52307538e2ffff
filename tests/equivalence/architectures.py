"""Every architecture of transformers that these sizes fit: compiled on three meshes as it comes, and verified.

    python -m tests.equivalence.architectures LOG --jobs 2 --seconds 2400   all that the log lacks
    python -m tests.equivalence.architectures LOG --only llama bert         some
    python -m tests.equivalence.architectures LOG --page                    docs/transformers.md from the log

The log has a line for each architecture and mesh. What is refused says why; a difference, or an error that is no
refusal, ends the command with status 1. Nobody chose these models: they are all that the library has.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.equivalence import unchosen
from tests.equivalence.unchosen import Batch, Kind, Kinds, NotSmall, Row

PAGE = Path(__file__).parents[2] / "docs" / "transformers.md"
MESHES = ("dp_shard=2", "dp_shard=2, tp=2", "cp=2")
MOST = 30_000_000
"""Parameters of what is not small with these sizes."""

VOCABULARY, LENGTH, SAMPLES = 96, 16, 8
SIZES: dict[int, str] = {
    0: """pad_token_id hidden_dropout_prob attention_probs_dropout_prob dropout attention_dropout resid_pdrop embd_pdrop
        attn_pdrop activation_dropout hidden_dropout dropout_rate classifier_dropout layerdrop encoder_layerdrop
        decoder_layerdrop zero_expert_num""",
    1: """n_group topk_group n_groups mamba_n_groups first_k_dense_replace n_shared_experts num_shared_experts
        bos_token_id""",
    2: """num_hidden_layers n_layer n_layers num_layers num_decoder_layers encoder_layers decoder_layers
        num_key_value_heads num_global_key_value_heads linear_num_key_heads num_experts_per_tok moe_k moe_topk
        mamba_expand eos_token_id""",
    3: "num_channels",
    4: """num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads num_experts
        num_local_experts n_routed_experts moe_num_experts mamba_n_heads mamba_num_heads linear_num_value_heads
        num_v_heads linear_conv_kernel_dim patch_size window_size""",
    8: """head_dim kv_channels d_kv v_head_dim qk_rope_head_dim qk_nope_head_dim linear_key_head_dim
        linear_value_head_dim state_size mamba_d_state ssm_state_size mamba_chunk_size chunk_size sliding_window
        attention_window attention_window_size hidden_size_per_layer_input""",
    10: "num_labels",
    16: "q_lora_rank kv_lora_rank mamba_d_head mamba_head_dim image_size",
    32: """hidden_size d_model n_embd dim embedding_size emb_dim embed_dim moe_intermediate_size lru_width
        shared_expert_intermediate_size expert_ffn_hidden_size""",
    64: """intermediate_size ffn_dim d_ff encoder_ffn_dim decoder_ffn_dim hidden_dim ffn_hidden_size
        max_position_embeddings n_positions n_ctx""",
    VOCABULARY: "vocab_size vocab_size_per_layer_input",
}
"""What is small, by the names that configurations have for it; nothing is dropped."""

SMALL: dict[str, Any] = {name: size for size, names in SIZES.items() for name in names.split()}
SMALL["use_cache"] = False


def ids(length: int = LENGTH) -> Tensor:
    return torch.randint(3, VOCABULARY, (SAMPLES, length))


def of_text() -> Batch:
    tokens = ids()
    return dict(input_ids=tokens, labels=tokens)


def of_masked_text() -> Batch:
    tokens = ids()
    return dict(input_ids=tokens, labels=tokens.masked_fill(torch.rand(tokens.shape) > 0.4, -100))


CLASSES: dict[str, tuple[Any, Callable[[], Batch]]] = {
    "causal": (modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, of_text),
    "masked": (modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, of_masked_text),
    "sequence to sequence": (
        modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        lambda: dict(input_ids=ids(), labels=ids(12)),
    ),
    "image": (
        modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
        lambda: dict(pixel_values=torch.randn(SAMPLES, 3, 16, 16), labels=torch.randint(0, 10, (SAMPLES,))),
    ),
}
"""What a model is for: the names of its classes by architecture, and a batch."""


def small(config_class: Any) -> Any:
    """A configuration of small sizes, with two layers of different types where it has such."""
    plain = config_class()
    given = {name: size for name, size in SMALL.items() if _can_be(config_class, name, getattr(plain, name, ...))}
    given |= {name: float(size) for name, size in given.items() if isinstance(getattr(plain, name), float)}
    types = getattr(plain, "layer_types", None)
    if types and not isinstance(getattr(config_class, "layer_types", None), property):
        given["layer_types"] = (list(dict.fromkeys(types))[:2] * 2)[:2]
    config = config_class(**given)
    config.decoder_start_token_id = 1
    return config


def _can_be(config_class: Any, name: str, now: Any) -> bool:
    """Whether a configuration has one number of that name, or none yet, and lets it be another.

    A property of one class may refuse that; those that all configurations have (`num_labels`) do not.
    """
    found = getattr(config_class, name, None)
    settable = not isinstance(found, property) or found is getattr(transformers.PreTrainedConfig, name, None)
    return settable and (now is None or isinstance(now, (int, float)))


def made(kind: str, name: str) -> tuple[nn.Module, Batch]:
    """The model in training mode, and a batch that it runs with. Raises what transformers raises."""
    classes, batch = CLASSES[kind]
    found = classes[name] if isinstance(classes[name], str) else classes[name][0]
    transformers.logging.set_verbosity_error()
    for attention in ("sdpa", "eager"):
        config = small(CONFIG_MAPPING[name])
        config._attn_implementation = attention
        try:
            with torch.device("meta"):
                count = sum(p.numel() for p in getattr(transformers, found)(copy.deepcopy(config)).parameters())
            if count > MOST:
                raise NotSmall(f"{count:,} parameters")
            model = getattr(transformers, found)(config).train()
            break
        except (ValueError, ImportError):
            if attention == "eager":
                raise
    given = batch()
    with torch.no_grad():
        model(**given)
    return model, given


def kinds() -> Kinds:
    on = f"transformers {transformers.__version__}"
    return {
        kind: Kind(tuple(classes), partial(made, kind), MESHES[:2] if kind == "image" else MESHES, on)
        for kind, (classes, _) in CLASSES.items()
    }


HEAD = """# transformers' architectures

`python -m tests.equivalence.architectures LOG` makes a small model of every architecture that transformers has for
text and for images, compiles it as it comes on `dp_shard=2`, on `dp_shard=2, tp=2` and, but for images, on `cp=2`, and
verifies the program: types, the prime field (one seed), float64. Nobody chose these models. Left out are those that
the sizes at the head of that file do not fit, or do not make small. [models.md](models.md) has the models that are
compared on real ranks, on many meshes, [libraries.md](libraries.md) those of other libraries.
"""


def page(rows: list[Row]) -> str:
    return unchosen.page(HEAD, kinds(), rows, ("architecture", "architectures"))


if __name__ == "__main__":
    unchosen.main(str(__doc__), kinds, PAGE, page)
