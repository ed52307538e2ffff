"""Where a segment is cut, so that the backward of a result that nobody reads is not run.

A compiled function of several results gives autograd zeros for one that gets no gradient, and computes with them. So
the ops of a segment are grouped by the results that they serve: of a group either all get a gradient, or none does.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from torch import fx

from ndcompile.rules.registry import op_name

ELSEWHERE = None
"""Stands for what is read by the program itself, and so gets a gradient whichever result is read."""

Reach = frozenset[fx.Node | None]
"""The results that an op serves."""


def groups(
    nodes: Sequence[fx.Node], outputs: Collection[fx.Node], returned: Collection[fx.Node]
) -> list[list[fx.Node]]:
    """The ops of a segment in groups, in an order in which they can run: one group where there is nothing to gain.

    `outputs` are the values that others need; of these the user may read those `returned`, or may not.
    """
    ends = [node for node in nodes if node in outputs and node.meta["grad"]]
    optional = [node for node in ends if node in returned]
    if len(ends) < 2 or not optional:
        return [list(nodes)] if nodes else []
    return _Cut(nodes, ends, dict.fromkeys(optional)).groups()


@dataclass
class _Cut:
    nodes: Sequence[fx.Node]
    ends: Sequence[fx.Node]
    marks: dict[fx.Node, None]
    """What may get no gradient: results, and values on the way to some of them."""
    reach: dict[fx.Node, Reach] = field(default_factory=dict)

    def groups(self) -> list[list[fx.Node]]:
        self._look()
        while (value := self._sometimes_unread()) is not None:
            self.marks[value] = None
            self._look()
        return self._in_order()

    def _look(self) -> None:
        """What each op serves. A list stays with its items, since only tensors go from group to group."""
        own, self.reach = set(self.nodes), {}
        for node in reversed(self.nodes):
            found = {end for user in node.users if user in own for end in self.reach[user]}
            if node in self.marks:
                found.add(node)
            elif node in self.ends:
                found.add(ELSEWHERE)
            self.reach[node] = frozenset(found)
        for node in self.nodes:
            if op_name(node.target) == "_operator.getitem":
                self.reach[node] = self.reach.get(node.all_input_nodes[0], self.reach[node])

    def _sometimes_unread(self) -> fx.Node | None:
        """A value whose group may run backward for others, while all that read it are not asked for."""
        for node in self.nodes:
            own = self.reach[node]
            read = Reach().union(*self._other_groups(node))
            told = node in self.ends or node in self.marks or not node.meta.get("grad")
            if read and read != own and ELSEWHERE not in read and not told:
                return node
        return None

    def _other_groups(self, node: fx.Node) -> list[Reach]:
        """What the ops of other groups serve that read a value."""
        found = [self.reach[user] for user in node.users if user in self.reach]
        return [reach for reach in found if reach != self.reach[node]]

    def _in_order(self) -> list[list[fx.Node]]:
        """An op serves all that its users serve: so the groups that serve most come first.

        What serves no result that gets a gradient (a count, an index) stands with the last of its operands.
        """
        every = dict.fromkeys(reach for node in self.nodes if (reach := self.reach[node]))
        order = sorted(every, key=len, reverse=True)
        number = {reach: i for i, reach in enumerate(order)}
        at: dict[fx.Node, int] = {}
        for node in self.nodes:
            before = max((at[value] for value in node.all_input_nodes if value in at), default=0)
            at[node] = number.get(self.reach[node], before)
        return [[node for node in self.nodes if at[node] == i] for i in range(len(order))]
