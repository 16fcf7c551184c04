"""Processes for tests: workers that talk over the loopback device, and others.

All are forked from one that has imported TensorFlow and done nothing with it,
since an import takes longer than most tests.
"""

import contextlib
import json
import os
import pathlib
import random
import socket
import time
from collections.abc import Callable
from multiprocessing import Process
from unittest import mock

import pytest
import tensorflow as tf
from tensorflow.python.distribute import collective_all_reduce_strategy
from tensorflow.python.eager import context

from benchmarks.processes import forking

# Linux takes ports for outgoing connections from 32768 on.
PORTS = range(20000, 32000)
ROOT = pathlib.Path(__file__).parents[1]

PYTEST = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist"]


def strategy(heartbeat=3600):
    """The strategy of a worker; of one that rests a while, too.

    On a busy machine a process may have to, and is not lost then.

    Args:
        heartbeat: seconds without a sign of life after which a worker is lost.
    """
    context.context().configure_coordination_service(
        service_type="standalone",
        service_leader="/job:worker/replica:0/task:0",
        heartbeat_timeout_in_ms=1000 * heartbeat,
    )
    return tf.distribute.MultiWorkerMirroredStrategy()


def strategy_of_pairs():
    """A second strategy of a worker, with two of its devices.

    TensorFlow takes several devices of each worker only if they are
    accelerators, and goes about it in no other way.
    """

    def devices(self, cluster_resolver, worker_device):
        pair = [f"{worker_device}/device:CPU:{i}" for i in range(2)]
        return tuple(pair), "CPU"

    extended = collective_all_reduce_strategy.CollectiveAllReduceExtended
    strategy = tf.distribute.MultiWorkerMirroredStrategy
    with (
        mock.patch.object(extended, "_initialize_local_devices", devices),
        # What the first strategy has done.
        mock.patch.object(extended, "_std_server_started", True, create=True),
        mock.patch.object(extended, "_enable_check_health", False),
        mock.patch.object(strategy, "_collective_key_base", 10**6),
    ):
        return strategy()


def run_tests(file: str, **variables: str) -> None:
    """Runs the tests of a file of this folder; ends the process.

    Args:
        file: its name.
        **variables: of the environment.
    """
    os.environ.update(variables)
    raise SystemExit(pytest.main([*PYTEST, str(ROOT / "tests" / file)]))


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
def started(function: Callable, folder: pathlib.Path, workers: int = 2):
    """Workers that call a function; with 0 workers a process that is none.

    Each writes to a file in the folder. At the end those that still run are
    killed.
    """
    configs = [None]
    if workers:
        hosts = [f"127.0.0.1:{port}" for port in free_ports(workers)]
        cluster = {"worker": hosts}
        configs = [
            {"cluster": cluster, "task": {"type": "worker", "index": index}}
            for index in range(workers)
        ]
    processes = [
        forking().Process(
            target=_call,
            args=(function, config, folder / f"output_{index}"),
        )
        for index, config in enumerate(configs)
    ]
    for process in processes:
        process.start()
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.join()


def _call(function, config, output):
    with open(output, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(ROOT)
    if config:
        os.environ["TF_CONFIG"] = json.dumps(config)
    function()


def wait(
    processes: list[Process], until: Callable = lambda: False
) -> list[int | None]:
    """Waits until all have ended, one of them badly, or something holds.

    Returns:
        Their exit codes, None for those that run.
    """
    while True:
        codes = [process.exitcode for process in processes]
        if until() or None not in codes or any(codes):
            return codes
        time.sleep(0.05)


def output(folder: pathlib.Path) -> str:
    """All that the processes have written."""
    files = sorted(folder.glob("output_*"))
    return "\n".join(file.read_text(errors="replace") for file in files)
