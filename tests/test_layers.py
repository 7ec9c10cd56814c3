"""Imports go one way: each room imports only from rooms above it."""

import ast
from pathlib import Path

import pytest

import ftrain

ROOT = Path(ftrain.__file__).parent
# Rooms on one line do not import each other.
LAYERS = [
    ["hyperparameters", "jaxpr", "paths", "storage", "suggestions", "tree"],
    ["packed"],
    ["coordination"],
    ["formats", "launching"],
    ["schedules"],
    ["gradients"],
    ["averages", "metrics"],
    ["optimizers"],
    ["cluster"],
    ["data", "checkpoints", "summaries", "models"],
    ["training"],
    ["hooks"],
    ["run", "evaluation"],
    ["tasks"],
    ["config"],
    ["loading"],
    ["migration"],
    ["cli"],
    ["__main__"],
]
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}
FILES = sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


def room_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    """Return the rooms that a file imports from, anywhere in the file."""
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        modules = []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            modules = [node.module, *(f"{node.module}.{name.name}" for name in node.names)]
        elif isinstance(node, ast.Import):
            modules = [name.name for name in node.names]
        rooms |= {module.split(".")[1] for module in modules if module.startswith("ftrain.")}
    return rooms - {"__version__"}


def test_every_room_has_its_place():
    assert {room_of(path) for path in FILES} == set(LEVEL)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_up_only(path):
    room = room_of(path)
    for other in imported_rooms(path) - {room}:
        assert LEVEL[other] < LEVEL[room], f"{path} of room {room} imports {other}"


def test_formats_need_no_jax():
    for path in (ROOT / "formats").rglob("*.py"):
        assert "jax" not in path.read_text()


def test_no_private_modules_of_jax_and_no_code_from_data():
    for path in FILES:
        source = path.read_text()
        for banned in ("jax._src", "pickle", "eval(", "exec("):
            assert banned not in source.replace("on_eval(", ""), f"{path}: {banned}"
