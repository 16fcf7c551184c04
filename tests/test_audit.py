"""The audit finds errors, and no more than there are.

All seeds are fixed, so the outcome is, too. Were they not: a right step would
be refuted with a probability of at most 0.05 by the theorem, and as good as
never in truth, since its bounds come out at half of what it claims.
"""

import importlib
import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import keras_fastclip
from keras_fastclip import clipping, noise, parts, sampling
from keras_fastclip.accounting import Ledger, PoissonSampling

bounds = importlib.import_module("keras_fastclip.audit")

DELTA = 1e-5

# (canaries, guesses, right guesses, delta), and the bound at 95 %.
ANY_MECHANISM = [
    ((1000, 100, 90, 1e-5), 1.6261),
    ((1000, 100, 100, 1e-5), 3.4654),
    ((1000, 1000, 600, 1e-5), 0.2972),
    ((1000, 200, 150, 0.0), 0.8214),
    ((5000, 200, 190, 1e-5), 2.3760),
]
GAUSSIAN = [
    ((1000, 100, 90, 1e-5), 2.4564),
    ((1000, 100, 100, 1e-5), 5.5490),
    ((1000, 1000, 600, 1e-5), 0.5835),
    ((1000, 200, 150, 1e-5), 1.2969),
    ((5000, 200, 190, 1e-5), 3.2514),
]


@pytest.mark.parametrize("case, right", ANY_MECHANISM)
def test_bounds_for_any_mechanism(case, right):
    canaries, guesses, correct, delta = case
    found = bounds.largest(
        lambda e: (
            bounds.probability_bound(e, correct, guesses, canaries, delta)
            <= 0.05
        )
    )
    assert found == pytest.approx(right, abs=1e-4)


@pytest.mark.parametrize(
    "case, epsilon, right",
    [
        (ANY_MECHANISM[0][0], 1.0, 8.4129e-4),
        (ANY_MECHANISM[3][0], 1.0, 0.303188),
    ],
)
def test_probability_of_that_many_right_guesses(case, epsilon, right):
    canaries, guesses, correct, delta = case
    found = bounds.probability_bound(epsilon, correct, guesses, canaries, delta)
    assert found == pytest.approx(right, rel=1e-4)


@pytest.mark.parametrize("case, right", GAUSSIAN)
def test_bounds_for_gaussian_mechanisms(case, right):
    canaries, guesses, correct, delta = case
    mu = bounds.largest(
        lambda mu: bounds.is_refuted(
            bounds.gaussian(mu), correct, guesses, canaries, 0.05
        )
    )
    assert bounds.gaussian_epsilon(mu, delta) == pytest.approx(right, abs=1e-3)


def test_the_trade_off_of_a_ledger_is_that_of_its_mechanism():
    """Never above: that would refute what is right."""
    ledger = Ledger()
    ledger.record(PoissonSampling(10, 10, 2.0), 4)  # μ = √4/2
    claimed, exact = bounds.trade_off(ledger), bounds.gaussian(1.0)
    for r in (1e-6, 1e-3, 0.1, 0.5, 0.9, 0.999):
        assert claimed(r) <= exact(r) * (1 + 1e-9)
        assert claimed(r) == pytest.approx(exact(r), rel=5e-3, abs=1e-9)


def test_guesses_of_no_use_show_nothing():
    for correct in (0, 50):
        assert bounds.probability_bound(0.0, correct, 100, 100, 0) > 0.05
        assert not bounds.is_refuted(
            bounds.gaussian(0.0), correct, 100, 100, 0.05
        )


# -- gradient canaries -------------------------------------------------------


def wide(sigma, jit_compile=False, optimizer="sgd", **kwargs):
    """A model with 6,060 weights."""
    keras.utils.set_random_seed(1)
    model = keras_fastclip.DPSequential(
        [layers.Dense(60)],
        noise_multiplier=sigma,
        **{"seed": 2, "l2_norm_clip": 0.5, **kwargs},
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, jit_compile=jit_compile)
    return model


def data(n=100):
    rng = np.random.default_rng(3)
    x = rng.normal(size=(n, 100)).astype("float32")
    return x, rng.integers(0, 60, n)


def audited(rate, steps, sigma, canaries=3900, **kwargs):
    """An audit with gradient canaries of that many steps at that rate."""
    x, y = data()
    batch_size = int(rate * (len(x) + canaries))
    return keras_fastclip.audit(
        wide(sigma, **kwargs),
        x,
        y,
        delta=DELTA,
        num_canaries=canaries,
        batch_size=batch_size,
        steps_per_epoch=steps,
        seed=4,
    )


FULL = {"rate": 1.0, "steps": 1, "sigma": 1.2}
SAMPLED = {"rate": 0.25, "steps": 100, "sigma": 4.0, "canaries": 5900}


@pytest.mark.parametrize("case", [FULL, SAMPLED], ids=["full", "sampled"])
def test_right_steps_pass(case):
    report = audited(**case)
    assert not report.refuted
    # The bounds are no good if they find nothing at all, either.
    assert 0.3 < report.epsilon < report.claimed
    assert report.epsilon < report.gaussian_epsilon < 0.8 * report.claimed


