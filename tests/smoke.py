"""What must work in an environment that has the package and nothing else.

`make wheel-test` runs it from another folder, where only what is installed can
be imported.
"""

import importlib.resources
import math
import os
import tempfile

import keras
import numpy as np

import keras_fastclip


def main() -> None:
    files = importlib.resources.files("keras_fastclip")
    assert (files / "py.typed").is_file()
    model = keras_fastclip.DPSequential(
        [
            keras.layers.Reshape((8, 1)),
            keras.layers.Conv1D(4, 3, activation="relu"),
            keras.layers.LSTM(4),
            keras.layers.Dense(3),
        ],
        l2_norm_clip=1.0,
        noise_multiplier=1.0,
        strict=True,
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(64, 8)), rng.integers(0, 3, 64)
    tracker = keras_fastclip.EpsilonTracker(1e-3)
    history = model.fit(x, y, batch_size=16, verbose=0, callbacks=[tracker])
    assert 0 < model.privacy_spent(1e-3) < math.inf
    report = keras_fastclip.check_gradients(model, x[:4], y[:4])
    assert report.relative_error < 1e-4, report
    with tempfile.TemporaryDirectory() as folder:
        page = os.path.join(folder, "report.html")
        keras_fastclip.privacy_report(model, history, page)
        path = os.path.join(folder, "model.keras")
        model.save(path)
        loaded = keras.models.load_model(path)
    assert loaded.privacy_spent(1e-3) == model.privacy_spent(1e-3)
    print(f"keras-fastclip {keras_fastclip.__version__} works.")


if __name__ == "__main__":
    main()
