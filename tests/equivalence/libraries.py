"""Models of other libraries, small: compiled on some meshes as they come, and verified.

    python -m tests.equivalence.libraries LOG --seconds 2400        all that the log lacks, of the libraries installed
    python -m tests.equivalence.libraries LOG --only timm vit_1d    some libraries, some models
    python -m tests.equivalence.libraries LOG --page                docs/libraries.md from the log

The log has a line for each model and mesh. What is refused says why; a difference, or an error that is no refusal,
ends the command with status 1. Nobody chose these models: they are a model of every file of timm, torchvision and
vit-pytorch, every switch of x-transformers, every shape of litgpt's configurations, and diffusers' models by the
classes named here. Each has as its loss the mean of the squares of all that it returns.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import itertools
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import cache, partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ndcompile.loss import with_loss
from tests.equivalence import unchosen
from tests.equivalence.unchosen import Batch, Kind, Kinds, NotSmall, Row

PAGE = Path(__file__).parents[2] / "docs" / "libraries.md"
OF_IMAGES = ("dp_shard=2", "dp_shard=2, tp=2")
OF_TOKENS = ("dp_shard=2", "dp_shard=2, tp=2", "cp=2")
MOST = 40_000_000
"""Parameters of what is not small."""
SAMPLES, LENGTH, VOCABULARY = 4, 16, 96
PLANES = (32, 64, 96, 128, 224)
"""Sizes of images, of which the first that a model takes is its."""

Made = tuple[nn.Module, Batch]


def squares(outputs: Any) -> Tensor:
    """A loss of whatever a model returns."""
    found = [x for x in pytree.tree_leaves(outputs) if isinstance(x, Tensor) and x.is_floating_point()]
    return torch.stack([x.square().mean() for x in found if x.requires_grad]).sum()


def trained(model: nn.Module, batch: Batch) -> Made:
    """The model in training mode with its loss, if it is small and runs with the batch."""
    count = sum(p.numel() for p in model.parameters())
    if count > MOST:
        raise NotSmall(f"{count:,} parameters")
    model = with_loss(model.train(), squares)
    copy.deepcopy(model)(**batch).backward()  # a copy, as some keep what they made for their first batch
    model.zero_grad()  # functions that the copy holds are the model's
    return model, batch


def first_of(attempts: Iterator[Callable[[], Made]]) -> Made:
    """The first that can be made and runs. Where none can, raises that it is not small, or what the last raised."""
    errors = []
    for attempt in attempts:
        try:
            return attempt()
        except Exception as error:  # any library's, about sizes that it does not take
            errors.append(error)
    raise next((error for error in errors if isinstance(error, NotSmall)), errors[-1])


def images(size: int, *more: int) -> Tensor:
    return torch.randn(SAMPLES, 3, *more, size, size)


# ---- timm ----------------------------------------------------------------------------------------------------------

TIMM = """
    beit_base_patch16_224 halonet26t test_byobnet cait_xxs24_224 coat_tiny convit_tiny convmixer_768_32 test_convnext
    cpubone_nano crossvit_tiny_240 csatv2 cs3darknet_focus_s cspnext_tiny davit_tiny deepseek_vit_412m
    deit_tiny_patch16_224 densenet121 dla34 dpn68 edgenext_xx_small efficientformer_l1 efficientformerv2_s0
    test_efficientnet efficientvim_m1 efficientvit_b0 efficientvit_m0 vit_tiny_patch16_dinov3_qkvb fasternet_t0
    fastvit_t8 focalnet_tiny_srf gcvit_xxtiny gemma4_vit_167m ghostnet_050 hardcorenas_b hgnetv2_b0 hiera_tiny_224
    sam2_hiera_tiny hrnet_w18_small iformer_t inception_next_atto inception_resnet_v2 inception_v3 inception_v4
    lcnetv2_small levit_128s lowformer_b0 test_mambaout test_coatnet test_maxvit poolformer_s12 gmlp_ti16_224
    mixer_s16_224 mobilenetv3_small_050 mobilenetv5_base mobilevit_xxs mobilevitv2_050 mvitv2_tiny
    naflexvit_base_patch16_gap nasnetalarge nest_tiny nextvit_small test_nfnet pit_ti_224 pnasnet5large pvt_v2_b0
    qwen3_vit_88m rdnet_tiny regnetx_004_tv repghostnet_050 repvit_m0_9 res2next50 resnest14d test_resnet resnetv2_18
    rexnet_100 selecsls42 legacy_seresnet18 sequencer2d_s shvit_s1 skresnet18 starnet_s050 swiftformer_xs
    swin_tiny_patch4_window7_224 swinv2_tiny_window8_256 swinv2_cr_tiny_224 tiny_vit_5m_224 tnt_s_legacy_patch16_224
    tresnet_m twins_svt_small vgg11 visformer_tiny test_vit vit_tiny_r_s16_p8_224 test_vit_relpos
    samvit_base_patch16_224 vitamin_small_224 volo_d1_224 ese_vovnet19b_slim_dw xception xception41p
    xcit_nano_12_p8_224
