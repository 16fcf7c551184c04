"""Private training by other libraries, on the same seven models.

    python -m benchmarks.peers opacus --out opacus.txt
    python -m benchmarks.peers jax_privacy --workload gpt,bert
    python -m benchmarks.peers tf_privacy --modes fgc-full --seconds 30

Each library gets a virtual environment of its own, `.venv-NAME`, since none
can share one with TensorFlow 2.16 and later. Every measurement is a process of
its own, which is ended after `--seconds`, 60 by default; `--minutes` ends the
whole comparison. Speeds are relative to plain training by the same framework.
"""

import argparse
import dataclasses
import json
import math
import os
import pathlib
import signal
import subprocess
import sys
import time

import rich.box
import rich.console
import rich.table

from benchmarks import machine
from benchmarks.workloads import WORKLOADS

HERE = pathlib.Path(__file__).parent
PLAIN = "nondp"
# Words by which the frameworks say so.
NO_MEMORY = ("alloc", "Alloc", "MemoryError", "OOM", "ResourceExhausted")


@dataclasses.dataclass(frozen=True)
class Peer:
    """What a library needs, and which of its ways are worth comparing."""

    requirements: tuple[str, ...]
    modes: tuple[str, ...]


PEERS = {
    "opacus": Peer(("torch==2.13.0", "opacus==1.6.*"), ("hooks", "ghost")),
    "jax_privacy": Peer(("jax-privacy==2.*",), ("dp-micro",)),
    "tf_privacy": Peer(
        (
            "tensorflow==2.15.*",
            "tensorflow-privacy==0.9.*",
            "tensorflow-probability==0.22.*",
            "setuptools<80",
        ),
        ("vectorized", "fgc-full"),
    ),
}


def interpreter(name, report):
    """Python of the environment of a library, which is made if need be."""
    folder = pathlib.Path(f".venv-{name}")
    python = folder / "bin" / "python"
    done = folder / ".installed"
    if not done.exists():
        report(f"installing {name} into {folder}")
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        install = [python, "-m", "pip", "install", "--quiet"]
        subprocess.run([*install, *PEERS[name].requirements], check=True)
        done.touch()
    return python


def measure(command, seconds):
    """The line of JSON that a runner prints, or one with an error."""
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    try:
        run = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=seconds,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"over {seconds} s"}
    lines = [line for line in run.stdout.splitlines() if line.startswith("{")]
    last = (run.stderr.strip().splitlines() or ["no output"])[-1]
    found = json.loads(lines[-1]) if lines else {"error": last}
    if any(words in found.get("error", "") for words in NO_MEMORY):
        found["error"] = "out of memory"
    elif not lines and run.returncode == -signal.SIGKILL:
        found["error"] = "killed, for want of memory?"
    return found


def row(workload, mode, found, plain):
    """Cells of the table."""
    if "error" in found:
        return workload, mode, "", "", "", found["error"][:28]
    speed = memory = ""
    if "error" not in plain:
        speed = f"{plain['sec_per_step'] / found['sec_per_step']:.3f}"
        memory = f"{found['peak_rss_mb'] / plain['peak_rss_mb']:.2f}"
    milliseconds = f"{1e3 * found['sec_per_step']:.1f}"
    return workload, mode, milliseconds, speed, memory, ""


def compare(workloads, modes, run, minutes=math.inf):
    """Rows of the table, as they come.

    Args:
        workloads: their names.
        modes: of the runner, beside plain training.
        run: measures a workload in a mode.
        minutes: after these, no further measurement is begun.
    """
    end = time.monotonic() + 60 * minutes
    for workload in workloads:
        plain = None
        for mode in (PLAIN, *modes):
            found = {"error": f"left out after {minutes:g} min"}
            if time.monotonic() < end:
                found = run(workload, mode)
            plain = plain or found
            yield row(workload, mode, found, plain)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("--workload", default=",".join(WORKLOADS))
    parser.add_argument("--modes", help="of its runner; by default the best")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--out", metavar="FILE")
    arguments = parser.parse_args()
    workloads = arguments.workload.split(",")
    unknown = sorted(set(workloads) - set(WORKLOADS))
    if unknown:
        parser.error(f"unknown workloads: {', '.join(unknown)}")
    modes = PEERS[arguments.peer].modes
    if arguments.modes:
        modes = arguments.modes.split(",")
    console = rich.console.Console(width=80)
    python = interpreter(arguments.peer, console.print)
    versions = set()

    def run(workload, mode):
        command = [python, HERE / f"run_{arguments.peer}.py"]
        command += ["--workload", workload, "--mode", mode]
        command += ["--steps", str(arguments.steps)]
        command += ["--warmup", str(arguments.warmup)]
        found = measure(command, arguments.seconds)
        if "version" in found:
            versions.add(f"{found['peer']} {found['version']}")
        return found

    def show(console, rows):
        table = rich.table.Table(box=rich.box.SIMPLE_HEAD)
        for column in ("workload", "mode", "ms a step", "speed", "memory", ""):
            table.add_column(column)
        for cells in rows:
            table.add_row(*cells, end_section=cells[1] == modes[-1])
        console.print(*sorted(versions), sep=", ", highlight=False)
        console.print(machine.processor(), highlight=False)
        console.print(table)

    rows = []
    for cells in compare(workloads, modes, run, arguments.minutes):
        rows.append(cells)
        console.print(*filter(None, cells), highlight=False)
        if arguments.out:  # What there is, if the rest is interrupted.
            with open(arguments.out, "w", encoding="utf-8") as file:
                show(rich.console.Console(width=80, file=file), rows)
    show(console, rows)


if __name__ == "__main__":
    main()
