"""What happens to each layer: `clipping_summary`."""

import io
import math
from collections.abc import Callable
from typing import Any

import keras
import rich.box
import rich.console
import rich.table

from keras_fastclip import planner
from keras_fastclip.capture import Facts, Plan
from keras_fastclip.methods import Method
from keras_fastclip.privacy import Privacy
from keras_fastclip.sampling import as_arrays, some


def clipping_summary(
    model: keras.Model,
    x: Any = None,
    y: Any = None,
    sample_weight: Any = None,
    *,
    print_fn: Callable[[str], Any] = print,
) -> None:
    """Prints how the gradients of each layer are clipped.

    One line for each layer that owns trained weights: by which rule the norms
    of its gradients are taken, in which form, and the sizes that decide it. T
    is the number of positions of an example (1 for plain vectors, the length
    of a sequence, the pixels of a feature map), d and p are the inputs and
    outputs of the layer's largest kernel, or rows and width of its table. A
    ghost norm takes 2T² numbers an example, a gradient that is built takes
    d·p. Layers by the fallback are exact as well, but slower.

    Args:
        model: a private, compiled model.
        x, y, sample_weight: a few examples. Needed before the first `fit`,
            while the model has not been checked.
        print_fn: what is called with the text.

    Example:

    ```python
    keras_fastclip.clipping_summary(model, x[:8], y[:8])
    ```
    """
    privacy = getattr(model, "_privacy", None)
    if privacy is None:
        raise ValueError(
            f"The model {model.name!r} is not private: use DPModel, "
            "DPSequential or make_private."
        )
    if x is not None:
        privacy.plan(model, some(as_arrays((x, y, sample_weight))))
    if privacy.latest_plan is None:
        raise ValueError(
            f"The model {model.name!r} was not checked yet. Give a few "
            "examples: clipping_summary(model, x[:8], y[:8])."
        )
    table = rich.table.Table(
        title=f"Clipping of {model.name!r}, method {privacy.settings.method!r}",
        box=rich.box.SIMPLE_HEAD,
    )
    for title in ("layer", "class", "rule", "norm"):
        table.add_column(title, overflow="fold")
    for title in ("T", "d", "p", "weights", "calls"):
        table.add_column(title, justify="right", no_wrap=True)
    total, plan = 0, privacy.latest_plan
    planned = _planned(plan, privacy)
    for unit, facts in plan.facts:
        weights = sum(math.prod(v.shape) for v in unit.variables)
        total += weights
        table.add_row(
            unit.path,
            type(unit.layer).__name__,
            facts.rule,
            planned.get(unit.path) or _norm(facts, privacy.method),
            *map(_number, facts.sizes),
            _number(weights),
            _number(facts.calls),
        )
    console = rich.console.Console(file=io.StringIO(), width=100)
    console.print(table)
    text = console.file.getvalue().rstrip()
    print_fn(f"{text}\n\n {total:,} trained weights in all")


def _planned(plan: Plan, privacy: Privacy) -> dict[str, str]:
    """How `auto` takes the norm of the largest kernel of each layer."""
    if privacy.method is None or not privacy.method.planned:
        return {}
    sizes = [sizes for _, sizes in plan.kernels]
    chosen = planner.plan_here(sizes, *plan.numbers, *privacy.limits())
    norms, largest = {}, {}
    for (path, size), choice in zip(plan.kernels, chosen, strict=True):
        weights = size.inputs * size.outputs * size.blocks
        if weights > largest.get(path, 0):
            largest[path] = weights
            norms[path] = "ghost" if choice.ghost else "instantiated"
    return norms


def _norm(facts: Facts, method: Method | None) -> str:
    """How the norm of the largest kernel is taken."""
    if method is None:
        return "loop"
    if facts.rule == "fallback":
        return "instantiated"
    if facts.rule == "own":
        return "own"
    ghost = facts.prefers_ghost or method.ghost_everywhere
    return "ghost" if facts.has_ghost and ghost else "instantiated"


def _number(value):
    return "" if value is None else f"{value:,}"