""".split()
"""The smallest model of each of its files."""

SMALLER: tuple[dict[str, Any], ...] = (
    dict(embed_dim=64, depth=2, num_heads=2),
    dict(embed_dim=32, depths=(1, 1, 1, 1), num_heads=(2, 4, 4, 8)),
    dict(embed_dims=(32, 64, 96, 128), depths=(1, 1, 1, 1), num_heads=(2, 4, 4, 8)),
    dict(embed_dims=(32, 64, 96, 128), depths=(1, 1, 1, 1)),
    dict(embed_dims=(32, 64, 96, 128), layers=(1, 1, 1, 1)),
    dict(dims=(32, 64, 96, 128), depths=(1, 1, 1, 1)),
    dict(depths=(1, 1, 1, 1)),
    dict(layers=(1, 1, 1, 1)),
    dict(block_config=(2, 2, 2, 2)),
    dict(num_blocks=2),
    dict(embed_dim=64, depth=2),
    dict(depth=2),
    {},
)
"""How timm's models are made smaller: the first that one takes."""


def of_timm(name: str) -> Made:
    timm = importlib.import_module("timm")

    def tried(smaller: dict[str, Any], size: int, told: dict[str, Any]) -> Made:
        model = timm.create_model(name, pretrained=False, num_classes=10, **smaller, **told)
        return trained(model, dict(x=images(size)))

    sizes = [(size, told) for size in PLANES for told in (dict(img_size=size), {})]
    return first_of(partial(tried, smaller, *each) for smaller in SMALLER for each in sizes)


# ---- torchvision ---------------------------------------------------------------------------------------------------

TORCHVISION = """
    alexnet convnext_tiny densenet121 efficientnet_b0 efficientnet_v2_s googlenet inception_v3 maxvit_t mnasnet0_5
    mobilenet_v2 mobilenet_v3_small regnet_x_400mf regnet_y_400mf resnet18 resnext50_32x4d shufflenet_v2_x0_5
    squeezenet1_1 swin_t swin_v2_t vgg11_bn vit_b_16 deeplabv3_mobilenet_v3_large fcn_resnet50
    lraspp_mobilenet_v3_large mc3_18 r2plus1d_18 r3d_18 s3d mvit_v2_s swin3d_t raft_small ssdlite320_mobilenet_v3_large
""".split()
FRAMES = 16


def of_torchvision(name: str) -> Made:
    models = importlib.import_module("torchvision.models")

    def tried(size: int, told: dict[str, Any], *frames: int) -> Made:
        model = models.get_model(name, weights=None, **told)
        first, *others = inspect.signature(model.forward).parameters
        batch = {first: images(size, *frames)}
        return trained(model, batch | ({others[0]: images(size)} if name.startswith("raft") else {}))

    classes: dict[str, Any] = {} if name.startswith(("raft", "ssd")) else dict(num_classes=10)
    told = [classes | more for more in (dict(weights_backbone=None), dict(init_weights=True), dict(image_size=32), {})]
    each = itertools.product(((), (FRAMES,)), PLANES, told)
    return first_of(partial(tried, size, more, *frames) for frames, size, more in each)


# ---- vit-pytorch ---------------------------------------------------------------------------------------------------

