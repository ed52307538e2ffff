"""Runs of equal blocks in a graph: two rounds are kept, and the second stands for all later ones.

Capture marks where blocks begin and end (`borders`). A run is a stretch of the graph that repeats: in every round the
same blocks and the same ops between them, each taking the same values from outside, what its own round made, or what
the round before made, and only the last round's results are seen outside. So any two neighbouring rounds say all that
there is to say of a run, whatever its length: `fold` keeps the first two, `unfold` gives the whole graph again.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import torch
from torch import fx, nn

from ndcompile.blocks import block_of
from ndcompile.borders import AGAIN, ENTER, LEAVE

LONGEST = 16  # blocks and stretches in a round
HELD = ("parameter", "buffer")
"""Roles of the placeholders that a model's blocks own."""


class NotFollowed(Exception):
    """A block uses values that its call does not show, so calls of it may not be told apart."""


@dataclass(frozen=True)
class Place:
    """Where in the model a node stands: in a call of a block, or in a run's stretch between two (`block` is empty)."""

    number: int
    """Of the call or stretch, in order."""
    block: str
    stands_for: tuple[str, ...] = ()
    """The blocks that this call stands for: itself, or in a run's second round one for each later round."""
    run: int | None = None
    round: int = 0
    position: int = 0
    """In the round."""

    @property
    def repeat(self) -> int:
        return max(len(self.stands_for), 1)


def repeat_of(node: fx.Node) -> int:
    """How many nodes of the whole graph this one stands for."""
    place = node.meta.get("place")
    return len(node.meta.get("stands_for", ())) or (1 if place is None else place.repeat)


def in_run(node: fx.Node) -> bool:
    """Whether a node is one of a run's rounds."""
    place = node.meta.get("place")
    return place is not None and place.run is not None


@dataclass
class _Item:
    """A call of a block, or what stands between two calls."""

    key: Any
    block: str
    nodes: list[fx.Node]
    inputs: list[fx.Node]
    outputs: list[fx.Node | None]
    """Of a call its results, of a stretch all of its nodes."""
    body: int | None = None
    again: fx.Node | None = None
    marks: tuple[fx.Node, ...] = ()
    """Where a traced block is entered and left."""


def fold(
    graph: fx.GraphModule, model: nn.Module, names: Mapping[str, str], pinned: Mapping[str, str], drop: bool = True
) -> fx.GraphModule:
    """Put the nodes of blocks in place of their marks, and keep two rounds of each run (all, if not `drop`).

    Nodes in blocks and in runs get `place`, and `at`, by which nodes of two rounds correspond; a parameter that stands
    for those of later rounds gets their names as `stands_for`. `names` has for each name of a parameter or buffer the
    first one of the same tensor; `pinned` are names that the user pins, which tell blocks apart. Raises `NotFollowed`.
    """
    items = _items(graph)
    for item in _alone(graph, items, model):
        item.key = (item.key, id(item))
    runs = _Finder(items, pinned).runs() if drop else []
    places = _places(items, runs)
    for run in runs:
        _drop_rounds(graph, items, run)
    kept = [i for i, item in enumerate(items) if not any(run.dropped(i) for run in runs)]
    bodies: dict[int, _Item] = {}
    _give_placeholders(graph, [items[i] for i in kept], names)
    for i in kept:
        _expand(graph, items[i], bodies, names)
        for at, node in enumerate(items[i].nodes):
            if i in places:
                node.meta |= dict(place=places[i], at=(places[i].position, at))
    for node in [n for n in graph.graph.nodes if n.target in (ENTER, LEAVE)]:
        graph.graph.erase_node(node)
    _stand_for(graph, places, names)
    graph.graph.lint()
    graph.recompile()
    return graph


# ---- the items -----------------------------------------------------------------------------------------------------


