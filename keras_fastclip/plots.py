"""Pictures for notebooks and papers, by matplotlib (extra `plots`)."""

from typing import Any

import keras

from keras_fastclip.summary import layer_plans, require_private


def _pyplot():
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError(
            "Plots need matplotlib: pip install 'keras-fastclip[plots]'."
        ) from error
    return pyplot


def plot_privacy(history: keras.callbacks.History | dict[str, list]) -> Any:
    """Plots the privacy spent over the epochs, and what it bought.

    Args:
        history: what `fit` returned with an `EpsilonTracker` among its
            callbacks, or a dict like its `history`.

    Returns:
        A matplotlib `Figure`: ε over the epochs, metrics against ε, and the
        fraction of clipped gradients if `GradientNormMonitor` logged it.

    Example:

    ```python
    keras_fastclip.plot_privacy(history).savefig("privacy.png")
    ```
    """
    logs = getattr(history, "history", history)
    if "epsilon" not in logs:
        raise ValueError(
            "The history has no epsilon: give EpsilonTracker(delta) to the "
            "callbacks of `fit`."
        )
    epsilon = logs["epsilon"]
    epochs = range(1, len(epsilon) + 1)
    delta = getattr(history, "params", {}).get("epsilon", {}).get("delta")
    clipped = logs.get("nonprivate_clipped_fraction")
    count = 2 if clipped is None else 3
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(
        1, count, figsize=(4.5 * count, 3.5), layout="constrained"
    )
    label = "ε" if delta is None else f"ε at δ = {delta:g}"
    axes[0].plot(epochs, epsilon, marker=".", label=label)
    axes[0].set(title="Privacy spent", xlabel="epoch", ylabel=label)
    axes[0].set_ylim(bottom=0)
    metrics = [name for name in logs if "acc" in name] or [
        name for name in logs if name in ("loss", "val_loss")
    ]
    for name in metrics:
        if len(logs[name]) == len(epsilon):
            axes[1].plot(epsilon, logs[name], marker=".", label=name)
    axes[1].set(title="What it bought", xlabel=label, ylabel="metric")
    if clipped is not None:
        axes[2].plot(epochs, clipped, marker=".", label="not private")
        axes[2].set(
            title="Clipped gradients",
            xlabel="epoch",
            ylabel="fraction of examples",
            ylim=(0, 1.02),
        )
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.legend()
        if axis.get_xlabel() == "epoch":
            axis.xaxis.set_major_locator(pyplot.MaxNLocator(integer=True))
    return figure


def plot_plan(model: keras.Model) -> Any:
    """Plots memory and time that each layer takes for private training.

    Args:
        model: a private model that was trained, or checked by
            `clipping_summary(model, x[:8], y[:8])`.

    Returns:
        A matplotlib `Figure`: for each layer, memory and time of its norms
        and clipped sum for one batch, colored by the way they are computed.

    Example:

    ```python
    keras_fastclip.plot_plan(model).savefig("plan.png")
    ```
    """
    require_private(model)
    if model._privacy.latest_plan is None:
        raise ValueError(
            f"The model {model.name!r} was not checked yet. Give a few "
            "examples: clipping_summary(model, x[:8], y[:8])."
        )
    rows, batch = layer_plans(model)
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(
        1,
        2,
        figsize=(10, 1.5 + 0.3 * len(rows)),
        sharey=True,
        layout="constrained",
    )
    names = [row.path for row in rows]
    ways = list(dict.fromkeys(row.way for row in rows))
    for axis, title, values in (
        (axes[0], "memory, MB", [(row.memory or 0) / 2**20 for row in rows]),
        (axes[1], "time, ms", [1e3 * (row.seconds or 0) for row in rows]),
    ):
        for number, way in enumerate(ways):
            chosen = [i for i, row in enumerate(rows) if row.way == way]
            axis.barh(
                [names[i] for i in chosen],
                [values[i] for i in chosen],
                color=f"C{number % 10}",
                label=way,
            )
        axis.set(xlabel=f"{title} for a batch of {batch}")
        axis.grid(axis="x", alpha=0.3)
        axis.xaxis.set_major_locator(pyplot.MaxNLocator(5))
    axes[0].invert_yaxis()
    handles, labels = axes[1].get_legend_handles_labels()
    figure.legend(handles, labels, title="way", loc="outside right upper")
    figure.suptitle(f"Clipping of {model.name!r}")
    return figure
