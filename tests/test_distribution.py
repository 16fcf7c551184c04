"""Training on several replicas and workers.

The tests themselves are in `two_devices.py` and `two_workers.py`. Processes of
their own run them, since TensorFlow divides a processor into devices, and finds
the other workers, before all else.
"""

import functools
import time

from tests import lost_worker, processes


def test_on_two_devices(tmp_path):
    tests = functools.partial(processes.run_tests, "two_devices.py")
    with processes.started(tests, tmp_path, workers=0) as alone:
        codes = processes.wait(alone)
    assert codes == [0], processes.output(tmp_path)


def test_on_two_workers(tmp_path):
    tests = functools.partial(
        processes.run_tests, "two_workers.py", SHARED_FOLDER=str(tmp_path)
    )
    with processes.started(tests, tmp_path) as both:
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

    main = functools.partial(lost_worker.main, tmp_path)
    for victim in (1, 0):
        with processes.started(main, tmp_path) as both:
            before = len(told(0))
            codes = processes.wait(both, lambda n=before: len(told(0)) > n + 5)
            assert codes == [None, None], processes.output(tmp_path)
            both[victim].kill()
            # The other one neither waits for ever nor goes on by itself.
            both[1 - victim].join(120)
            assert both[1 - victim].exitcode, processes.output(tmp_path)
    with processes.started(main, tmp_path) as both:
        codes = processes.wait(both)
    assert codes == [0, 0], processes.output(tmp_path)
    begins = []
    for worker in (0, 1):
        steps = told(worker)
        assert all(made == recorded for made, recorded, _ in steps)
        assert steps[-1][0] == lost_worker.STEPS
        begins.append([made for made, _, begin in steps if begin])
    assert begins[0] == begins[1]
    first, second, third = begins[0]
    assert first == 0 and second >= 4 and third >= second + 4
    assert not (tmp_path / "backup").exists()  # as Keras has it