def _items(graph: fx.GraphModule) -> list[_Item]:
    found: list[_Item] = []
    inside: _Item | None = None
    first: dict[int, _Item] = {}
    for node in graph.graph.nodes:
        if node.op != "call_function":
            continue
        if node.target is ENTER:
            values, path, body = node.args
            inside = first[body] = _Item(("body", body), path, [], list(values), [], body, marks=(node,))
            found.append(inside)
        elif node.target is LEAVE:
            assert inside is not None, "a block that is left was entered"
            inside.outputs, inside.marks, inside = list(node.args[0]), (*inside.marks, node), None
        elif inside is not None:
            inside.nodes.append(node)
        elif node.target is AGAIN:
            found.append(_again(node, first[node.args[2]]))
        elif not (node.target is operator.getitem and node.args[0].target is AGAIN):
            if not found or found[-1].body is not None:
                found.append(_Item(None, "", [], [], []))
            found[-1].nodes.append(node)
    for item in found:
        if item.body is None:
            item.key, item.inputs, item.outputs = _text(item.nodes), _outside(item.nodes), list(item.nodes)
    for item in first.values():
        _follow(item, again=any(i.body == item.body and i is not item for i in found))
    return found


def _again(node: fx.Node, template: _Item) -> _Item:
    """A later call; what it hands through unchanged is its own input."""
    values, path, body = cast(tuple[list[fx.Node], str, int], node.args)
    inputs = list(values)
    results: list[fx.Node | None] = [None] * len(template.outputs)
    for user in list(node.users):
        number = cast(int, user.args[1])
        passed = template.outputs[number]
        if passed in template.inputs:
            user.replace_all_uses_with(inputs[template.inputs.index(passed)])
            user.graph.erase_node(user)
        else:
            results[number] = user
    return _Item(("body", body), path, [r for r in results if r], inputs, results, body, node)


def _outside(nodes: list[fx.Node]) -> list[fx.Node]:
    own = set(nodes)
    return list(dict.fromkeys(v for node in nodes for v in node.all_input_nodes if v not in own))


def _is_size(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (int, torch.SymInt))


def _follow(body: _Item, again: bool) -> None:
    """A traced block takes tensors from outside as arguments only, and nothing but its results is used later."""
    if not again:
        return
    own = set(body.nodes)
    held = ("parameter", "buffer", "constant")
    free = [v for v in _outside(body.nodes) if v not in body.inputs and not _is_size(v)]
    seen = [n for n in body.nodes if n not in body.outputs and any(_leaves(user, own) for user in n.users)]
    if seen or any(v.meta.get("role") not in held for v in free):
        raise NotFollowed(body.block)


def _leaves(user: fx.Node, own: set[fx.Node]) -> bool:
    return user not in own and user.target is not LEAVE


def _text(nodes: list[fx.Node]) -> Any:
    """What a stretch does, free of names."""
    names: dict[fx.Node, Any] = {node: i for i, node in enumerate(nodes)}
    outside = {node: -1 - i for i, node in enumerate(_outside(nodes))}
    return tuple((str(n.target), *frozen((n.args, n.kwargs), lambda v: (names | outside)[v])) for n in nodes)


