"""Workers on this machine: processes that talk over the loopback device."""

import contextlib
import json
import os
import pathlib
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable

# Linux takes ports for outgoing connections from 32768 on.
PORTS = range(20000, 32000)
ROOT = pathlib.Path(__file__).parents[1]


def strategy():
    """The strategy of a worker; of one that rests a while, too.

    On a busy machine a process may have to, and is not lost then.
    """
    import tensorflow as tf
    from tensorflow.python.eager import context

    context.context().configure_coordination_service(
        service_type="standalone",
        service_leader="/job:worker/replica:0/task:0",
        heartbeat_timeout_in_ms=3_600_000,
    )
    return tf.distribute.MultiWorkerMirroredStrategy()


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on."""
    found = []
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        with socket.socket() as trial:
            try:
                trial.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found
    raise OSError("No free ports.")


@contextlib.contextmanager
def started(command: list[str], folder: pathlib.Path, count: int = 2):
    """Workers, each of which writes to a file in the folder.

    At the end those that still run are killed.
    """
    hosts = [f"127.0.0.1:{port}" for port in free_ports(count)]
    workers = []
    for index in range(count):
        task = {"type": "worker", "index": index}
        config = {"cluster": {"worker": hosts}, "task": task}
        with open(folder / f"output_{index}", "w") as output:
            process = subprocess.Popen(
                [sys.executable, *command],
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env={
                    **os.environ,
                    "TF_CONFIG": json.dumps(config),
                    "TF_CPP_MIN_LOG_LEVEL": "3",
                },
            )
        workers.append(process)
    try:
        yield workers
    finally:
        for process in workers:
            process.kill()
            process.wait()


def wait(
    processes: list[subprocess.Popen], until: Callable = lambda: False
) -> list[int | None]:
    """Waits until all have ended, one of them badly, or something holds.

    Returns:
        Their exit codes, None for those that run.
    """
    while True:
        codes = [process.poll() for process in processes]
        if until() or None not in codes or any(codes):
            return codes
        time.sleep(0.05)


def output(folder: pathlib.Path) -> str:
    """All that the workers have written."""
    files = sorted(folder.glob("output_*"))
    return "\n".join(file.read_text(errors="replace") for file in files)
