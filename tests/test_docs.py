"""The code in docs/ runs, prints what the pages say, and is complete."""

import pathlib
import re

import pytest

import keras_fastclip
from keras_fastclip.registry import lookup
from tests import pages

DOCS = pathlib.Path(__file__).parents[1] / "docs"
WRITTEN = sorted(set(DOCS.glob("*.md")) - {DOCS / "api.md"})

pytestmark = pytest.mark.filterwarnings("ignore:No rule is registered")


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: path.stem)
def test_code_does_what_the_page_says(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(lookup._default, "_rules", dict(lookup._default._rules))
    namespace = pages.names()
    for line, code, outcome in pages.blocks(path):
        namespace.pop("error", None)
        found = pages.outcome_of(code, f"{path.name}:{line}", namespace)
        where = f"{path.name}, line {line}:\n{found}"
        if outcome is not None:
            assert pages.agree(outcome, found), where
        else:
            assert "error" not in namespace, where


def test_outcomes_are_compared():
    assert pages.agree("a\nb\n", "a b")
    assert pages.agree("Error: ... was 3.\n", "Error: x\n was 3.\n")
    assert not pages.agree("Error: ... was 3.\n", "Error: x\n was 4.\n")
    assert not pages.agree("a", "a b")
    error = pages.outcome_of("print(1)\n{}['k']", "here", {})
    assert error == "1\nKeyError: 'k'\n"


def test_links_lead_somewhere():
    for path in [*WRITTEN, DOCS.parent / "README.md"]:
        text = path.read_text(encoding="utf-8")
        for link in re.findall(r"\]\(([^)#:]+)[)#]", text):
            assert (path.parent / link).exists(), (path.name, link)


def test_every_public_name_is_in_the_reference():
    text = (DOCS / "api.md").read_text(encoding="utf-8")
    for name in keras_fastclip.__all__:
        assert f"\n## {name}\n" in text, name


def test_reference_is_that_of_the_code():
    from docs import make_api

    assert (DOCS / "api.md").read_text(encoding="utf-8") == make_api.page(), (
        "Run `make docs`."
    )