def test_half_the_noise_is_found(monkeypatch):
    right = noise.GaussianNoise.add
    monkeypatch.setattr(
        noise.GaussianNoise,
        "add",
        lambda self, sums, stddev, *rest, **options: right(
            self, sums, stddev / 2, *rest, **options
        ),
    )
    report = audited(**FULL)
    assert report.refuted and report.gaussian_epsilon > report.claimed
    assert "REFUTED" in str(report)


def test_double_sampling_is_found(monkeypatch):
    right = sampling.poisson_indices
    monkeypatch.setattr(
        sampling,
        "poisson_indices",
        lambda size, batch_size, rng: right(size, 2 * batch_size, rng),
    )
    # With noise of one seed in some ten it is not.
    assert any(audited(**SAMPLED, seed=seed).refuted for seed in (2, 3, 4))


def test_noise_that_weights_share_is_found(monkeypatch):
    def add(self, sums, stddev, step, divisor, **options):
        value = tf.random.stateless_normal([], tf.stack([step, 7]))
        value *= tf.cast(stddev, value.dtype)
        return [(total + value) / divisor for total in sums]

    monkeypatch.setattr(noise.GaussianNoise, "add", add)
    assert audited(rate=0.25, steps=8, sigma=3.0, canaries=500).refuted


def test_noise_that_steps_share_is_found(monkeypatch):
    right = noise.GaussianNoise.add

    def add(self, sums, stddev, step, *rest, **options):
        return right(self, sums, stddev, 0 * step, *rest, **options)

    monkeypatch.setattr(noise.GaussianNoise, "add", add)
    assert audited(rate=0.25, steps=8, sigma=3.0, canaries=500).refuted


@pytest.mark.parametrize(
    "case",
    [
        {"jit_compile": True},
        {"sampling": "shuffle"},
        {"physical_batch_size": 64},
        {"clipping": "automatic"},
        {"l2_norm_clip": keras_fastclip.AdaptiveNorm(0.5)},
        {"optimizer": "adam"},
    ],
    ids=lambda case: next(iter(case)),
)
def test_canaries_are_seen_in_every_kind_of_step(case):
    """With little noise, the guesser is always right: they do arrive."""
    report = audited(rate=0.5, steps=16, sigma=0.2, canaries=200, **case)
    there, scores = report.included, report.scores
    assert scores[there].min() > scores[~there].max()
    assert report.epsilon > 2.5 and not report.refuted


# -- example canaries --------------------------------------------------------

CANARIES = 120


def examples(sigma, outputs, **kwargs):
    """A linear model on few ordinary examples."""
    keras.utils.set_random_seed(1)
    model = keras_fastclip.DPSequential(
        [layers.Dense(outputs, **kwargs)],
        l2_norm_clip=1.0,
        noise_multiplier=sigma,
        seed=2,
    )
    model.compile(
        keras.optimizers.SGD(1.0),
        keras.losses.MeanSquaredError(reduction="sum"),
    )
    return model


def audited_examples(model, x, y, prepared=None):
    """An audit with the canaries (x, y), on examples that are all zero."""
    nothing = np.zeros_like(x[:40]), np.zeros_like(y[:40])
    if prepared is not None:
        model.clipped_gradients(x[:4], y[:4])
        prepared()
    return keras_fastclip.audit(
        model,
        *nothing,
        delta=DELTA,
        canaries=(x, y),
        batch_size=len(x) + 40,
        epochs=4,
        seed=4,
    )


def unclipped():
    """Long gradients along an axis for each canary."""
    x = np.eye(CANARIES, dtype="float32")
    y = np.full((CANARIES, 1), 1e4, "float32")
    return examples(4.0, 1, use_bias=False), x, y


def test_clipped_examples_pass():
    assert not audited_examples(*unclipped()).refuted


def test_a_step_that_does_not_clip_is_found(monkeypatch):
    def bug():
        monkeypatch.setattr(
            clipping.Clipping,
            "bounded_factors",
            lambda self, squared_norms: tf.ones_like(squared_norms),
        )

    model, x, y = unclipped()
    report = audited_examples(model, x, y, bug)
    assert report.refuted and report.epsilon > report.claimed


def mostly_bias():
    """Inputs so short that nearly all of a gradient is in the bias."""
    x = np.full((CANARIES, 1), 0.01, "float32")
    y = 1e4 * np.eye(CANARIES, dtype="float32")
    return examples(4.0, CANARIES), x, y


def test_a_bias_in_the_norm_passes():
    assert not audited_examples(*mostly_bias()).refuted


def test_a_bias_that_is_not_in_the_norm_is_found(monkeypatch):
    right = parts.FewWeights.squared_norms

    def squared_norms(few):
        assert all(v.name == "bias" for v in few.variables)
        return tf.zeros_like(right(few))

    def bug():
        monkeypatch.setattr(parts.FewWeights, "squared_norms", squared_norms)

    assert audited_examples(*mostly_bias(), bug).refuted


