"""The printed overview of a model's layers."""

import keras
import numpy as np
import pytest
from keras import layers

import keras_fastclip
from tests.zoo import Quadratic, Scale

pytestmark = pytest.mark.filterwarnings("ignore:No rule is registered")


def model(**settings):
    ids = keras.Input((5,), dtype="int32", name="ids")
    x = layers.Embedding(20, 6, name="table")(ids)
    twice = layers.Dense(6, name="twice")
    x = Scale(name="scale")(twice(twice(x)))
    x = layers.LSTM(30, name="lstm")(x)
    x = Quadratic(name="quadratic")(x)
    x = layers.Reshape((2, 2, 1))(x)
    x = layers.Flatten()(layers.Conv2D(2, 2, padding="same", name="conv")(x))
    frozen = layers.Dense(3, name="frozen", trainable=False)
    made = keras_fastclip.DPModel(
        ids,
        layers.Dense(2, name="head")(frozen(x)),
        l2_norm_clip=1.0,
        noise_multiplier=1.0,
        **settings,
    )
    made.compile(
        "sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    rng = np.random.default_rng(0)
    return made, rng.integers(0, 20, (8, 5)), rng.integers(0, 2, 8)


def rows_of(made, *data):
    printed = []
    keras_fastclip.clipping_summary(made, *data, print_fn=printed.append)
    (text,) = printed
    names = [layer.name for layer in made.layers]
    lines = [line.split() for line in text.splitlines()]
    return text, {
        line[0]: line[1:] for line in lines if line[:1] and line[0] in names
    }


def test_one_line_for_each_layer_with_weights():
    text, rows = rows_of(*model())
    expected = {
        "table": "Embedding closed form ghost 5 20 6 120 1",
        "twice": "Dense closed form keep:batched 5 6 6 42 2 5 kB",
        "scale": "Scale own own 6 1",
        "lstm": "LSTM closed form ghost:batched 5 36 120 4,440 1 194 kB",
        "quadratic": "Quadratic fallback keep 244 1 30 kB",
        "conv": "Conv2D closed form keep:blocks 4 4 2 10 1 2 kB",
        "head": "Dense closed form ghost:batched 1 3 2 8 1",
    }
    timed = {"twice", "lstm", "conv", "head"}
    for name, row in rows.items():
        if name in timed:
            assert row.pop() == "ms" and 0 < float(row.pop()) < 1
        assert " ".join(row) == expected.pop(name)
    assert not expected
    assert "method 'auto'" in text and "4,870 trained weights" in text
    assert "batches of 32" in text
    assert max(map(len, text.splitlines())) <= 120


def test_norms_follow_the_method():
    _, rows = rows_of(*model(method="bk"))
    assert "ghost" in rows["twice"] and "keep" in rows["quadratic"]
    _, rows = rows_of(*model(method="opacus"))
    assert "keep" in rows["twice"] and "ghost" in rows["table"]
    _, rows = rows_of(*model(method="naive"))
    assert all("loop" in row for row in rows.values())


def test_a_model_that_was_trained_needs_no_examples(capsys):
    made, x, y = model()
    with pytest.raises(ValueError, match="x\\[:8\\], y\\[:8\\]"):
        keras_fastclip.clipping_summary(made)
    made.fit(x, y, batch_size=4, verbose=0)
    keras_fastclip.clipping_summary(made)
    assert "quadratic" in capsys.readouterr().out


def test_plain_models_have_no_summary():
    plain = keras.Sequential([layers.Dense(1)])
    with pytest.raises(ValueError, match="is not private"):
        keras_fastclip.clipping_summary(plain)
