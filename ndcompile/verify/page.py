"""A report as one HTML page, which loads nothing from elsewhere."""

from __future__ import annotations

import re
from functools import cache
from importlib import resources

import torch
from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

import ndcompile
from ndcompile.listing import collectives_rows, nominal_sizes
from ndcompile.verify.report import Report

STATES = {True: ("yes", "good"), False: ("no", "bad"), None: ("not said", "open")}
MOST = 12
"""So many differences are listed."""


def page(report: Report) -> str:
    """The page's text. Every value in it is escaped."""
    program, line = report.program, re.search(r"^\s*line (\d+)", report.begins, re.MULTILINE)
    known = (
        {} if program is None else dict(duties=program.duties(), collectives=collectives_rows(program.collectives()))
    )
    return template().render(
        report=report, program=program, source=report.source, wrong=int(line[1]) if line else 0, STATES=STATES,
        MOST=MOST, NUMBER=Markup(' class="number"'), WRONG=Markup(' class="wrong"'), nominal=nominal_sizes(),
        version=ndcompile.__version__, torch=torch.__version__, **known,
    )  # fmt: skip


@cache
def template() -> Template:
    text = resources.files("ndcompile.verify").joinpath("report.html").read_text()
    escaping = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return escaping.from_string(text)
