"""Training on several replicas.

The tests themselves are in `two_devices.py`. A process of its own runs them,
and each is reported here.
"""

import ast
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

FILE = Path(__file__).with_name("two_devices.py")
NAMES = [
    node.name
    for node in ast.parse(FILE.read_text()).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """By name of the test, what went wrong in each of its cases."""
    report = tmp_path_factory.mktemp("report") / "results.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    finished = subprocess.run(
        [*command, f"--junitxml={report}", str(FILE)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTEST_ADDOPTS": ""},
    )
    assert report.exists(), finished.stdout + finished.stderr
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        problems = [part.text for part in case if part.tag != "system-out"]
        name = case.get("name").split("[")[0]
        found.setdefault(name, []).extend(problems)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_on_two_devices(name, results):
    assert name in results
    assert not results[name], "\n".join(map(str, results[name]))
