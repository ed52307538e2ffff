"""A step's timeline: what covers what, by hand-made kernels (in nanoseconds)."""

from __future__ import annotations

from tests.bench.spans import Exposed, Kernel, exposed, strip, summary, union, without

STEP = [
    Kernel("nvjet_tst_128x256", 0, 40),
    Kernel("ncclDevKernel_AllGather_RING_LL", 30, 60),  # 20 of it alone, before what follows
    Kernel("triton_poi_fused_add", 60, 70),
    Kernel("Memcpy PtoP", 65, 75),  # 5 alone
    Kernel("cudnn_fprop_flash", 80, 100),  # after 5 of nothing
]


def test_union_and_what_is_left() -> None:
    assert union([(5, 7), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 7)]
    assert without([(0, 10), (20, 30)], [(2, 3), (8, 22), (29, 40)]) == [(0, 2), (3, 8), (22, 29)]
    assert without([(0, 10)], [(0, 10)]) == []


def test_every_nanosecond_is_computing_exposed_or_idle() -> None:
    step = summary(STEP)
    assert (step.wall, step.computing, step.moving, step.exposed, step.idle) == (100, 70, 40, 25, 5)
    assert step.computing + step.exposed + step.idle == step.wall
    assert step.kinds == {"matmul": 40, "communication": 30, "fused": 10, "copy": 10, "attention": 20}


def test_exposed_stretches_name_what_waited() -> None:
    assert exposed(STEP) == [
        Exposed("ncclDevKernel_AllGather_RING_LL", 20, "triton_poi_fused_add"),
        Exposed("Memcpy PtoP", 5, "cudnn_fprop_flash"),
    ]


def test_the_strip_shows_both_lines() -> None:
    computing, moving = strip(STEP, columns=10).splitlines()
    assert computing == "computing MMMM  f AA"
    assert moving == "moving       cccyy  "
