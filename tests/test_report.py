"""The page that `privacy_report` writes, also as a browser shows it."""

import math
import re

import keras
import numpy as np
import pytest

import keras_fastclip
from keras_fastclip import charts
from tests.browser import CHROMIUM, browser

in_a_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="There is no Chromium to show the page."
)

# Long, and with a letter that HTML writes in another way.
NAME = "a_model_of_examples_with_a_name_of_more_than_a_line->private"


def data():
    rng = np.random.default_rng(0)
    return rng.normal(size=(200, 5)).astype("float32"), rng.integers(0, 3, 200)


def private_model(metrics=("accuracy",), **settings):
    settings = {"noise_multiplier": 1.0, **settings}
    layers = [keras.layers.Dense(4, "tanh"), keras.layers.Dense(3)]
    model = keras_fastclip.DPSequential(
        layers, l2_norm_clip=1.0, name=NAME, **settings
    )
    loss = keras.losses.SparseCategoricalCrossentropy(True)
    model.compile("sgd", loss, metrics=metrics and list(metrics))
    return model


@pytest.fixture(scope="module")
def trained():
    model, (x, y) = private_model(), data()
    history = model.fit(
        x,
        y,
        batch_size=50,
        epochs=3,
        verbose=0,
        validation_data=(x, y),
        callbacks=[
            keras_fastclip.EpsilonTracker(1e-3),
            keras_fastclip.GradientNormMonitor(),
        ],
    )
    return model, history


def written(tmp_path, model, history, **options):
    path = tmp_path / "report.html"
    keras_fastclip.privacy_report(model, history, path, **options)
    return path.read_text(encoding="utf-8")


# What the page shows, as JavaScript sees it.
FACTS = """({
  width: document.documentElement.scrollWidth,
  titles: [...document.querySelectorAll('.charts figcaption')]
    .map(e => e.textContent),
  legends: [...document.querySelectorAll('.charts figure')]
    .map(e => e.querySelectorAll('.legend li').length),
  heading: document.querySelector('h1').textContent,
  sizes: [...document.querySelectorAll('figure > svg')].map(svg => {
    const scale = svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
    const text = getComputedStyle(svg.querySelector('text'));
    return scale * parseFloat(text.fontSize);
  }),
  outside: [...document.querySelectorAll('figure > svg text')].filter(e => {
    const box = e.getBoundingClientRect();
    const all = e.closest('svg').getBoundingClientRect();
    return box.left < all.left - 1 || box.right > all.right + 1 ||
      box.top < all.top - 1 || box.bottom > all.bottom + 1;
  }).map(e => e.textContent),
  hidden: [...document.querySelectorAll('td, th, p, li, figcaption')]
    .filter(e => e.scrollWidth > e.clientWidth + 1 && e.clientWidth > 0)
    .map(e => e.textContent),
  columns: new Set([...document.querySelectorAll('.charts figure')]
    .map(e => e.getBoundingClientRect().left)).size,
})"""


@in_a_browser
@pytest.mark.parametrize("width", [400, 1400])
def test_page_is_shown_whole_and_without_complaints(trained, tmp_path, width):
    written(tmp_path, *trained)
    with browser() as tab:
        tab.open(tmp_path / "report.html", width)
        facts = tab.evaluate(FACTS)
        picture = tmp_path / "report.png"
        tab.screenshot(picture)
        complaints = tab.complaints
    assert complaints == []
    assert facts["width"] == width  # Nothing to scroll sideways.
    assert facts["outside"] == facts["hidden"] == []
    assert facts["heading"] == f"Privacy report: {NAME}"
    assert facts["titles"] == [
        "Privacy spent over the epochs",
        "The same training at every δ",
        "Accuracy against privacy",
        "Gradients that were clipped",
    ]
    assert facts["legends"] == [2, 2, 2, 1]
    assert min(facts["sizes"]) > 10  # Pixels of a letter.
    assert facts["columns"] == (1 if width == 400 else 2)
    assert picture.read_bytes().startswith(b"\x89PNG")


@in_a_browser
def test_browser_complains_about_what_a_page_must_not_do(tmp_path):
    policy = (
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'\">"
    )
    pages = {
        "refused": policy + "<img src='http://localhost:9/a.png'>",
        "missing": "<img src='missing.png'>",
        "error": "<script>console.error('no')</script>",
        "exception": "<script>undefined.x</script>",
    }
    with browser() as tab:
        for name, text in pages.items():
            tab.complaints.clear()
            path = tmp_path / f"{name}.html"
            path.write_text(text)
            tab.open(path, 400)
            tab.evaluate("1")
            assert tab.complaints, name


