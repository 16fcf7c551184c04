"""Runs the code of a page of Markdown.

All blocks of Python run in order, in one namespace. A block of text that
follows one is what it prints, or the error with which it ends; "..." stands
for anything.
"""

import contextlib
import io
import pathlib
import re
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

import keras_fastclip

BLOCK = re.compile(
    r"^```python\n(?P<code>.*?)^```\n(\n```text\n(?P<outcome>.*?)^```\n)?",
    re.DOTALL | re.MULTILINE,
)


class Block(NamedTuple):
    line: int
    section: str
    code: str
    outcome: str | None


def blocks(path: pathlib.Path) -> list[Block]:
    text = path.read_text(encoding="utf-8")
    found = [
        Block(
            text.count("\n", 0, match.start()) + 2,
            re.findall(r"^#+ (.+)$", text[: match.start()], re.MULTILINE)[-1],
            match["code"],
            match["outcome"],
        )
        for match in BLOCK.finditer(text)
    ]
    assert len(found) == text.count("```python")  # None is overlooked.
    return found


def names() -> dict[str, Any]:
    """What the pages take for granted."""
    rng = np.random.default_rng(0)
    return {
        "__name__": "page",
        "keras": keras,
        "keras_fastclip": keras_fastclip,
        "np": np,
        "tf": tf,
        "x": rng.normal(size=(512, 8)).astype("float32"),
        "y": rng.integers(0, 10, 512),
    }


def outcome_of(code: str, where: str, namespace: dict[str, Any]) -> str:
    """What a block prints, with the error that ends it."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            exec(compile(code, where, "exec"), namespace)
        except Exception as error:
            print(f"{type(error).__name__}: {error}")
            # Without a traceback that holds a model's variables.
            namespace["error"] = error.with_traceback(None)
    return printed.getvalue()


def agree(expected: str, found: str) -> bool:
    """Whether they are the same but for the breaks of lines."""
    pattern = ".*".join(
        re.escape(" ".join(part.split())) for part in expected.split("...")
    )
    pattern = pattern.replace(r"\ .*", ".*").replace(r".*\ ", ".*")
    return bool(re.fullmatch(pattern, " ".join(found.split()), re.DOTALL))