def test_mislabelled_examples():
    x, y = data(300)
    model = wide(sigma=0.001)
    report = keras_fastclip.audit(
        model,
        x,
        y,
        delta=DELTA,
        canaries="examples",
        num_canaries=100,
        batch_size=200,
        epochs=20,
        seed=4,
    )
    assert report.epsilon > 1 and not report.refuted
    assert model._privacy.ledger(model).entries[0].mechanism.num_examples == 300


def test_targets_are_wrong_and_rows_are_kept_apart():
    x, y = data(300)
    rest, (canary_x, wrong, _) = bounds.mislabelled(
        (x, y, None), 50, np.random.default_rng(0)
    )
    place = [int(np.flatnonzero((x == row).all(1))[0]) for row in canary_x]
    assert np.all(y[place] != wrong) and len(rest[0]) == 250
    assert not any((rest[0] == row).all(1).any() for row in canary_x)


# -- the rest ----------------------------------------------------------------


def test_nothing_is_left_in_the_model():
    x, y = data()
    model = wide(1.0)
    options = {"delta": DELTA, "num_canaries": 10, "batch_size": 50}
    keras_fastclip.audit(model, x, y, **options)
    assert "train_step" not in vars(model)
    assert "noised_mean" not in vars(model._privacy)
    before = model.get_weights()
    model.fit(x, y, batch_size=50, verbose=0)
    assert not np.allclose(before[0], model.get_weights()[0])
    with pytest.raises(ValueError, match="trained already"):
        keras_fastclip.audit(model, x, y, **options)
    failing = wide(1.0)
    with pytest.raises(ValueError, match="10000 canaries need as many weig"):
        keras_fastclip.audit(
            failing, x, y, **{**options, "num_canaries": 10_000}
        )
    assert "train_step" not in vars(failing)
    assert "noised_mean" not in vars(failing._privacy)


def test_a_model_converted_in_place():
    x, y = data()
    plain = keras.Sequential([layers.Dense(60)])
    model = keras_fastclip.make_private(
        plain, l2_norm_clip=1.0, noise_multiplier=0.05
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss)
    report = keras_fastclip.audit(
        model, x, y, delta=DELTA, num_canaries=100, epochs=4, seed=4
    )
    assert report.epsilon > 1
    model.train_on_batch(x[:8], y[:8])


def test_without_noise_nothing_is_claimed():
    x, y = data()
    report = keras_fastclip.audit(
        wide(0.0), x, y, delta=DELTA, num_canaries=100, epochs=8, seed=4
    )
    assert report.claimed == math.inf and not report.refuted
    assert report.epsilon > 2 and "inf" in str(report)
    report.plot()


class Unweighted(keras_fastclip.DPModel):
    """A loss that does not heed sample weights."""

    def __init__(self):
        super().__init__(l2_norm_clip=1.0, noise_multiplier=1.0)
        self.dense = layers.Dense(60)

    def call(self, x):
        return self.dense(x)

    def compute_per_example_loss(self, x, y, y_pred, sample_weight):
        return keras.losses.sparse_categorical_crossentropy(y, y_pred, True)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"delta": 0.0}, "delta=0.0"),
        ({"confidence": 1.0}, "confidence=1.0"),
        ({"num_canaries": 0}, "num_canaries=0"),
        ({"canaries": "birds"}, "canaries='birds'"),
        ({"sample_weight": -np.ones(100)}, "zero or more"),
        ({"canaries": "examples", "num_canaries": 100}, "more examples than"),
    ],
)
def test_impossible_audits_are_refused(arguments, message):
    x, y = data()
    with pytest.raises(ValueError, match=message):
        keras_fastclip.audit(wide(1.0), x, y, **{"delta": DELTA, **arguments})


def test_models_that_cannot_be_audited_are_refused():
    x, y = data()
    with pytest.raises(ValueError, match="Only private models"):
        keras_fastclip.audit(keras.Sequential(), x, y, delta=DELTA)
    model = Unweighted()
    model.compile("sgd")
    with pytest.raises(ValueError, match="does not heed sample weights"):
        keras_fastclip.audit(
            model, x, y, delta=DELTA, canaries="examples", num_canaries=10
        )


def test_example_canaries_need_a_clip_norm_that_does_not_adapt():
    x, y = data()
    model = keras_fastclip.DPSequential(
        [keras.layers.Dense(10)],
        l2_norm_clip=keras_fastclip.AdaptiveNorm(1.0, 0.5),
        noise_multiplier=1.0,
    )
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(True))
    with pytest.raises(ValueError, match="clip norm that does not adapt"):
        keras_fastclip.audit(
            model, x, y, delta=DELTA, canaries="examples", num_canaries=10
        )


def test_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    report = audited(rate=0.5, steps=1, sigma=1.0, canaries=100)
    report.plot(tmp_path / "audit.png")
    assert (tmp_path / "audit.png").read_bytes()[:4] == b"\x89PNG"
