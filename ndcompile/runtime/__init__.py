"""What emitted modules call; importing it loads torch and nothing of the compiler."""

from ndcompile.runtime.attention import attention, attention_with_dropout
from ndcompile.runtime.block import Block, Root, State
from ndcompile.runtime.borders import convolve, running_sum
from ndcompile.runtime.collectives import (
    all_gather,
    all_gather_invariant,
    all_reduce,
    all_reduce_invariant,
    all_to_all,
    in_order,
    invariant,
    pad,
    partial,
    partial_invariant,
    reduce_scatter,
    replicate,
    shard,
    shard_invariant,
)
from ndcompile.runtime.context import context_attention, heads_divide
from ndcompile.runtime.factory import arange, literal
from ndcompile.runtime.gradient import scale_gradient, with_gradient_of
from ndcompile.runtime.grouped import grouped_linear
from ndcompile.runtime.halves import in_halves, once, start
from ndcompile.runtime.histogram import histogram
from ndcompile.runtime.lookup import embedding
from ndcompile.runtime.loss import cross_entropy
from ndcompile.runtime.masks import Mask
from ndcompile.runtime.mesh import Mesh, Ranks, current, use
from ndcompile.runtime.norm import batch_norm, moving_average
from ndcompile.runtime.random import draw_key, dropout, fold, keep_mask, uniform, uniform_bits
from ndcompile.runtime.recurrent import gru, lstm, rnn_relu, rnn_tanh
from ndcompile.runtime.remat import recomputed
from ndcompile.runtime.sequence import positions
from ndcompile.runtime.way import Weight, weight
from ndcompile.runtime.weights import Bucket, StaleWeights

__all__ = [
    "Block",
    "Root",
    "State",
    "Bucket",
    "StaleWeights",
    "Weight",
    "weight",
    "Mask",
    "Mesh",
    "Ranks",
    "all_gather",
    "all_gather_invariant",
    "all_reduce",
    "all_reduce_invariant",
    "all_to_all",
    "in_order",
    "arange",
    "attention",
    "attention_with_dropout",
    "batch_norm",
    "context_attention",
    "convolve",
    "cross_entropy",
    "current",
    "draw_key",
    "dropout",
    "embedding",
    "fold",
    "grouped_linear",
    "heads_divide",
    "histogram",
    "gru",
    "in_halves",
    "invariant",
    "literal",
    "keep_mask",
    "lstm",
    "moving_average",
    "once",
    "pad",
    "partial",
    "partial_invariant",
    "positions",
    "recomputed",
    "reduce_scatter",
    "rnn_relu",
    "rnn_tanh",
    "running_sum",
    "replicate",
    "scale_gradient",
    "shard",
    "shard_invariant",
    "start",
    "uniform",
    "uniform_bits",
    "use",
    "with_gradient_of",
]