VIT: dict[str, Any] = dict(
    image_size=32, img_size=32, patch_size=8, image_patch_size=8, freq_patch_size=8, num_classes=10, dim=32, depth=2,
    heads=4, mlp_dim=64, dim_head=8, frames=8, num_frames=8, frame_patch_size=2, seq_len=64, cls_depth=1,
    spatial_depth=2, temporal_depth=2, num_residual_streams=2, max_tokens_per_depth=(8, 4), sm_dim=32, lg_dim=48,
    sm_patch_size=4, ndim=2, input_shape=32, num_slots=4, mlp_mult=2, embedding_dim=32, num_layers=2, num_heads=4,
    reduction_factor=(2, 2), num_hierarchies=2, block_repeats=(1, 1), dims=(32, 48, 64), window_size=4, max_frames=8,
    pre_loop_depth=1, num_looped_blocks=1, post_loop_depth=1, loop_depth=2, decoder_dim=32, masking_ratio=0.5,
    highres_patch_size=4, patch_merge_num_tokens=4,
)  # fmt: skip
"""What is small, by the names that vit-pytorch's models have for it."""

BY_MODEL: dict[str, dict[str, Any]] = dict(
    pit=dict(depth=(1, 1)),
    max_vit=dict(depth=(1, 1), window_size=2),
    max_vit_with_registers=dict(depth=(1, 1), window_size=2),
    sep_vit=dict(depth=(1, 1), heads=(2, 2), window_size=4),
    scalable_vit=dict(depth=(1, 1), heads=(2, 2), window_size=(4, None)),
    crossformer=dict(dim=(32, 64, 96, 128), depth=(1, 1, 1, 1), global_window_size=(2, 2, 1, 1), local_window_size=2),
    regionvit=dict(dim=(16, 32, 48, 64), depth=(1, 1, 1, 1), window_size=2),
    twins_svt={f"s{n}_emb_dim": 16 * n for n in (1, 2, 3, 4)}
    | {f"s{n}_local_patch_size": size for n, size in ((1, 4), (2, 2), (3, 2), (4, 1))},
    nest=dict(patch_size=4),
    mobile_vit=dict(image_size=(64, 64), dims=(32, 48, 64), channels=(8, 8, 8, 8, 16, 16, 24, 24, 32, 32, 48)),
    t2t=dict(t2t_layers=((3, 2), (3, 2))),
    vat=dict(dim_action=8),
    vivit_with_moss=dict(use_flash_attn=False),
)


def _vit(module: Any) -> nn.Module:
    """The one of a file that wraps it, else the plain one."""
    kind = getattr(module, "ViT", None) or importlib.import_module("vit_pytorch").ViT
    made: nn.Module = kind(**{n: VIT[n] for n in inspect.signature(kind.__init__).parameters if n in VIT})
    return made


def of_vit(name: str) -> Made:
    module = importlib.import_module(f"vit_pytorch.{name}")
    classes = [c for c in vars(module).values() if inspect.isclass(c) and issubclass(c, nn.Module)]
    main = [c for c in classes if c.__module__ == module.__name__][-1]
    taken = inspect.signature(main.__init__).parameters
    passed_on = {"num_layers", "num_heads", "num_classes"} if "kwargs" in taken else set()
    needed = {n: v for n, v in (VIT | BY_MODEL.get(name, {})).items() if n in taken or n in passed_on}
    inner = {"encoder", "vit", "transformer"} & set(taken)

    def tried(shape: tuple[int, ...]) -> Made:
        model = main(**needed, **{n: _vit(module) for n in inner})
        first = next(iter(inspect.signature(model.forward).parameters))
        return trained(model, {first: torch.randn(SAMPLES, 3, *shape)})

    return first_of(partial(tried, shape) for shape in ((32, 32), (64, 64), (56, 56), (8, 32, 32), (64,)))


# ---- x-transformers ------------------------------------------------------------------------------------------------

