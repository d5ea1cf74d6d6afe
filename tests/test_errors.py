"""docs/errors.md against the source: every error has a row there, and every row an error."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "errors.md"
HOLE = "…"

# Of the ranks' channel; `Workers.explain` turns them into what a user sees.
INTERNAL = {"EOFError", "TimeoutError", "AttributeError"}
# Reasons inside of another message.
REASONS = {"a file name is no text"}


def template(node: ast.expr) -> str | None:
    """The text of a string expression, with a hole for each part that is known at run time only."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(HOLE if isinstance(part, ast.FormattedValue) else part.value for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return (template(node.left) or HOLE) + (template(node.right) or HOLE)
    return None


def raised() -> list[tuple[str, str, str]]:
    """(file and line, type, message) of every error that the package raises."""
    found = []
    for file in sorted((ROOT / "nanovllm").rglob("*.py")):
        for function in ast.walk(ast.parse(file.read_text())):
            if not isinstance(function, ast.FunctionDef):
                continue
            variables = {
                node.targets[0].id: template(node.value)
                for node in ast.walk(function)
                if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
            }
            for node in ast.walk(function):
                if not (isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args):
                    continue
                argument = node.exc.args[0]
                message = variables.get(argument.id) if isinstance(argument, ast.Name) else template(argument)
                assert message is not None, f"{file}:{node.lineno}: the message is no string that can be read here"
                found.append((f"{file.name}:{node.lineno}", ast.unparse(node.exc.func), message))
    return found


def rows() -> list[tuple[str, str]]:
    """(message, types) of the page's tables."""
    cells = [line.strip("|").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert all(len(row) in (2, 3) and all(cell.strip() for cell in row) for row in cells), "a cell is empty"
    return [(row[0].strip().strip("`"), row[1] if len(row) == 3 else "") for row in cells]


def covers(row: str, message: str) -> bool:
    pattern = ".*".join(map(re.escape, row.strip(HOLE + " ").split(HOLE)))
    start = "" if row.startswith(HOLE) else "^"
    return re.search(start + pattern, message, re.DOTALL) is not None


RAISED = [error for error in raised() if error[1] not in INTERNAL and error[2] not in REASONS]


def test_the_reader_finds_the_errors():
    assert len(RAISED) > 100
    assert {"TypeError", "ValueError", "RuntimeError", "OSError"} == {kind for _, kind, _ in RAISED}


@pytest.mark.parametrize(("place", "kind", "message"), RAISED, ids=[place for place, _, _ in RAISED])
def test_every_error_has_a_row(place, kind, message):
    if len(message.replace(HOLE, "").strip(": ;")) < 8:
        pytest.skip("repeats another error, with the place where it came up")
    assert any(kind in types and covers(row, message) for row, types in rows()), (
        f"{place}: {kind} {message!r} has no row in docs/errors.md"
    )


def test_every_row_has_an_error():
    texts = {
        text
        for file in (ROOT / "nanovllm").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if (text := template(node) if isinstance(node, ast.expr) else None)
    }
    texts = {re.sub(r"%[ds]", HOLE, text) for text in texts}
    stale = [row for row, _ in rows() if not any(covers(row, text) for text in texts)]
    assert not stale, f"no such error is raised any more: {stale}"
