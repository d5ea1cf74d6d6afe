"""Pieces of Markdown for the guide: tables, listings, links to the source that are checked, and the filled template."""

import ast
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]


def code(text: object) -> str:
    return f"`{text}`"


def table(head: str, rows: Iterable[Iterable[object]]) -> str:
    """A Markdown table; `head` holds the column names, separated by bars."""
    names = [name.strip() for name in head.split("|")]
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", r"\|") for cell in line) + " |" for line in lines)


def read_table(text: str, first_column: str) -> tuple[list[str], list[list[str]]]:
    """The table whose first column has that name: names of the other columns, and lines of cells."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    (start,) = (i for i, cells in enumerate(lines) if cells[0] == first_column and len(cells) > 1)
    rows = []
    for cells in lines[start + 2 :]:
        if len(cells) != len(lines[start]):
            break
        rows.append(cells)
    return lines[start][1:], rows


def short(values: Any, most: int = 10) -> str:
    """A list or tensor as text, its middle left out if it is long."""
    values = values.tolist() if isinstance(values, torch.Tensor) else list(values)
    if values and isinstance(values[0], list):
        return "[" + ", ".join(short(value, most) for value in values) + "]"
    if len(values) <= most:
        return str(values)
    text = ", ".join(map(str, values[: most - 3]))
    return f"[{text}, ... {', '.join(map(str, values[-2:]))}]"


def listing(**values: object) -> str:
    """Names and values, one a line, in a block of code."""
    width = max(map(len, values)) + 2
    return "```text\n" + "\n".join(f"{name:{width}}{value}" for name, value in values.items()) + "\n```"


def ranges(numbers: Iterable[int]) -> str:
    """Sorted integers as ranges: 0 to 21, 32 to 51."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(f"{a} to {b}" if a < b else str(a) for a, b in parts)


@cache
def names_of(file: Path) -> set[str]:
    """Every class, function, method and module-level variable that is defined in a file."""
    names: set[str] = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names.update(target.id for target in targets if isinstance(target, ast.Name))
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
            names.update(f"{node.name}.{x.name}" for x in ast.iter_child_nodes(node) if isinstance(x, ast.FunctionDef))
    return names


def link(match: re.Match[str]) -> str:
    """`[[engine/scheduler.py:Scheduler.add]]` as a link to the file, which must define that name."""
    path, _, name = match[1].partition(":")
    file = ROOT / "nanovllm" / path
    assert file.is_file(), f"{match[0]}: there is no nanovllm/{path}"
    assert not name or name in names_of(file), f"{match[0]}: nothing of that name is in nanovllm/{path}"
    return f"[`{name or path}`](../nanovllm/{path})"


def fill(template: str, values: dict[str, object]) -> str:
    """The template with its values and links; every value must be used, and every name known."""
    used = set(re.findall(r"\{\{(\w+)\}\}", template))
    assert used == values.keys(), f"unknown: {used - values.keys()}; unused: {values.keys() - used}"
    text = re.sub(r"\{\{(\w+)\}\}", lambda match: str(values[match[1]]), template)
    return re.sub(r"\[\[([^]\s]+\.py[^]\s]*)\]\]", link, text)