SWITCHES = (("AttentionLayers", ""), ("Attention", "attn_"), ("FeedForward", "ff_"), ("TransformerWrapper", "wrapper."))
NUMBERS: dict[str, Any] = {
    "attn_sparse_topk": 4, "attn_num_mem_kv": 4, "attn_max_attend_past": 4, "attn_kv_heads": 2, "shift_tokens": 1,
    "num_residual_streams": 2, "wrapper.num_memory_tokens": 4, "wrapper.emb_dim": 16, "wrapper.logits_dim": 24,
    "sandwich_coef": 1, "par_ratio": 2, "alibi_num_heads": 2, "wrapper.num_output_heads": 2, "attn_value_dim_head": 12,
    "attn_output_proj_depth": 2, "attn_gate_values_rank": 4, "wrapper.memory_tokens_interspersed_every": 8,
    "wrapper.emb_frac_gradient": 0.5, "layer_dropout": 0.1, "ff_dropout": 0.1, "attn_dropout": 0.1,
}  # fmt: skip
WITH: dict[str, dict[str, Any]] = {
    "attn_use_latent_q": dict(attn_dim_latent_q=16),
    "attn_use_latent_kv": dict(attn_dim_latent_kv=16),
    "use_adaptive_layernorm": dict(dim_condition=20),
    "use_adaptive_rmsnorm": dict(dim_condition=20),
    "use_adaptive_layerscale": dict(dim_condition=20),
    "alibi_num_heads": dict(alibi_pos_bias=True),
    "dynamic_pos_bias_log_distance": dict(dynamic_pos_bias=True),
    "dynamic_pos_bias_norm": dict(dynamic_pos_bias=True),
    "rotary_xpos": dict(rotary_pos_emb=True),
    "wrapper.memory_tokens_interspersed_every": {"wrapper.num_memory_tokens": 2},
    "attn_sparse_topk_straight_through": dict(attn_sparse_topk=4),
    "attn_add_zero_kv": dict(attn_num_mem_kv=2),
    "ff_glu_mult_bias": dict(ff_glu=True),
    "attn_qk_norm_dim_scale": dict(attn_qk_norm=True),
    "attn_flash": dict(rotary_pos_emb=True),
    "attn_post_talking_heads": dict(attn_pre_talking_heads=True),
}
"""What a switch needs beside it."""


@cache
def switches() -> dict[str, Any]:
    """Every argument of x-transformers that is off, and numbers for some that are none."""
    found: dict[str, Any] = {"": None, "encoder": None}
    module = importlib.import_module("x_transformers.x_transformers")
    for name, prefix in SWITCHES:
        parameters = inspect.signature(getattr(module, name).__init__).parameters
        found |= {prefix + p.name: True for p in parameters.values() if p.default is False and p.name != "causal"}
    return found | NUMBERS


def of_x_transformers(name: str) -> Made:
    module = importlib.import_module("x_transformers")
    given: dict[str, Any] = WITH.get(name, {}) | ({name: switches()[name]} if switches()[name] is not None else {})
    inner = {n: value for n, value in given.items() if "." not in n}
    outer = {n.partition(".")[2]: value for n, value in given.items() if "." in n}
    kind = module.Encoder if name == "encoder" else module.Decoder
    layers = kind(dim=32, depth=2, heads=4, attn_dim_head=8, verbose=False, **inner)
    model = module.TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=64, attn_layers=layers, **outer)
    batch = dict(x=torch.randint(0, VOCABULARY, (SAMPLES, LENGTH)))
    condition = dict(condition=torch.randn(SAMPLES, 20)) if "dim_condition" in given else {}
    return trained(model, batch | condition)


# ---- litgpt --------------------------------------------------------------------------------------------------------

LITGPT: dict[str, Any] = dict(
    n_layer=2, n_embd=32, block_size=32, vocab_size=VOCABULARY, padded_vocab_size=VOCABULARY, intermediate_size=64,
    n_head=4, head_size=8,
)  # fmt: skip


@cache
def shapes() -> dict[str, Any]:
    """litgpt's configurations made small; of those that are then equal, the first."""
    config_module = importlib.import_module("litgpt.config")
    found: dict[str, Any] = {}
    for each in config_module.configs:
        given = dict(each) | LITGPT
        given["n_query_groups"] = {None: None, 1: 1, each.get("n_head", 32): 4}.get(each.get("n_query_groups"), 2)
        if each.get("n_expert"):
            given |= dict(n_expert=4, n_expert_per_token=2, moe_intermediate_size=32)
        if each.get("sliding_window_size"):
            given["sliding_window_size"] = 8
        for listed in ("sliding_window_indices", "rope_indices"):
            if each.get(listed):
                given[listed] = [0, 1]
        config = config_module.Config(**given)
        told = {n: v for n, v in asdict(config).items() if n not in ("name", "hf_config", "rope_base", "norm_eps")}
        found.setdefault(repr(told), config)
    return {config.name: config for config in found.values()}


