"""Training on several replicas and workers.

The tests themselves are in `two_devices.py` and `two_workers.py`. Processes of
their own run them, since TensorFlow divides a processor into devices, and finds
the other workers, before all else.
"""

import pathlib
import subprocess
import sys
import time

from tests import processes

PYTEST = [
    "-m",
    "pytest",
    "-q",
    "-x",
    "-p",
    "no:cacheprovider",
    "-p",
    "no:xdist",
]
FOLDER = pathlib.Path(__file__).parent


def test_on_two_devices():
    command = [sys.executable, *PYTEST, str(FOLDER / "two_devices.py")]
    finished = subprocess.run(command, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stdout + finished.stderr


def test_on_two_workers(tmp_path, monkeypatch):
    monkeypatch.setenv("SHARED_FOLDER", str(tmp_path))
    command = [*PYTEST, str(FOLDER / "two_workers.py")]
    with processes.started(command, tmp_path) as both:
        codes = processes.wait(both)
        if any(codes):
            time.sleep(5)  # The other one may fail too, and say why.
    assert codes == [0, 0], processes.output(tmp_path)


def test_a_run_that_loses_workers_resumes_with_a_right_ledger(tmp_path):
    def told(worker):
        """Steps by weights and by record, and whether a run began there."""
        path = tmp_path / f"progress_{worker}"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [tuple(map(int, line.split())) for line in lines]

    command = ["-m", "tests.lost_worker", str(tmp_path)]
    for victim in (1, 0):
        with processes.started(command, tmp_path) as both:
            before = len(told(0))
            codes = processes.wait(both, lambda n=before: len(told(0)) > n + 5)
            assert codes == [None, None], processes.output(tmp_path)
            both[victim].kill()
            # The other one neither waits for ever nor goes on by itself.
            assert both[1 - victim].wait() != 0
    with processes.started(command, tmp_path) as both:
        codes = processes.wait(both)
    assert codes == [0, 0], processes.output(tmp_path)
    begins = []
    for worker in (0, 1):
        steps = told(worker)
        assert all(made == recorded for made, recorded, _ in steps)
        assert steps[-1][0] == 60
        begins.append([made for made, _, begin in steps if begin])
    assert begins[0] == begins[1]
    first, second, third = begins[0]
    assert first == 0 and second >= 4 and third >= second + 4
    assert not (tmp_path / "backup").exists()  # as Keras has it
