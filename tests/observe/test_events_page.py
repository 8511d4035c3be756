"""docs/events.md has every kind of event that the code records, and no other."""

from __future__ import annotations

import ast
import re

from scavenger.resources import path

#: Calls whose first or second argument is an event's kind.
KIND_AT = {"Event": 0, "event": 0, "connection_event": 1}


def recorded() -> set[str]:
    """Every kind that stands as a literal where an event is made, or is assigned to the `kind` that is given there."""
    found: set[str] = set()
    for file in sorted(path("scavenger").rglob("*.py")):
        if file.parts[-2] == "gateway":
            continue  # its `event` writes a server-sent event
        tree = ast.parse(file.read_text(encoding="utf-8"))
        makes_by_name = False
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            given = [node.args[KIND_AT[name]]] if name in KIND_AT and len(node.args) > KIND_AT[name] else []
            given += [one.value for one in node.keywords if name == "values" and one.arg == "kind"]
            for one in given:
                if isinstance(one, ast.Constant) and isinstance(one.value, str):
                    found.add(one.value)
                elif isinstance(one, ast.Name) and one.id == "kind":
                    makes_by_name = True
        if makes_by_name:
            found |= _assigned(tree)
    return {kind for kind in found if re.fullmatch(r"[a-z]+(_[a-z]+)*", kind)}


def _assigned(tree: ast.Module) -> set[str]:
    """Texts that `kind` may have: of `kind = ...`, of `kind, why = (...) if ... else (...)`, and of calls of a helper that takes it."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            target = node.targets[0]
            if isinstance(target, ast.Name) and target.id == "kind":
                found |= _texts(node.value)
            if isinstance(target, ast.Tuple) and getattr(target.elts[0], "id", "") == "kind":
                arms = (
                    [node.value.body, node.value.orelse]
                    if isinstance(node.value, ast.IfExp)
                    else [node.value]
                )
                for arm in arms:
                    found |= _texts(arm.elts[0]) if isinstance(arm, ast.Tuple) else set()
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "_event" and node.args:
            found |= _texts(node.args[0])
    return found


def _texts(node: ast.expr) -> set[str]:
    arms = [node.body, node.orelse] if isinstance(node, ast.IfExp) else [node]
    return {one.value for one in arms if isinstance(one, ast.Constant) and isinstance(one.value, str)}


def test_the_page_has_every_kind_that_is_recorded_and_no_other() -> None:
    page = path("docs/events.md").read_text(encoding="utf-8")
    told = {
        kind
        for line in page.splitlines()
        if line.startswith("| `")
        for kind in re.findall(r"`(\w+)`", line.split("|")[1])
    }
    kinds = recorded()
    assert len(kinds) > 40, kinds
    assert told == kinds
