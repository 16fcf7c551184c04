"""What happens to each layer: `clipping_summary`."""

import dataclasses
import io
import math
from collections.abc import Callable
from typing import Any, ClassVar

import keras
import rich.box
import rich.console
import rich.table

from keras_fastclip.capture import Plan
from keras_fastclip.methods import Limits, Method, choose
from keras_fastclip.planner import taken
from keras_fastclip.sampling import as_arrays, some


@dataclasses.dataclass(frozen=True)
class LayerPlan:
    """How the gradients of one layer are clipped; see `clipping_summary`.

    Attributes:
        sizes: T, d and p, each None where the layer has no such size.
        memory: bytes for a batch; None if it is not planned.
        seconds: for a batch; None if it is not timed.
    """

    TITLES: ClassVar[tuple[str, ...]] = (
        *("layer", "class", "rule", "way"),
        *("T", "d", "p", "weights", "calls", "memory", "time"),
    )

    path: str
    layer_class: str
    rule: str
    way: str
    sizes: tuple[int | None, ...]
    weights: int
    calls: int
    memory: int | None
    seconds: float | None

    def cells(self) -> tuple[str, ...]:
        """One text for each of the `TITLES`."""
        return (
            self.path,
            self.layer_class,
            self.rule,
            self.way,
            *map(_number, (*self.sizes, self.weights, self.calls)),
            _bytes(self.memory),
            _milliseconds(self.seconds),
        )


def require_private(model: keras.Model) -> None:
    """Raises `ValueError` for models that train without privacy."""
    if getattr(model, "_privacy", None) is None:
        raise ValueError(
            f"The model {model.name!r} is not private: use DPModel, "
            "DPSequential or make_private."
        )


def layer_plans(model: keras.Model) -> tuple[list[LayerPlan], int]:
    """What `clipping_summary` prints, and the size of batches it is for.

    Args:
        model: a private model that was checked, by `fit` for example.
    """
    privacy = model._privacy
    plan, method = privacy.latest_plan, privacy.method
    limits = privacy.limits(model)
    chosen = _by_layer(plan, method, limits)
    rows = []
    for unit, facts in plan.facts:
        way, memory, seconds = chosen.get(unit.path, ("shared", None, None))
        rows.append(
            LayerPlan(
                unit.path,
                type(unit.layer).__name__,
                facts.rule,
                "own" if (facts.rule, way) == ("own", "ghost") else way,
                tuple(facts.sizes),
                sum(math.prod(v.shape) for v in unit.variables),
                facts.calls,
                memory,
                seconds,
            )
        )
    return rows, limits.batch


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
    of its gradients are taken, in which way, and the sizes that decide it. T
    is the number of positions of an example (1 for plain vectors, the length
    of a sequence, the pixels of a feature map), d and p are the inputs and
    outputs of the layer's largest kernel, or rows and width of its table.

    The way is that of the largest kernel. "ghost" norms take 2T² numbers an
    example and no gradients; "build" builds the d·p numbers of a gradient for
    its norm, "keep" also keeps them for the clipped sum. Behind a colon stands
    the form: "batched" for all examples at once, a "loop" over them, and so
    on. Each can be given in `ways`. Memory and time are for norms and clipped
    sums of a batch, memory as it is planned and time as it is measured for
    each kernel alone. Layers by the fallback are exact as well, but slower.

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
    require_private(model)
    privacy = model._privacy
    if x is not None:
        privacy.plan(model, some(as_arrays((x, y, sample_weight))))
    if privacy.latest_plan is None:
        raise ValueError(
            f"The model {model.name!r} was not checked yet. Give a few "
            "examples: clipping_summary(model, x[:8], y[:8])."
        )
    rows, batch = layer_plans(model)
    title = f"Clipping of {model.name!r}, method {privacy.settings.method!r}"
    if privacy.settings.views > 1:
        title += f", {privacy.settings.views} views of each example"
    table = rich.table.Table(
        title=title,
        box=rich.box.SIMPLE_HEAD,
        caption=f"memory and time for batches of {batch}",
    )
    for title in LayerPlan.TITLES[:4]:
        table.add_column(title, overflow="fold")
    for title in LayerPlan.TITLES[4:]:
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row.cells())
    console = rich.console.Console(file=io.StringIO(), width=120)
    console.print(table)
    text = console.file.getvalue().rstrip()
    total, _ = privacy.latest_plan.numbers
    noise = privacy.settings.noise
    print_fn(f"{text}\n\n {total:,} trained weights in all, {noise} noise")


def _by_layer(plan: Plan, method: Method, limits: Limits) -> dict[str, tuple]:
    """By path, the way of the largest part, and memory and time of all."""
    if method.norm == "loop":
        return {unit.path: ("loop", None, None) for unit, _ in plan.facts}
    found = {}
    choices = choose(plan.traits, plan.numbers, method, limits)
    for part, choice in zip(plan.traits, choices, strict=True):
        found.setdefault(part.path, []).append((part, choice))
    return {
        path: (
            str(max(pairs, key=lambda pair: pair[0].weights)[1].way),
            taken([choice for _, choice in pairs]),
            _seconds(pairs, limits),
        )
        for path, pairs in found.items()
    }


def _seconds(pairs, limits):
    """Of the kernels; what is left over is short."""
    return sum(
        limits.batch * part.item.calls * seconds
        for part, choice in pairs
        if part.item is not None
        for seconds in limits.clock(part.item.kernel, [choice.way])
    )


def _milliseconds(seconds):
    return f"{1e3 * seconds:.3g} ms" if seconds else ""


def _bytes(count):
    if count is None or count < 2**10:
        return ""
    unit, size = ("MB", 2**20) if count >= 2**20 else ("kB", 2**10)
    return f"{count / size:,.0f} {unit}"


def _number(value):
    return "" if value is None else f"{value:,}"
