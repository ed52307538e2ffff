"""Two rounds of each run are kept, and later blocks' nodes are made only where they are."""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from typing import Any

from torch import fx, nn

from ndcompile.borders import ENTER, LEAVE
from ndcompile.fold.alone import alone
from ndcompile.fold.items import HELD, Item, held_name, items_of, outside
from ndcompile.fold.place import Place, inside
from ndcompile.fold.runs import Run, places_of, runs_of


def fold(
    graph: fx.GraphModule, model: nn.Module, names: Mapping[str, str], pinned: Mapping[str, str], drop: bool = True
) -> fx.GraphModule:
    """Put the nodes of blocks in place of their marks, and keep two rounds of each run (all, if not `drop`).

    Nodes in blocks and in runs get `place`, and `at`, by which nodes of two rounds correspond; a parameter that stands
    for those of later rounds gets their names as `stands_for`. `names` has for each name of a parameter or buffer the
    first one of the same tensor; `pinned` are names that the user pins, which tell blocks apart. Raises `NotFollowed`.
    """
    items = items_of(graph)
    for item in alone(graph, items, model):
        item.key = (item.key, id(item))
    runs = runs_of(items, pinned) if drop else []
    places = places_of(items, runs)
    for run in runs:
        _drop_rounds(graph, items, run)
    kept = [i for i, item in enumerate(items) if not any(run.dropped(i) for run in runs)]
    bodies: dict[int, Item] = {}
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


def _drop_rounds(graph: fx.GraphModule, items: list[Item], run: Run) -> None:
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


def _output(graph: fx.GraphModule, item: Item, number: int) -> fx.Node:
    value = item.outputs[number]
    if value is None:
        assert item.again is not None, "a traced block has all its results"
        with graph.graph.inserting_after(item.again):
            value = item.outputs[number] = graph.graph.call_function(operator.getitem, (item.again, number))
        item.nodes.append(value)
    return value


def _give_placeholders(graph: fx.GraphModule, items: list[Item], names: Mapping[str, str]) -> None:
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
        after = next(n for n in graph.graph.nodes if order.get(held_name(n), len(order)) > order[name])
        with graph.graph.inserting_before(after):
            made = graph.graph.placeholder(like[name].name[:2] + re.sub(r"[^a-zA-Z0-9]", "_", name.lower()))
        made.meta = like[name].meta | dict(name=name)


def _expand(graph: fx.GraphModule, item: Item, bodies: dict[int, Item], names: Mapping[str, str]) -> None:
    """Copy the nodes of the block that was traced, with this block's parameters and arguments."""
    if item.body is None:
        return
    if item.again is None:
        bodies[item.body] = item
        return
    template = bodies[item.body]
    placeholders = {n.meta["name"]: n for n in graph.graph.find_nodes(op="placeholder") if "name" in n.meta}
    new: dict[fx.Node, fx.Node] = {}
    for value in outside(template.nodes):
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
