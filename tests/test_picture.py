"""The picture of the README is that of the table beside it."""

import pathlib
import re

import pytest

from benchmarks import picture

ROOT = pathlib.Path(__file__).parents[1]
SPEED = ROOT / "benchmarks" / "results" / "speed.txt"
ELSEWHERE = SPEED.with_stem("speed_xeon")


def test_every_row_is_read():
    text = SPEED.read_text(encoding="utf-8")
    found = picture.read(text)
    assert len(found) == text.count(", batch ") == 7
    assert all(rows["nonprivate"] == (1.0, 1.0) for rows in found.values())
    rows = sum(len(rows) for rows in found.values())
    assert rows == len(re.findall(r"^ +\S+ +\d+\.\d ", text, re.MULTILINE))


def test_the_readme_has_the_figures_of_the_tables():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = re.findall(
        r"batch (\d+)" + r" \| (\d\.\d\d)" * 4 + r" \|$", readme, re.MULTILINE
    )
    here, elsewhere = (
        picture.read(path.read_text(encoding="utf-8"))
        for path in (SPEED, ELSEWHERE)
    )
    assert shown == [
        (
            name.split()[-1],
            *(f"{v:.2f}" for v in here[name]["auto"] + elsewhere[name]["auto"]),
        )
        for name in here
    ]


def test_the_picture_is_that_of_the_table(tmp_path):
    path = tmp_path / "speed.svg"
    picture.draw(picture.read(SPEED.read_text(encoding="utf-8")), str(path))
    drawn, shown = (
        re.findall(r"<text[^>]*>(.*?)</text>", file.read_text("utf-8"))
        for file in (path, SPEED.with_suffix(".svg"))
    )
    assert drawn == shown, (
        "Run python -m benchmarks.picture benchmarks/results/speed.txt "
        "benchmarks/results/speed.svg"
    )
    for words in ("Speed", "Peak memory", "plain training", "private, auto"):
        assert any(words in text for text in drawn)


def test_several_methods_are_drawn(tmp_path):
    rows = {"nonprivate": (1.0, 1.0), "auto": (0.8, 1.2), "bk": (0.7, 1.1)}
    some = {mode: rows[mode] for mode in ("nonprivate", "bk")}
    path = tmp_path / "methods.svg"
    picture.draw({"mlp, batch 8": rows, "cnn, batch 8": some}, str(path))
    assert path.read_text("utf-8").count(">0.70<") == 2


def test_a_table_without_plain_training_is_refused():
    with pytest.raises(ValueError, match="mlp, batch 8"):
        picture.read("  mlp, batch 8  \n  auto  1.0  0.72  20  993  1.23\n")
    with pytest.raises(ValueError):
        picture.read("nothing")
