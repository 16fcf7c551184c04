import keras
import pytest

from keras_fastclip import planner, timing


@pytest.fixture
def float64():
    """Models made inside compute in float64, so tolerances can be tight."""
    before = keras.config.floatx()
    keras.config.set_floatx("float64")
    # A layer made earlier, while tests were collected, fixes the policy.
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_floatx(before)
    keras.config.set_dtype_policy(before)


@pytest.fixture(autouse=True)
def fresh_keras():
    keras.utils.set_random_seed(0)
    yield
    keras.backend.clear_session(free_memory=False)


@pytest.fixture(autouse=True)
def fixed_speeds(monkeypatch):
    """Plans that do not depend on the machine, nor on what else it does."""
    monkeypatch.setattr(
        timing,
        "clock",
        lambda kernel, ways, jit: planner.reference_clocks(kernel, ways),
    )
