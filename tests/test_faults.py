"""Whatever goes wrong: a clear error, all steps counted, no layer changed."""

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from unittest.mock import Mock

import keras
import numpy as np
import pytest
from keras import layers

import keras_fastclip
from keras_fastclip import DPSequential
from tests.zoo import cross_entropy, labels, random

N, DELTA = 64, 1e-3


def data(n=N):
    return random(n, 5), labels(n)


class Tripwire(layers.Layer):
    """Raises while a model is traced, if told to."""

    armed = False

    def call(self, x):
        if self.armed:
            raise ArithmeticError("the wire was touched")
        return x


def model(**kwargs):
    settings = {"l2_norm_clip": 0.5, "noise_multiplier": 1.0, **kwargs}
    made = DPSequential(
        [
            layers.Dense(4, "tanh"),
            Tripwire(),
            layers.Dense(3),
        ],
        **settings,
    )
    made.compile(keras.optimizers.SGD(0.1), cross_entropy())
    return made


def assert_intact(private, steps):
    """All steps are on record, and the layers are as Keras made them."""
    ledger = private._privacy.ledger(private)
    assert ledger.total_steps == int(private.optimizer.iterations) == steps
    assert sum(entry.uses for entry in ledger.entries) >= min(steps, 1)
    for layer in keras_fastclip._keras.layers_of(private):
        assert "call" not in vars(layer)
    assert all(np.all(np.isfinite(w)) for w in private.get_weights())
    x, y = data()
    private.fit(x, y, batch_size=16, steps_per_epoch=1, verbose=0)
    assert private._privacy.ledger(private).total_steps == steps + 1


# -- what comes in -----------------------------------------------------------


def stream(*batches):
    """Batches one after the other, as a generator gives them."""
    yield from batches


def good(rows=8):
    x, y = data(rows)
    return x, y


