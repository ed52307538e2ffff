"""The cheapest choice of one row per op, exactly: a mixed-integer program that HiGHS solves.

One variable says which row an op takes. For each edge a flow says from which placement to which the value goes; a
conversion is paid once for all uses that stand in one place. Ops that share a key share a choice, so repeated blocks
cost as much as one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field

import numpy as np
from scipy import optimize, sparse

from ndcompile.placement import Placement
from ndcompile.rules.rows import Row

Key = Hashable


@dataclass(frozen=True)
class Edge:
    """A use: operand `operand` of `user` is the value of `producer`; `place` is where its conversion would stand."""

    producer: Key
    user: Key
    operand: int
    place: Key


@dataclass
class Problem:
    """Ops by key with their rows and each row's own cost, edges with the cost of each change on them (seconds)."""

    rows: dict[Key, list[Row]] = field(default_factory=dict)
    costs: dict[Key, list[float]] = field(default_factory=dict)
    edges: dict[Edge, Callable[[Placement, Placement], float]] = field(default_factory=dict)
    weights: dict[Key, int] = field(default_factory=lambda: defaultdict(int))
    """How many ops share a key."""
    times: dict[tuple[Key, Key], int] = field(default_factory=dict)
    """How often a conversion of a producer stands at a place, if not once."""

    def allow(self, key: Key, keep: Callable[[Row], bool]) -> None:
        """Keep only some rows of an op."""
        kept = [i for i, row in enumerate(self.rows[key]) if keep(row)]
        self.rows[key] = [self.rows[key][i] for i in kept]
        self.costs[key] = [self.costs[key][i] for i in kept]


def moved_bytes(problem: Problem, chosen: Mapping[Key, Row]) -> float:
    """Bytes that the conversions of a choice send, forward and backward, each counted once where it stands."""
    paid = {}
    for edge, cost in problem.edges.items():
        source, target = chosen[edge.producer].output, chosen[edge.user].operands[edge.operand]
        volume = getattr(cost, "volume", None)
        if volume is not None and source != target:
            times = problem.times.get((edge.producer, edge.place), 1)
            paid[edge.producer, edge.place, source, target] = volume(source, target) * times
    return float(sum(paid.values()))


TIME_LIMIT = 300.0  # s; a choice that is not proven the best is no answer, since ranks must agree on it


class ChoiceTimeout(ValueError):
    """The best choice could not be proven in time."""


class Infeasible(ValueError):
    """No choice of rows satisfies all that is asked."""


def choose(problem: Problem) -> tuple[dict[Key, Row], float]:
    """The rows of least total cost, and that cost in seconds. Raises `Infeasible`."""
    program = _Program()
    row_at = {
        key: [program.variable(cost * problem.weights[key], integer=True) for cost in problem.costs[key]]
        for key in problem.rows
    }
    for indices in row_at.values():
        program.equal([(i, 1.0) for i in indices], 1.0)
    paid: dict[tuple[Key, Key, Placement, Placement], int] = {}
    for edge, cost in problem.edges.items():
        _add_edge(program, problem, row_at, paid, edge, cost)
    values, total = program.solve()
    chosen = {
        key: problem.rows[key][max(range(len(indices)), key=lambda i: values[indices[i]])]
        for key, indices in row_at.items()
    }
    return chosen, total


def _add_edge(
    program: _Program,
    problem: Problem,
    row_at: dict[Key, list[int]],
    paid: dict[tuple[Key, Key, Placement, Placement], int],
    edge: Edge,
    cost: Callable[[Placement, Placement], float],
) -> None:
    gives, takes = defaultdict(list), defaultdict(list)
    for index, row in zip(row_at[edge.producer], problem.rows[edge.producer], strict=True):
        gives[row.output].append(index)
    for index, row in zip(row_at[edge.user], problem.rows[edge.user], strict=True):
        takes[row.operands[edge.operand]].append(index)
    out_of, into = defaultdict(list), defaultdict(list)
    for source in gives:
        for target in takes:
            price = cost(source, target)
            if np.isinf(price):
                continue
            flow = program.variable(0.0)
            out_of[source].append(flow)
            into[target].append(flow)
            if price:
                share = (edge.producer, edge.place, source, target)
                if share not in paid:
                    paid[share] = program.variable(price * problem.times.get(share[:2], 1))
                program.at_most([(flow, 1.0), (paid[share], -1.0)], 0.0)
    for source, indices in gives.items():
        program.equal([(i, 1.0) for i in out_of[source]] + [(i, -1.0) for i in indices], 0.0)
    for target, indices in takes.items():
        program.equal([(i, 1.0) for i in into[target]] + [(i, -1.0) for i in indices], 0.0)


class _Program:
    """Collects variables in [0, 1] and linear constraints, then asks HiGHS."""

    def __init__(self) -> None:
        self.cost: list[float] = []
        self.integer: list[int] = []
        self.entries: tuple[list[float], list[int], list[int]] = ([], [], [])
        self.low: list[float] = []
        self.high: list[float] = []

    def variable(self, cost: float, integer: bool = False) -> int:
        self.cost.append(cost * 1e6)
        self.integer.append(int(integer))
        return len(self.cost) - 1

    def equal(self, terms: list[tuple[int, float]], value: float) -> None:
        self._constrain(terms, value, value)

    def at_most(self, terms: list[tuple[int, float]], value: float) -> None:
        self._constrain(terms, -np.inf, value)

    def _constrain(self, terms: list[tuple[int, float]], low: float, high: float) -> None:
        data, row, column = self.entries
        for index, factor in terms:
            data.append(factor)
            row.append(len(self.low))
            column.append(index)
        self.low.append(low)
        self.high.append(high)

    def solve(self) -> tuple[np.ndarray, float]:
        data, row, column = self.entries
        matrix = sparse.csr_array((data, (row, column)), shape=(len(self.low), len(self.cost)))
        result = optimize.milp(
            np.array(self.cost),
            integrality=np.array(self.integer),
            bounds=optimize.Bounds(0, 1),
            constraints=optimize.LinearConstraint(matrix, np.array(self.low), np.array(self.high)),
            options=dict(time_limit=TIME_LIMIT, mip_rel_gap=1e-6),
        )
        if result.status == 1:
            raise ChoiceTimeout(f"HiGHS found no proven optimum in {TIME_LIMIT:.0f} s for {len(self.cost)} variables")
        if result.x is None:
            raise Infeasible(result.message)
        return result.x, float(result.fun) / 1e6