def test_page_tells_all_that_is_known(trained, tmp_path):
    model, history = trained
    page = written(tmp_path, model, history)
    spent = model.privacy_spent(1e-3)  # The delta of the tracker.
    assert f"ε = {math.ceil(spent * 100) / 100:.2f}</b>" in page
    assert NAME not in page and NAME.replace(">", "&gt;") in page
    statement = " ".join(model.privacy_statement(1e-3).split())
    (guarantee,) = re.findall(r"epsilon = [\d.]+ at delta = 0.001", statement)
    assert guarantee in page
    for path in ("dense", "dense_1"):
        assert f"-&gt;private/{path}</td>" in page
    assert keras.__version__ in page and "AES keystream" in page
    last = history.history["val_accuracy"][-1]
    epsilon = history.history["epsilon"][-1]
    assert f"validation accuracy: {epsilon:.4g}, {100 * last:.4g}%" in page
    assert "http" not in page.replace("http-equiv", "")


def test_delta_is_that_of_the_model_or_of_the_data(tmp_path):
    model, (x, y) = private_model(max_epsilon=50.0, delta=1e-4), data()
    model.fit(x, y, batch_size=50, verbose=0)
    page = written(tmp_path, model, {})
    assert "at δ = 0.0001;" in page and "EpsilonTracker(delta)" in page
    page = written(tmp_path, model, {}, delta=1e-7)
    assert "at δ = 1e-07;" in page
    model = private_model()
    model.fit(x, y, batch_size=50, verbose=0)
    assert "at δ = 0.001;" in written(tmp_path, model, {})  # 200 examples.


def test_infinite_epsilon_is_told_and_not_drawn(tmp_path):
    model, (x, y) = private_model(noise_multiplier=0.0), data()
    history = model.fit(
        x,
        y,
        batch_size=50,
        verbose=0,
        callbacks=[keras_fastclip.EpsilonTracker(1e-3)],
    )
    page = written(tmp_path, model, history)
    assert "ε = ∞" in page and "steps were taken without noise" in page
    assert "Epsilon was infinite" in page and "<polyline" not in page


def test_report_of_a_loaded_model_and_of_metrics_without_accuracy(tmp_path):
    model, (x, y) = private_model(metrics=None), data()
    history = model.fit(
        x,
        y,
        batch_size=50,
        verbose=0,
        callbacks=[keras_fastclip.EpsilonTracker(1e-3)],
    )
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    page = written(tmp_path, loaded, history.history, delta=1e-3)
    assert "there is no plan yet" in page
    assert "Loss against privacy" in page and "training loss" in page
    spent = math.ceil(100 * model.privacy_spent(1e-3)) / 100
    assert f"ε = {spent:.2f}</b>" in page


def test_plain_models_have_no_report(tmp_path):
    with pytest.raises(ValueError, match="is not private"):
        written(tmp_path, keras.Sequential([keras.layers.Dense(1)]), {})


def test_axes_have_round_numbers_around_the_data():
    ticks = charts._ticks
    assert ticks(0.0, 3.6) == [0, 1, 2, 3, 4]
    assert ticks(0.2, 0.95) == [0.2, 0.4, 0.6, 0.8, 1.0]
    assert ticks(0.0, 1.0) == [0, 0.25, 0.5, 0.75, 1]
    assert ticks(1, 12, whole=True) == [5, 10]
    assert ticks(1, 3, whole=True) == [1, 2, 3]
    assert ticks(1, 1, whole=True) == [1, 2]
    assert ticks(0.7, 0.7)[0] <= 0.7 <= ticks(0.7, 0.7)[-1]
    assert ticks(0.0, 0.0) == [0, 0.25, 0.5, 0.75, 1]
    assert charts._decades([1e-9, 1e-2]) == [1e-9, 1e-7, 1e-5, 1e-3]


def test_points_that_are_not_finite_are_left_out():
    series = charts.Series("s", [1, 2, 3], [1.0, math.inf, 2.0])
    chart = charts.line_chart("t", "x", "y", [series])
    assert chart.count("<circle") == 2 and "inf" not in chart
