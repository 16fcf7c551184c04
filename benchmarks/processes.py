"""Runs functions in processes of their own, to measure their peak memory."""

import concurrent.futures
import multiprocessing.context
import resource
from collections.abc import Callable
from typing import Any


def measured(function: Callable, *arguments) -> tuple[Any, float]:
    """What a function returns, and the megabytes that it took at its peak.

    The process is new but has its libraries loaded, so what is measured is
    the function's own. Function and arguments must be importable.
    """
    with concurrent.futures.ProcessPoolExecutor(
        1, mp_context=forking()
    ) as executor:
        return executor.submit(_run, function, arguments).result()


def forking() -> multiprocessing.context.BaseContext:
    """Forks processes from one that has loaded the libraries, no more."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["keras_fastclip", "benchmarks.workloads"])
    return context


def _run(function, arguments):
    before = peak()
    result = function(*arguments)
    return result, peak() - before


def peak() -> float:
    """The most memory that this process has held, in megabytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