BAD = {
    "shape": (random(8, 4), labels(8)),
    "rank": (random(8, 5, 2), labels(8)),
    "dtype": (np.full((8, 5), "text"), labels(8)),
    "rows": (random(8, 5), labels(7)),
    "label": (random(8, 5), labels(8) + 99),
    "nothing": None,
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_batch_in_mid_epoch(kind):
    private = model(expected_batch_size=8)
    batches = stream(good(), good(), BAD[kind], good())
    with pytest.raises(Exception) as caught:
        private.fit(batches, num_examples=N, steps_per_epoch=4, verbose=0)
    assert not isinstance(caught.value, AttributeError), caught.value
    assert_intact(private, 2)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_examples_that_are_not_finite_leave_training_going(value):
    x, y = data()
    x[::4] = value
    private = model()
    private.fit(x, y, batch_size=N, epochs=2, verbose=0)
    assert private.nonfinite_examples() == 2 * N // 4
    assert_intact(private, 2)


# -- what is raised on the way -----------------------------------------------


class Raises(keras.callbacks.Callback):
    """Raises at one of the moments that callbacks have."""

    def __init__(self, moment, error):
        super().__init__()
        self._calls = 0

        def fail(*args, **kwargs):
            self._calls += 1
            if self._calls == 2 or not moment.startswith("on_train_batch"):
                raise error

        setattr(self, moment, fail)


# The moment, and how many steps have been made by then.
MOMENTS = {
    "on_train_begin": 0,
    "on_epoch_begin": 0,
    "on_train_batch_begin": 1,
    "on_train_batch_end": 2,
    "on_epoch_end": 4,
    "on_train_end": 4,
}


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize(
    "error, sampling",
    [(RuntimeError, "poisson"), (KeyboardInterrupt, "shuffle")],
)
def test_a_callback_that_raises(moment, error, sampling):
    private, (x, y) = model(sampling=sampling), data()
    callbacks = [Raises(moment, error("enough"))]
    with pytest.raises(error, match="enough"):
        private.fit(x, y, batch_size=16, verbose=0, callbacks=callbacks)
    assert private.privacy_spent(DELTA, "rdp") < np.inf
    assert_intact(private, MOMENTS[moment])


@pytest.mark.parametrize(
    "checked, method", [(False, "auto"), (True, "auto"), (True, "naive")]
)
def test_an_error_while_tracing_leaves_no_layer_intercepted(checked, method):
    private, (x, y) = model(method=method, expected_batch_size=8), data()
    steps = 0
    if checked:
        private.train_on_batch(x[:8], y[:8])
        private.train_function, steps = None, 1
    Tripwire.armed = True
    try:
        with pytest.raises(ArithmeticError, match="the wire was touched"):
            private.train_on_batch(x[:8], y[:8])
    finally:
        Tripwire.armed = False
    assert_intact(private, steps)


# -- two at a time -----------------------------------------------------------


def test_two_models_interleaved():
    (x, y), one, other = data(), model(), model()

    class Inner(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            other.fit(x, y, batch_size=8, steps_per_epoch=2, verbose=0)

    one.fit(x, y, batch_size=16, verbose=0, callbacks=[Inner()])
    assert_intact(one, 4)
    assert_intact(other, 8)
    rates = [
        private._privacy.ledger(private)
        .entries[0]
        .mechanism.expected_batch_size
        for private in (one, other)
    ]
    assert rates == [16, 8]


def in_threads(*functions):
    """Runs functions at the same time; returns what they raised."""
    errors = []

    def run(function):
        try:
            function()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=[f]) for f in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def test_two_models_in_two_threads():
    (x, y), private = data(), [model(), model()]
    options = {"batch_size": 16, "epochs": 2, "verbose": 0}
    errors = in_threads(*(lambda m=m: m.fit(x, y, **options) for m in private))
    assert not errors
    for one in private:
        assert_intact(one, 8)


def test_one_model_in_two_threads_is_refused():
    (x, y), private, errors = data(), model(expected_batch_size=8), []

    class Meanwhile(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:
                errors.extend(
                    in_threads(
                        lambda: private.train_on_batch(x[:8], y[:8]),
                        lambda: private.fit(x, y, batch_size=8, verbose=0),
                    )
                )

    private.fit(x, y, batch_size=16, verbose=0, callbacks=[Meanwhile()])
    assert len(errors) == 2
    assert all("in another thread" in str(error) for error in errors)
    assert private.privacy_spent(DELTA, "rdp") < np.inf
    assert_intact(private, 4)


# -- files -------------------------------------------------------------------


@contextlib.contextmanager
def full_disk(size):
    """Files cannot grow beyond so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_while_saving(tmp_path):
    private, (x, y) = model(), data()
    private.fit(x, y, batch_size=16, verbose=0)
    with full_disk(1000), pytest.raises(OSError):
        private.save(tmp_path / "model.keras")
    assert_intact(private, 4)
    private.save(tmp_path / "model.keras", overwrite=True)


@pytest.mark.parametrize("size", [0, 1000])
def test_a_full_disk_while_saving_weights(size, tmp_path):
    """An error, and the file of before; HDF5 by itself ends the process."""
    private, (x, y) = model(), data()
    private.fit(x, y, batch_size=16, verbose=0)
    path = tmp_path / "model.weights.h5"
    private.save_weights(path)
    before = path.read_bytes()
    private.fit(x, y, batch_size=16, verbose=0)
    with full_disk(size), pytest.raises(OSError, match="File too large"):
        private.save_weights(path)
    assert_intact(private, 8)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == [path.name]
    again = model()
    again.build((None, 5))
    again.load_weights(path)
    assert_intact(again, 4)


def test_a_full_disk_while_saving_shards(tmp_path, monkeypatch):
    private, (x, y) = model(), data()
    private.fit(x, y, batch_size=16, verbose=0)
    path = tmp_path / "model.weights.json"
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: Mock(free=2**20))
        with pytest.raises(OSError, match="No space left on device: 1,048,576"):
            private.save_weights(path, max_shard_size=1)
    assert os.listdir(tmp_path) == []
    private.save_weights(path, max_shard_size=1)
    assert_intact(private, 4)


FULL = """
import sys
import keras
import keras_fastclip
from tests.test_faults import data, full_disk, model

class Fill(keras.callbacks.Callback):
    limit = full_disk(1000)

    def on_train_batch_end(self, batch, logs=None):
        if batch == 2:
            self.limit.__enter__()

private, (x, y) = model(), data()
backup = keras_fastclip.BackupAndRestore(sys.argv[1], save_freq=1)
private.fit(x, y, batch_size=16, verbose=0, callbacks=[Fill(), backup])
"""


def test_a_full_disk_leaves_the_backup_of_before(tmp_path):
    """In a process of its own, which ends in an error and not in a crash."""
    assert started(FULL, tmp_path).wait() == 1
    (private, (x, y)), before = (model(), data()), []

    class Note(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            before.append(private._privacy.ledger(private).total_steps)

    private.build((None, 5))
    backup = keras_fastclip.BackupAndRestore(str(tmp_path), save_freq=1)
    private.fit(x, y, batch_size=16, verbose=0, callbacks=[backup, Note()])
    assert before == [2]  # The two steps that were backed up.
    assert_intact(private, int(private.optimizer.iterations))


# -- processes ---------------------------------------------------------------

INTERRUPTED = """
import signal
from tests.test_faults import data, model
import keras

# Background jobs of a shell inherit that it is ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)

class Tell(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 3:
            print("running", flush=True)

private, (x, y) = model(), data()
try:
    private.fit(
        x, y, batch_size=16, steps_per_epoch=10**6, verbose=0,
        callbacks=[Tell()],
    )
except KeyboardInterrupt:
    ledger = private._privacy.ledger(private)
    print(ledger.total_steps >= int(private.optimizer.iterations) > 3)
    print(len(ledger.entries) == 1)
"""

FORKED = """
import os
import keras_fastclip
from tests.test_faults import data, model

read, write = os.pipe()
child = os.fork() == 0
private, (x, y) = model(), data()
private.fit(x, y, batch_size=16, verbose=0)
text = repr([w.tolist() for w in private.get_weights()])
steps = private._privacy.ledger(private).total_steps
if child:
    os.write(write, str(steps).encode() + b" " + str(hash(text)).encode())
    os._exit(0)
os.wait()
found = os.read(read, 1000).decode().split()
print(found[0] == str(steps) == "4")
print(found[1] != str(hash(text)))
"""

FORKED_LATER = """
import os
import keras_fastclip
from tests.test_faults import data, model

def secrets(privacy):
    batches = int(privacy.sampling_rng.integers(0, 2**60))
    return [privacy._run, privacy.noise._secret.numpy().tolist(), batches]

read, write = os.pipe()
private = model()
privacy = private._privacy
before = [privacy._run, privacy.noise._secret.numpy().tolist()]
if not os.fork():
    os.write(write, repr(secrets(privacy)).encode())
    os._exit(0)
os.wait()
found, mine = eval(os.read(read, 1000)), secrets(privacy)
print(mine[:2] == before)
print(all(a != b for a, b in zip(found, mine)))
"""


def started(code, *arguments):
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=root,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": root},
        stdout=subprocess.PIPE,
        text=True,
    )


def test_an_interrupt_from_the_keyboard():
    process = started(INTERRUPTED)
    assert process.stdout.readline() == "running\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate()[0].split() == ["True", "True"]


def test_a_process_forked_after_the_import():
    """Both train, with noise of their own."""
    assert started(FORKED).communicate()[0].split() == ["True", "True"]


def test_a_process_forked_when_there_is_a_model():
    """It draws neither the noise nor the batches of the first one."""
    found = started(FORKED_LATER).communicate(timeout=300)[0]
    assert found.split() == ["True", "True"]
