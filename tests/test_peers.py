"""Peers are measured within limits, and their tables say what was not."""

import sys

import pytest

from benchmarks.peers import __main__ as peer

FAST = {"sec_per_step": 0.5, "peak_rss_mb": 100}
SLOW = {"sec_per_step": 2.0, "peak_rss_mb": 150}


def test_rows_are_relative_to_plain_training():
    found = {"nondp": FAST, "hooks": SLOW, "ghost": {"error": "over 9 s"}}
    rows = peer.compare(
        ["rec"], ["hooks", "ghost"], lambda _, mode: found[mode]
    )
    assert list(rows) == [
        ("rec", "nondp", "500.0", "1.000", "1.00", ""),
        ("rec", "hooks", "2000.0", "0.250", "1.50", ""),
        ("rec", "ghost", "", "", "", "over 9 s"),
    ]


def test_nothing_is_begun_after_the_last_minute():
    def run(workload, mode):
        raise AssertionError

    rows = peer.compare(["rec", "lstm"], ["hooks"], run, minutes=0)
    assert [cells[-1] for cells in rows] == ["left out after 0 min"] * 4


@pytest.mark.parametrize(
    "program, error",
    [
        ("import time; time.sleep(60)", "over 3 s"),
        ("raise ValueError('no such mode')", "ValueError: no such mode"),
        ("raise MemoryError", "out of memory"),
        (
            "import os, sys; print('std::bad_alloc', file=sys.stderr, "
            "flush=True); os.abort()",
            "out of memory",
        ),
        ("import os; os.kill(os.getpid(), 9)", "killed, for want of memory?"),
        ("pass", "no output"),
    ],
)
def test_a_run_without_a_result_says_why(program, error):
    assert peer.measure([sys.executable, "-c", program], 3) == {"error": error}


def test_the_last_line_of_json_is_the_result():
    program = "print('hello'); print('{\"sec_per_step\": 1}')"
    found = peer.measure([sys.executable, "-c", program], 9)
    assert found == {"sec_per_step": 1}
