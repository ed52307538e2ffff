"""The demonstration's text and batches."""

import torch

from ndcompile.demo.data import END_OF_TEXT, LINE_END, global_batch, own_part, standard_library
from ndcompile.demo.model import IGNORED, VOCABULARY
from ndcompile.mesh import MeshSpec


def test_the_text_is_bytes_and_ends_of_text():
    text = standard_library()
    assert text.min() >= 0
    assert text.max() == END_OF_TEXT == VOCABULARY - 1


def test_a_step_and_a_seed_name_one_batch():
    first, again, other = global_batch(3, 8, 64, 0), global_batch(3, 8, 64, 0), global_batch(3, 8, 64, 1)
    assert torch.equal(first.ids, again.ids)
    assert not torch.equal(first.ids, other.ids)


def test_rows_have_unequal_numbers_of_labels():
    counts = (global_batch(0, 8, 128, 0).labels != IGNORED).sum(1)
    assert len(counts.unique()) > 1


def test_the_torn_line_at_the_start_is_not_scored():
    batch = global_batch(0, 8, 128, 0)
    for ids, labels in zip(batch.ids.tolist(), batch.labels.tolist(), strict=True):
        end = ids.index(LINE_END) if LINE_END in ids else len(ids) - 1
        assert set(labels[: end + 1]) == {IGNORED}
        assert labels[end + 1 : end + 2] == ids[end + 1 : end + 2]


def test_data_axes_share_the_rows_and_tp_repeats_them():
    mesh = MeshSpec.parse("dp_replicate=2, dp_shard=2, tp=2")
    batch = global_batch(0, 8, 16, 0)
    parts = [own_part(batch, mesh, rank).ids for rank in range(8)]
    assert torch.equal(torch.cat(parts[::2]), batch.ids)
    assert all(torch.equal(parts[rank], parts[rank + 1]) for rank in range(0, 8, 2))