def of_litgpt(name: str) -> Made:
    gpt = importlib.import_module("litgpt").GPT
    torch.manual_seed(0)
    return trained(gpt(shapes()[name]), dict(idx=torch.randint(0, VOCABULARY, (SAMPLES, LENGTH))))


# ---- diffusers -----------------------------------------------------------------------------------------------------


def randn(*shape: int) -> Tensor:
    return torch.randn(SAMPLES, *shape)


def steps(kind: torch.dtype = torch.long) -> Tensor:
    return torch.randint(0, 100, (SAMPLES,)).to(kind)


BLOCKS = dict(block_out_channels=(16, 32), layers_per_block=1, norm_num_groups=8)
TEXT = dict(hidden_states=(4, 8, 8), timestep=None)

DIFFUSERS: dict[str, tuple[dict[str, Any], Callable[[], Batch]]] = {
    "UNet2DModel": (
        dict(BLOCKS, sample_size=16, down_block_types=("DownBlock2D", "AttnDownBlock2D"), attention_head_dim=8,
             up_block_types=("AttnUpBlock2D", "UpBlock2D")),
        lambda: dict(sample=randn(3, 16, 16), timestep=steps()),
    ),
    "UNet2DConditionModel": (
        dict(BLOCKS, sample_size=16, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), attention_head_dim=8,
             up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), cross_attention_dim=24),
        lambda: dict(sample=randn(4, 16, 16), timestep=steps(), encoder_hidden_states=randn(6, 24)),
    ),
    "DiTTransformer2DModel": (
        dict(num_attention_heads=4, attention_head_dim=8, num_layers=2, sample_size=8, in_channels=4, patch_size=2,
             num_embeds_ada_norm=100),
        lambda: dict(hidden_states=randn(4, 8, 8), timestep=steps(), class_labels=steps()),
    ),
    "PixArtTransformer2DModel": (
        dict(num_attention_heads=4, attention_head_dim=8, num_layers=2, sample_size=8, cross_attention_dim=32,
             caption_channels=24, use_additional_conditions=False),
        lambda: dict(hidden_states=randn(4, 8, 8), timestep=steps(), encoder_hidden_states=randn(6, 24)),
    ),
    "SD3Transformer2DModel": (
        dict(sample_size=8, num_layers=2, num_attention_heads=4, attention_head_dim=8, caption_projection_dim=32,
             joint_attention_dim=24, pooled_projection_dim=20, in_channels=4, out_channels=4, pos_embed_max_size=8),
        lambda: dict(hidden_states=randn(4, 8, 8), timestep=steps(), encoder_hidden_states=randn(6, 24),
                     pooled_projections=randn(20)),
    ),
    "FluxTransformer2DModel": (
        dict(patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
             num_attention_heads=2, joint_attention_dim=24, pooled_projection_dim=20, axes_dims_rope=(4, 4, 8)),
        lambda: dict(hidden_states=randn(16, 4), timestep=steps(torch.float32), encoder_hidden_states=randn(6, 24),
                     pooled_projections=randn(20), img_ids=torch.randn(16, 3), txt_ids=torch.randn(6, 3)),
    ),
    "AuraFlowTransformer2DModel": (
        dict(sample_size=8, num_mmdit_layers=1, num_single_dit_layers=1, attention_head_dim=8, num_attention_heads=4,
             joint_attention_dim=24, caption_projection_dim=32, pos_embed_max_size=64, out_channels=4),
        lambda: dict(hidden_states=randn(4, 8, 8), timestep=steps(torch.float32), encoder_hidden_states=randn(6, 24)),
    ),
    "SanaTransformer2DModel": (
        dict(num_attention_heads=4, attention_head_dim=8, num_layers=2, num_cross_attention_heads=4, in_channels=4,
             cross_attention_head_dim=8, cross_attention_dim=32, caption_channels=24, sample_size=8, out_channels=4),
        lambda: dict(hidden_states=randn(4, 8, 8), timestep=steps(), encoder_hidden_states=randn(6, 24)),
    ),
    "HunyuanDiT2DModel": (
        dict(num_attention_heads=4, attention_head_dim=8, num_layers=2, sample_size=8, hidden_size=32,
             cross_attention_dim=24, cross_attention_dim_t5=24, pooled_projection_dim=20, text_len=4, text_len_t5=4),
        lambda: dict(hidden_states=randn(4, 8, 8), timestep=steps(), encoder_hidden_states=randn(4, 24),
                     image_rotary_emb=(torch.randn(16, 8), torch.randn(16, 8)),
                     text_embedding_mask=torch.ones(SAMPLES, 4),
                     encoder_hidden_states_t5=randn(4, 24),
                     text_embedding_mask_t5=torch.ones(SAMPLES, 4), image_meta_size=randn(6), style=steps() * 0),
    ),
    "CogVideoXTransformer3DModel": (
        dict(num_attention_heads=4, attention_head_dim=8, num_layers=2, in_channels=4, out_channels=4, sample_width=8,
             sample_height=8, sample_frames=9, text_embed_dim=24, time_embed_dim=16, max_text_seq_length=6),
        lambda: dict(hidden_states=randn(3, 4, 8, 8), timestep=steps(), encoder_hidden_states=randn(6, 24)),
    ),
    "WanTransformer3DModel": (
        dict(num_attention_heads=2, attention_head_dim=12, num_layers=2, in_channels=4, out_channels=4, text_dim=24,
             freq_dim=16, ffn_dim=32),
        lambda: dict(hidden_states=randn(4, 2, 8, 8), timestep=steps(), encoder_hidden_states=randn(6, 24)),
    ),
    "LTXVideoTransformer3DModel": (
        dict(num_attention_heads=4, attention_head_dim=8, num_layers=2, in_channels=4, out_channels=4,
             cross_attention_dim=32, caption_channels=24),
        lambda: dict(hidden_states=randn(16, 4), timestep=steps(), encoder_hidden_states=randn(6, 24),
                     encoder_attention_mask=torch.ones(SAMPLES, 6), num_frames=1, height=4, width=4),
    ),
    "Transformer2DModel": (
        dict(num_attention_heads=4, attention_head_dim=8, in_channels=32, num_layers=2, norm_num_groups=8,
             cross_attention_dim=24),
        lambda: dict(hidden_states=randn(32, 8, 8), encoder_hidden_states=randn(6, 24)),
    ),
    "PriorTransformer": (
        dict(num_attention_heads=4, attention_head_dim=8, num_layers=2, embedding_dim=24, num_embeddings=6,
             additional_embeddings=4),
        lambda: dict(hidden_states=randn(24), timestep=steps(), proj_embedding=randn(24),
                     encoder_hidden_states=randn(6, 24)),
    ),
    "StableAudioDiTModel": (
        dict(sample_size=16, in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=4,
             num_key_value_attention_heads=2, out_channels=4, cross_attention_dim=24, time_proj_dim=16,
             global_states_input_dim=20, cross_attention_input_dim=24),
        lambda: dict(hidden_states=randn(4, 16), timestep=steps(), encoder_hidden_states=randn(6, 24),
                     global_hidden_states=randn(1, 20)),
    ),
    "UNet1DModel": (
        dict(sample_size=64, in_channels=2, out_channels=2, extra_in_channels=16, block_out_channels=(32, 32, 64)),
        lambda: dict(sample=randn(2, 64), timestep=steps()),
    ),
    "UVit2DModel": (
        dict(hidden_size=32, cond_embed_dim=24, micro_cond_encode_dim=8, micro_cond_embed_dim=40,
             encoder_hidden_size=24, vocab_size=VOCABULARY, codebook_size=64, in_channels=32, block_out_channels=32,
             num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, block_num_heads=4),
        lambda: dict(input_ids=torch.randint(0, 64, (SAMPLES, 8, 8)), encoder_hidden_states=randn(6, 24),
                     pooled_text_emb=randn(24), micro_conds=randn(5)),
    ),
    "AutoencoderKL": (
        dict(BLOCKS, down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2),
        lambda: dict(sample=randn(3, 16, 16)),
    ),
    "AutoencoderTiny": (
        dict(encoder_block_out_channels=(16, 16), decoder_block_out_channels=(16, 16), num_encoder_blocks=(1, 1),
             num_decoder_blocks=(1, 1)),
        lambda: dict(sample=randn(3, 16, 16)),
    ),
    "AsymmetricAutoencoderKL": (
        dict(down_block_types=("DownEncoderBlock2D",), up_block_types=("UpDecoderBlock2D",), norm_num_groups=8,
             down_block_out_channels=(16,), up_block_out_channels=(16,)),
        lambda: dict(sample=randn(3, 16, 16)),
    ),
    "AutoencoderKLCogVideoX": (
        dict(block_out_channels=(8, 8, 8, 8), layers_per_block=1, norm_num_groups=2, latent_channels=4,
             temporal_compression_ratio=4, down_block_types=("CogVideoXDownBlock3D",) * 4,
             up_block_types=("CogVideoXUpBlock3D",) * 4),
        lambda: dict(sample=randn(3, 5, 16, 16)),
    ),
    "VQModel": (
        dict(BLOCKS, down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
             num_vq_embeddings=16),
        lambda: dict(sample=randn(3, 16, 16)),
    ),
}  # fmt: skip
"""Its models by their classes: sizes, and a batch."""


