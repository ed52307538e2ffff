"""The report as a page: it holds all that the report says, escaped, and the tables and the source of the program."""

from __future__ import annotations

import re
from functools import cache
from html.parser import HTMLParser

import torch
from torch import nn

import ndcompile as nd
from ndcompile.listing import collectives_rows
from ndcompile.verify.report import Claim, Report
from tests.models import Stack, tokens


class Reader(HTMLParser):
    """The page's text, cell by cell, and what it would load."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.opened: list[str] = []
        self.loads: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "br", "link", "img"):
            self.opened.append(tag)
        self.loads += [f"{tag} {key}={value}" for key, value in attributes if key == "src" or tag in ("script", "link")]

    def handle_endtag(self, tag: str) -> None:
        assert self.opened.pop() == tag, f"{tag} closes what it did not open"

    def handle_data(self, data: str) -> None:
        self.texts.append(data.strip())


@cache
def program() -> nd.Program:
    return nd.compile(Stack(4), "dp_shard=2, tp=2", tokens())


def test_the_page_of_a_right_program() -> None:
    report = nd.verify(program(), seeds=1, microbatches=1)
    page = Reader(report.to_html())
    assert not page.opened and not page.loads
    for text in ("equal to one device", *(text for claim in report.claims for text in claim.evidence), *report.sizes):
        assert text in page.texts
    at = page.texts.index("layers.*.norm.weight")
    assert page.texts[at : at + 7] == ["layers.*.norm.weight", "dp_shard", "P", "reduce_scatter", "float32", "48", "4"]
    cells = [text for rows in collectives_rows(program().collectives()) for row in rows for text in row]
    lines = [line.strip() for line in str(program()).splitlines()]
    assert not {*cells, *lines} - {*page.texts}


def test_the_page_of_a_wrong_one_shows_where_it_begins() -> None:
    wrong = str(program()).replace("reduce_scatter(down, tp, dim=2)", "down.chunk(tp.size, 2)[tp.index]")
    report = nd.verify(program(), seeds=1, microbatches=1, source=wrong)
    page = report.to_html()
    assert not report and "NOT equal to one device" in page
    (line,) = re.findall(r'<span id="L\d+" class="wrong">(.*?)</span>', page)
    assert line.strip().startswith("down = down.chunk(tp.size, 2)[tp.index]")


def test_everything_is_escaped() -> None:
    evil = "<script>alert('&')</script>"
    report = Report(evil, [Claim(evil, None, [evil], 0.0)], [evil], [evil], evil, [evil])
    page = report.to_html()
    assert "<script>" not in page and page.count("&lt;script&gt;alert(&#39;&amp;&#39;)") == 8


def test_markdown_is_a_table_of_the_claims() -> None:
    report = Report("M on tp=2", [Claim("tested", True, ["a | b", "c"], 0.1), Claim("proved", None, ["d"], 0.0)], [])
    assert report.to_markdown() == (
        "M on tp=2: equal to one device\n\n"
        "| claim | holds | evidence |\n"
        "|---|---|---|\n"
        "| tested | yes | a \\| b; c |\n"
        "| proved | not said | d |"
    )


def test_progress_is_told_before_each_step_and_at_the_end() -> None:
    told: list[tuple[str, int, int]] = []
    small = nd.compile(nn.Linear(4, 6), "tp=2", torch.zeros(3, 4))
    nd.verify(small, seeds=2, microbatches=1, progress=lambda *step: told.append(step))
    whats = ["types", "sizes", "F_p, sample 1 of 2", "F_p, sample 2 of 2", "float64", "done"]
    assert told == [(what, number, 5) for number, what in enumerate(whats)]
