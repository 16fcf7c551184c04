"""Private training by other libraries, on the same seven models.

    python -m benchmarks.peers opacus
    python -m benchmarks.peers jax_privacy --workload gpt,bert
    python -m benchmarks.peers tf_privacy --modes fgc-full

Each library gets a virtual environment of its own, `.venv-NAME`, since none
can share one with TensorFlow 2.16 and later. Every measurement is a process of
its own; speeds are relative to plain training by the same framework.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import rich.box
import rich.console
import rich.table

from benchmarks import machine
from benchmarks.workloads import WORKLOADS

HERE = pathlib.Path(__file__).parent
PLAIN = "nondp"


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


def measure(command, timeout):
    """The line of JSON that a runner prints, or one with an error."""
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    try:
        run = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=timeout,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"over {timeout} s"}
    lines = [line for line in run.stdout.splitlines() if line.startswith("{")]
    if lines:
        return json.loads(lines[-1])
    return {"error": (run.stderr.strip().splitlines() or ["no output"])[-1]}


def row(mode, found, plain):
    """Cells of the table."""
    if "error" in found:
        return mode, "", "", "", found["error"][:40]
    speed = memory = ""
    if "error" not in plain:
        speed = f"{plain['sec_per_step'] / found['sec_per_step']:.3f}"
        memory = f"{found['peak_rss_mb'] / plain['peak_rss_mb']:.2f}"
    return mode, f"{1e3 * found['sec_per_step']:.1f}", speed, memory, ""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("--workload", default=",".join(WORKLOADS))
    parser.add_argument("--modes", help="of its runner; by default the best")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--timeout", type=int, default=300)
    arguments = parser.parse_args()
    console = rich.console.Console(width=80)
    modes = PEERS[arguments.peer].modes
    if arguments.modes:
        modes = arguments.modes.split(",")
    python = interpreter(arguments.peer, console.print)
    console.print(machine.description(), highlight=False)
    for name in arguments.workload.split(","):
        table = rich.table.Table(
            title=f"{arguments.peer}: {name}", box=rich.box.SIMPLE_HEAD
        )
        for column in ("mode", "ms a step", "speed", "memory", ""):
            table.add_column(column)
        plain = None
        for mode in (PLAIN, *modes):
            command = [python, HERE / f"run_{arguments.peer}.py"]
            command += ["--workload", name, "--mode", mode]
            command += ["--steps", str(arguments.steps)]
            command += ["--warmup", str(arguments.warmup)]
            found = measure(command, arguments.timeout)
            plain = plain or found
            table.add_row(*row(mode, found, plain))
        console.print(table)


if __name__ == "__main__":
    main()
