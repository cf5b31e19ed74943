"""Which room may import which, computed from the source; imports inside functions count, those for types do not."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "tinyvae"

FLOORS = [
    {"errors", "heap"},
    {"terminal"},
    {"files"},
    {"cache_folder"},
    {"storage"},
    {"models"},
    {"engines", "video"},
    {"data", "losses", "teachers"},
    {"config"},
    {"diffusers", "evaluation"},
    {"convert", "training"},
    {"cli"},
    {"__main__"},
]
"""Rooms and single files from the ground up: each may import what lies below it, and its own room."""
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}


def modules() -> dict[str, Path]:
    found = {}
    for file in sorted(SOURCE.rglob("*.py")):
        parts = file.relative_to(SOURCE).with_suffix("").parts
        found[".".join(["tinyvae", *parts]).removesuffix(".__init__")] = file
    return found


MODULES = modules()


def imports_in(node: ast.AST) -> Iterator[str]:
    """Modules of ours that are imported anywhere below a node."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            continue
        if isinstance(child, ast.Import):
            yield from (name.name for name in child.names)
        elif isinstance(child, ast.ImportFrom) and child.module:
            inner = [f"{child.module}.{name.name}" for name in child.names]
            yield from (name if name in MODULES else child.module for name in inner)
        yield from imports_in(child)


GRAPH = {
    name: {other for other in imports_in(ast.parse(file.read_text())) if other in MODULES and other != name}
    for name, file in MODULES.items()
}


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def test_every_room_has_a_floor() -> None:
    assert {room_of(name) for name in MODULES} - {""} == FLOOR_OF.keys()


@pytest.mark.parametrize("name", [name for name in MODULES if room_of(name)])
def test_no_arrow_goes_up(name: str) -> None:
    room = room_of(name)
    for other in GRAPH[name]:
        below = room_of(other)
        assert below in {"", room} or FLOOR_OF[below] < FLOOR_OF[room], f"{name} imports {other}"


def test_there_is_no_cycle() -> None:
    try:
        TopologicalSorter(GRAPH).prepare()
    except CycleError as cycle:
        pytest.fail(f"a cycle of imports: {' -> '.join(cycle.args[1])}")


def test_the_check_sees_an_import_inside_a_function() -> None:
    tree = ast.parse("def work():\n    from tinyvae.training.start import run_training\n")
    assert list(imports_in(tree)) == ["tinyvae.training.start"]


@pytest.mark.parametrize("name", MODULES)
def test_files_and_functions_are_short(name: str) -> None:
    """A function fits a screen (60 lines), a file has at most 600."""
    text = MODULES[name].read_text()
    assert text.count("\n") <= 600
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno is not None and node.end_lineno - node.lineno < 60, f"{name}.{node.name}"
