"""Training on several replicas.

The tests themselves are in `two_devices.py`. A process of its own runs them,
since TensorFlow divides a processor into devices before all else.
"""

import pathlib
import subprocess
import sys

FILE = pathlib.Path(__file__).with_name("two_devices.py")


def test_on_two_devices():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    finished = subprocess.run(
        [*command, "-p", "no:xdist", str(FILE)], capture_output=True, text=True
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