OF_PLACES: dict[str, dict[str, Any]] = {
    "FluxTransformer2DModel": dict(dynamic_dims={"img_ids": {}, "txt_ids": {}}),
}
"""Inputs that all samples share."""


def of_diffusers(name: str) -> Made:
    sizes, batch = DIFFUSERS[name]
    model = getattr(importlib.import_module("diffusers"), name)(**sizes)
    plain = dict(return_dict=False) if "return_dict" in inspect.signature(model.forward).parameters else {}
    return trained(model, batch() | plain)


# ---- all -----------------------------------------------------------------------------------------------------------


def vits() -> list[str]:
    found = importlib.import_module("vit_pytorch").__path__
    return [each.name for each in pkgutil.iter_modules(found)]


LIBRARIES: dict[str, tuple[Callable[[], Any], Callable[[str], Made], tuple[str, ...]]] = {
    "timm": (lambda: TIMM, of_timm, OF_IMAGES),
    "torchvision": (lambda: TORCHVISION, of_torchvision, OF_IMAGES),
    "x-transformers": (switches, of_x_transformers, OF_TOKENS),
    "vit-pytorch": (vits, of_vit, OF_IMAGES),
    "diffusers": (lambda: DIFFUSERS, of_diffusers, OF_IMAGES),
    "litgpt": (shapes, of_litgpt, OF_TOKENS),
}