def frozen(value: Any, name: Callable[[fx.Node], Any]) -> Any:
    """Arguments of a node as something to compare, with `name` of each node in them."""
    if isinstance(value, fx.Node):
        return name(value)
    if isinstance(value, dict):
        return tuple((k, frozen(v, name)) for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(frozen(v, name) for v in value)
    return (type(value), value) if isinstance(value, (int, float, bool, str, type(None))) else str(value)


# ---- which calls are alike -----------------------------------------------------------------------------------------


def _alone(graph: fx.GraphModule, items: list[_Item], model: nn.Module) -> Iterator[_Item]:
    """Items that no other one can stand for: they update a buffer, or their block's parameters are used elsewhere."""
    traced = {item.body: item for item in items if item.marks}
    updating = {body for body, item in traced.items() if any(_updates(n, set(item.nodes)) for n in item.nodes)}
    shared = _used_elsewhere(graph, items)
    for item in items:
        if item.body is None:
            alone = any(_updates(node, set(item.nodes)) for node in item.nodes)
        else:
            alone = item.body in updating or item.block in shared
            alone |= not _buffers_alike(model, traced[item.body].block, item.block)
        if alone:
            yield item


def _used_elsewhere(graph: fx.GraphModule, items: list[_Item]) -> set[str]:
    """The blocks one of whose parameters or buffers something reads that is not in a call of the block."""
    block = {node: item.block for item in items for node in item.nodes}
    blocks = {item.block for item in items}
    named = [(node, block_of(_held(node), blocks)) for node in graph.graph.find_nodes(op="placeholder")]
    return {path for node, path in named if path and any(block.get(user) != path for user in node.users)}


def _updates(node: fx.Node, own: set[fx.Node]) -> bool:
    """Whether a node changes what is not its block's own: a buffer, or a tensor from outside."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or "batch_norm" in str(node.target):
        return "batch_norm" in str(node.target)
    changed = node.args[0] if schema.is_mutable else None
    while isinstance(changed, fx.Node) and changed in own:
        aliases = changed.target._schema.arguments[:1] if hasattr(changed.target, "_schema") else []
        changed = changed.args[0] if any(a.alias_info for a in aliases) else None
    return changed is not None


def _buffers_alike(model: nn.Module, one: str, two: str) -> bool:
    """Equal values, since passes read the masks that a model keeps in buffers."""
    if one == two:
        return True
    first, second = (dict(model.get_submodule(path).named_buffers()) for path in (one, two))
    pairs = [(first[name], second[name]) for name in first if name in second]
    return all(a is b or a.is_meta or b.is_meta or (a.shape == b.shape and bool(torch.equal(a, b))) for a, b in pairs)


# ---- runs ----------------------------------------------------------------------------------------------------------


@dataclass
class _Run:
    """`rounds` times `period` items from `start` on."""

    start: int
    period: int
    rounds: int

    def dropped(self, i: int) -> bool:
        return self.start + 2 * self.period <= i < self.start + self.rounds * self.period

    def item(self, round: int, position: int) -> int:
        return self.start + round * self.period + position


class _Finder:
    """Looks for the longest runs, from the first item on, none of which overlap."""

    def __init__(self, items: list[_Item], pinned: Mapping[str, str]) -> None:
        self.items = items
        self.keys = [_with_pins(item, pinned) for item in items]
        self.maker = {v: (i, o) for i, item in enumerate(items) for o, v in enumerate(item.outputs) if v is not None}
        nodes = ((i, [*item.nodes, *([item.again] if item.again else [])]) for i, item in enumerate(items))
        self.owner = {node: i for i, own in nodes for node in own}

    def runs(self) -> list[_Run]:
        found, at = [], 0
        while at < len(self.items):
            runs = [_Run(at, period, self.rounds(at, period)) for period in range(1, LONGEST + 1)]
            best = max(runs, key=lambda run: (run.rounds > 1) * run.rounds * run.period)
            calls = any(self.items[best.item(0, j)].body is not None for j in range(best.period))
            if best.rounds > 1 and calls:
                found.append(best)
                at += best.rounds * best.period
            else:
                at += 1
        return found

    def rounds(self, start: int, period: int) -> int:
        """How many rounds of `period` items from `start` on are one run."""
        run = _Run(start, period, 1)
        while run.item(run.rounds + 1, 0) <= len(self.items):
            if not all(self.continues(run, j) for j in range(period)) or not _steps(self.items, run):
                break
            run.rounds += 1
        for round in range(run.rounds - 1):
            made = [v for j in range(period) for v in self.items[run.item(round, j)].outputs if v is not None]
            users = (user for value in made for user in value.users if user.target not in (ENTER, LEAVE))
            if any(self.owner.get(user, len(self.items)) >= run.item(round + 2, 0) for user in users):
                return round + 1
        return run.rounds if run.rounds == 1 or self._carries(run) else 1

    def _carries(self, run: _Run) -> bool:
        """Whether the last round and the one before are used alike: what is dead code in one is so in the other."""
        last = run.rounds - 1
        pairs = ((run.item(last - 1, j), run.item(last, j)) for j in range(run.period))
        return all(self._live_outputs(earlier) == self._live_outputs(later) for earlier, later in pairs)

    def _live_outputs(self, i: int) -> list[bool]:
        return [value in self.live for value in self.items[i].outputs]

    @cached_property
    def live(self) -> set[fx.Node]:
        """Every value on which a result of the graph depends, or a change of something."""
        nodes: Any = next(iter(self.owner)).graph.nodes if self.owner else []
        front = [v for node in nodes if _kept(node) for v in node.all_input_nodes]
        found: set[fx.Node] = set()
        while front:
            value = front.pop()
            if value not in found:
                found.add(value)
                front += self._needed(value)
        return found

    def _needed(self, value: fx.Node) -> list[fx.Node]:
        """What a value is made of; of a call's result the arguments that the block reads for it."""
        i, output = self.maker.get(value, (None, 0))
        if i is None or self.items[i].again is None:
            return [v for v in value.all_input_nodes if v.target is not AGAIN]
        template = next(item for item in self.items if item.body == self.items[i].body)
        given = dict(zip(template.inputs, self.items[i].inputs, strict=True))
        inner, front = set[fx.Node](), [template.outputs[output]]
        while front:
            part = front.pop()
            if part is not None and part not in inner:
                inner.add(part)
                front += [] if part in given else part.all_input_nodes
        return [v for v in inner if v not in template.nodes and v not in given] + [
            given[v] for v in inner if v in given
        ]

    def continues(self, run: _Run, position: int) -> bool:
        """Whether an item of the round after the run is as the one of the run's last round."""
        now, before = run.item(run.rounds, position), run.item(run.rounds - 1, position)
        if self.keys[now] != self.keys[before] or len(self.items[now].inputs) != len(self.items[before].inputs):
            return False
        pairs = zip(self.items[before].inputs, self.items[now].inputs, strict=True)
        return all(self._corresponds(run, earlier, later) for earlier, later in pairs)

    def _corresponds(self, run: _Run, earlier: fx.Node, later: fx.Node) -> bool:
        """Whether two rounds take the same from outside, from their own round, or from the round before."""
        by, output = self.maker.get(later, (-1, 0))
        if by < run.start:
            return earlier is later
        if by < run.item(run.rounds - 1, 0):
            return False  # from two rounds ago
        if run.rounds == 1 and by < run.item(1, 0):
            return self.maker.get(earlier, (-1, 0))[0] < run.start  # what the first round takes comes from outside
        return self.maker.get(earlier) == (by - run.period, output)


def _kept(node: fx.Node) -> bool:
    """A node that is there for what it does."""
    marks = (ENTER, LEAVE, AGAIN)
    return node.op == "output" or (node.op == "call_function" and node.target not in marks and _mutates(node))


def _mutates(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def _with_pins(item: _Item, pinned: Mapping[str, str]) -> Any:
    return (item.key, item.block.rpartition(".")[0], pins_in(pinned, item.block))


def pins_in(pinned: Mapping[str, str], block: str) -> tuple[tuple[str, str], ...]:
    """The pins of a block, by the names in it."""
    return tuple(sorted((name[len(block) :], pin) for name, pin in pinned.items() if inside(name, block)))


def inside(name: str, block: str) -> bool:
    """Whether a parameter or module is a block's own."""
    return bool(block) and (name == block or name.startswith(block + "."))


def _steps(items: list[_Item], run: _Run) -> bool:
    """Whether the blocks at each position are one, or follow each other in a list at even distances: of the next round.

    That it holds of the run's own rounds was seen before.
    """
    last = run.rounds
    gaps = [[_gap(items, run, round, j) for round in (0, last - 1)] for j in range(run.period)]
    return all(first == latest and first is not None for first, latest in gaps)


def _gap(items: list[_Item], run: _Run, round: int, position: int) -> int | None:
    """How far in its list the next round's block is; None where it does not follow."""
    one, two = (items[run.item(r, position)].block for r in (round, round + 1))
    if one == two:
        return 0
    before, after = (path.rpartition(".")[2] for path in (one, two))
    gap = int(after) - int(before) if before.isdigit() and after.isdigit() else 0
    return gap if gap > 0 else None


def _places(items: list[_Item], runs: list[_Run]) -> dict[int, Place]:
    found = {i: Place(i, item.block, (item.block,)) for i, item in enumerate(items) if item.body is not None}
    for number, run in enumerate(runs):
        for j in range(run.period):
            paths = [items[run.item(r, j)].block for r in range(run.rounds)]
            found[run.item(0, j)] = Place(run.item(0, j), paths[0], (paths[0],), number, 0, j)
            found[run.item(1, j)] = Place(run.item(1, j), paths[1], tuple(paths[1:]), number, 1, j)
    return found


def _drop_rounds(graph: fx.GraphModule, items: list[_Item], run: _Run) -> None:
    """Later uses of the last round's results use the second's; all between goes."""
    if run.rounds < 3:
        return
    for j in range(run.period):
        last, second = items[run.item(run.rounds - 1, j)], items[run.item(1, j)]
        for number, value in enumerate(last.outputs):
            if value is not None and value.users:
                value.replace_all_uses_with(_output(graph, second, number))
    for i in reversed(range(run.item(2, 0), run.item(run.rounds, 0))):
        nodes = [*([items[i].again] if items[i].again else []), *items[i].nodes]
        for node in reversed(nodes):
            assert node is not None
            graph.graph.erase_node(node)


def _output(graph: fx.GraphModule, item: _Item, number: int) -> fx.Node:
    value = item.outputs[number]
    if value is None:
        assert item.again is not None, "a traced block has all its results"
        with graph.graph.inserting_after(item.again):
            value = item.outputs[number] = graph.graph.call_function(operator.getitem, (item.again, number))
        item.nodes.append(value)
    return value


# ---- the nodes of blocks that were not traced again ----------------------------------------------------------------


def _give_placeholders(graph: fx.GraphModule, items: list[_Item], names: Mapping[str, str]) -> None:
    """Make the placeholders of blocks whose parameters the tracer did not get (`withheld`), in the model's order."""
    given = graph.graph.find_nodes(op="placeholder")
    held = {n.meta["name"]: n for n in given if n.meta["role"] in HELD}
    templates = {item.body: item.block for item in items if item.again is None}
    like = dict[str, fx.Node]()
    for item in items:
        before = templates.get(item.body, "") if item.again is not None else ""
        for name in (name for name in held if inside(name, before)):
            like[names.get(item.block + name[len(before) :], name)] = held[name]
    order = {name: i for i, name in enumerate(dict.fromkeys(names.values()))}
    for name in sorted(like.keys() - held.keys(), key=order.__getitem__):
        after = next(n for n in graph.graph.nodes if order.get(_held(n), len(order)) > order[name])
        with graph.graph.inserting_before(after):
            made = graph.graph.placeholder(like[name].name[:2] + re.sub(r"[^a-zA-Z0-9]", "_", name.lower()))
        made.meta = like[name].meta | dict(name=name)


def _held(node: fx.Node) -> str:
    """The name of the parameter or buffer that a node is."""
    return str(node.meta["name"]) if node.meta.get("role") in HELD else ""


def _expand(graph: fx.GraphModule, item: _Item, bodies: dict[int, _Item], names: Mapping[str, str]) -> None:
    """Copy the nodes of the block that was traced, with this block's parameters and arguments."""
    if item.body is None:
        return
    if item.again is None:
        bodies[item.body] = item
        return
    template = bodies[item.body]
    placeholders = {n.meta["name"]: n for n in graph.graph.find_nodes(op="placeholder") if "name" in n.meta}
    new: dict[fx.Node, fx.Node] = {}
    for value in _outside(template.nodes):
        name = str(value.meta.get("name", ""))
        own = value.op == "placeholder" and inside(name, template.block)
        new[value] = placeholders[names[item.block + name[len(template.block) :]]] if own else value
    begin, end = template.marks
    new |= dict(zip(begin.args[0], item.again.args[0], strict=True))  # type: ignore[arg-type]
    copies = []
    with graph.graph.inserting_before(item.again):
        for node in template.nodes:
            copy = new[node] = graph.graph.node_copy(node, lambda n: new[n])
            copy.meta = _moved(node.meta, template.block, item.block)
            copies.append(copy)
    for given, made in zip(end.args[0], item.outputs, strict=True):  # type: ignore[arg-type]
        if made is not None:
            assert given is not None
            made.replace_all_uses_with(new.get(given, given))
            graph.graph.erase_node(made)
    graph.graph.erase_node(item.again)
    item.nodes, item.again = copies, None


def _moved(meta: Mapping[str, Any], before: str, after: str) -> dict[str, Any]:
    """What is known of a node, for its copy in another block."""
    stack = {
        key: (after + path[len(before) :] if inside(path, before) else path, kind)
        for key, (path, kind) in (meta.get("nn_module_stack") or {}).items()
    }
    return {**meta, "nn_module_stack": stack}


def _stand_for(graph: fx.GraphModule, places: Mapping[int, Place], names: Mapping[str, str]) -> None:
    """Parameters of a run's second round stand for those of later rounds, whose own placeholders go."""
    standing = [p for p in places.values() if p.round == 1 and len(set(p.stands_for)) > 1]
    stood = {block for place in standing for block in place.stands_for[1:]}
    for node in list(graph.graph.find_nodes(op="placeholder")):
        name = str(node.meta.get("name", ""))
        if node.meta.get("role") not in HELD:
            continue
        place = next((p for p in standing if inside(name, p.block)), None)
        if place is not None:
            node.meta["stands_for"] = tuple(names[block + name[len(place.block) :]] for block in place.stands_for)
        elif not node.users and any(inside(name, block) for block in stood):
            graph.graph.erase_node(node)


# ---- the whole graph -----------------------------------------------------------------------------------------------


def unfold(graph: fx.GraphModule) -> fx.GraphModule:
    """A copy of the graph with every round of every run."""
    unfolder = _Unfolder(graph)
    for node in graph.graph.nodes:
        unfolder.take(node)
    return fx.GraphModule(graph, unfolder.new)


class _Unfolder:
    def __init__(self, graph: fx.GraphModule) -> None:
        self.new = fx.Graph()
        self.now: dict[fx.Node, fx.Node] = {}
        """For each node of the folded graph its copy; for those of a second round the one of the latest round."""
        self.parameters: dict[fx.Node, list[fx.Node]] = {}
        runs: dict[int, tuple[list[fx.Node], list[fx.Node]]] = {}
        for node in graph.graph.nodes:
            if node.op == "call_function" and in_run(node):
                runs.setdefault(node.meta["place"].run, ([], []))[node.meta["place"].round].append(node)
        self.runs = {seconds[-1]: (firsts, seconds) for firsts, seconds in runs.values()}

    def take(self, node: fx.Node) -> None:
        names = node.meta.get("stands_for")
        copy = self.now[node] = self.new.node_copy(node, lambda n: self.now[n])
        copy.meta = {k: v for k, v in node.meta.items() if k != "stands_for"}
        if in_run(node):
            copy.meta = _later(node, 0, 0)
        if names:
            self.parameters[node] = [copy]
            for name in names[1:]:
                more = self.new.placeholder(f"{node.name}_{len(self.parameters[node])}")
                more.meta = copy.meta | dict(name=name)
                self.parameters[node].append(more)
        if node in self.runs:
            self.repeat(*self.runs[node])

    def repeat(self, firsts: list[fx.Node], seconds: list[fx.Node]) -> None:
        """Rounds after the second: where the second takes the first's values, each takes those of the one before."""
        latest = {node.meta["at"]: node for node in seconds if "at" in node.meta}
        twins = {node: latest[node.meta["at"]] for node in firsts if "at" in node.meta}
        numbers = {node.meta["segment"] for node in seconds if float(node.meta.get("segment") or 0.5).is_integer()}
        for later in range(1, seconds[0].meta["place"].repeat):
            before = dict(self.now)

            def now(value: fx.Node, later: int = later, before: Mapping[fx.Node, fx.Node] = before) -> fx.Node:
                if value in self.parameters:
                    return self.parameters[value][later]
                return before[twins[value]] if value in twins else self.now[value]

            for node in seconds:
                copy = self.new.node_copy(node, now)
                copy.meta = _later(node, later, len(numbers))
                if node.meta.get("role") == "fold":
                    copy.args = (copy.args[0], node.args[1] + later * len(numbers))  # type: ignore[operator]
                self.now[node] = copy


def _later(node: fx.Node, later: int, segments: int) -> dict[str, Any]:
    """What is known of a second round's node, for a later round."""
    place: Place = node.meta["place"]
    block = place.stands_for[later] if place.stands_for else ""
    here = replace(place, block=block, stands_for=(block,))
    meta = {**node.meta, "place": here}
    for key in ("module", "block", "parameter"):
        if meta.get(key) and inside(meta[key], place.block):
            meta[key] = block + meta[key][len(place.block) :]
    if "segment" in meta:
        meta["segment"] += later * segments
    return meta