@cache
def kinds() -> Kinds:
    """The libraries that are installed; of the others it says so."""
    found = {}
    for name, (names, made, meshes) in LIBRARIES.items():
        if find_spec(name.replace("-", "_")) is None:
            print(f"{name} is not installed, and left out", flush=True)
        else:
            found[name] = Kind(tuple(names()), made, meshes, f"{name} {metadata.version(name)}", OF_PLACES)
    return found


HEAD = """# Models of other libraries

`python -m tests.equivalence.libraries LOG` makes small models of libraries that know nothing of this one, compiles
them as they come on `dp_shard=2`, on `dp_shard=2, tp=2` and, for tokens, on `cp=2`, and verifies the program: types,
the prime field (one seed), float64. Nobody chose these models: of timm and torchvision the smallest of every file, of
vit-pytorch the last class of every file, of x-transformers a decoder with each switch that is off, of litgpt each
configuration that is another when it is small, of diffusers a list of classes. Left out are those that could not be
made small, or do not run with such sizes. [transformers.md](transformers.md) has the architectures of transformers.

*Compiled* is what `--compile` did alone, without verifying.
"""


def page(rows: list[Row]) -> str:
    return unchosen.page(HEAD, kinds(), rows, ("model", "models"))


if __name__ == "__main__":
    unchosen.main(str(__doc__), kinds, PAGE, page)
