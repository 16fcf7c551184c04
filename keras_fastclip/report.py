"""The privacy of a training run on one HTML page: `privacy_report`."""

import html
import math
import os
import re
from typing import Any

import keras

from keras_fastclip import accounting
from keras_fastclip.charts import STYLE, Series, line_chart
from keras_fastclip.environment import environment
from keras_fastclip.summary import LayerPlan, layer_plans, require_private

# The page is allowed to load nothing at all.
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --ink: #1c2330; --soft: #5b6475;
  --line: #dde1e8; --page: #f5f6f8; --card: #fff;
  --c0: #1f5fbf; --c1: #c2571a; --c2: #1d8a63; --c3: #8a4fb5; }}
@media (prefers-color-scheme: dark) {{ :root {{ --ink: #e6e9ef;
  --soft: #a3abba; --line: #3a4150; --page: #14171d; --card: #1d222b;
  --c0: #7fb0ff; --c1: #f39a5f; --c2: #5fd0a4; --c3: #c79bf0; }} }}
* {{ box-sizing: border-box; }}
body {{ margin: 0 auto; padding: 1rem; max-width: 1200px; color: var(--ink);
  background: var(--page); font: 16px/1.5 system-ui, sans-serif; }}
h1 {{ font-size: 1.5rem; margin: .5rem 0 1rem; overflow-wrap: anywhere; }}
h2 {{ font-size: 1.1rem; margin: 0 0 .6rem; }}
section, .charts > figure, .figures > div {{ background: var(--card);
  border: 1px solid var(--line); border-radius: 8px; padding: 1rem;
  min-width: 0; }}
section {{ margin-top: 1rem; }}
.figures, .charts {{ display: grid; gap: 1rem; }}
.figures {{ grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); }}
.charts {{ margin-top: 1rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); }}
.figures b {{ display: block; font-size: 1.5rem; line-height: 1.3; }}
.figures span, .note {{ color: var(--soft); font-size: .85rem; }}
.note {{ margin: .4rem 0 0; }}
.statement {{ columns: 2 30rem; column-gap: 2.5rem; }}
.statement li {{ break-inside: avoid; }}
.statement p, .statement ul {{ margin: 0 0 .8rem; }}
.statement ul {{ padding-left: 1.2rem; }}
table {{ border-collapse: collapse; width: 100%; font-size: .9rem; }}
th, td {{ text-align: left; vertical-align: top; padding: .3rem .6rem;
  border-bottom: 1px solid var(--line); overflow-wrap: anywhere; }}
th {{ color: var(--soft); font-weight: 600; white-space: nowrap; }}
.plan th:nth-child(n+5), .plan td:nth-child(n+5) {{ text-align: right;
  white-space: nowrap; }}
@media (max-width: 800px) {{
  .plan thead {{ display: none; }}
  .plan tr {{ display: block; border-bottom: 2px solid var(--line);
    padding: .5rem 0; }}
  .plan td, .plan td:nth-child(n+5) {{ display: flex; text-align: left;
    border: 0; padding: 0; white-space: normal; }}
  .plan td:empty {{ display: none; }}
  .plan td:first-child {{ font-weight: 600; }}
  .plan td:not(:first-child)::before {{ content: attr(data-title);
    flex: 0 0 6rem; color: var(--soft); }}
}}
{style}
</style>
</head>
<body>
<h1>{title}</h1>
<div class="figures">{figures}</div>
<div class="charts">{charts}</div>
<section><h2>Privacy statement</h2>
<div class="statement">{statement}</div></section>
<section><h2>How each layer is clipped</h2>{plan}</section>
<section><h2>Environment</h2>{environment}</section>
</body>
</html>
"""


def privacy_report(
    model: keras.Model,
    history: keras.callbacks.History | dict[str, list[float]],
    path: str | os.PathLike,
    *,
    delta: float | None = None,
) -> None:
    """Writes one HTML page on the privacy of a training run.

    On it are the privacy statement, ε over the epochs and for every δ, the
    accuracy that each ε bought, the fraction of clipped gradients if it was
    logged, how each layer is clipped, and versions and devices. The file loads
    nothing from anywhere, so it can be mailed or archived as it is.

    What `fit` logged is charted as it is: `EpsilonTracker` logs ε, and
    `GradientNormMonitor` the clipped fraction. Accuracies on the training data
    and clipped fractions are computed without noise; a report with them on
    private data is as private as the data.

    Args:
        model: a private model.
        history: what `fit` returned, or a dict like its `history`.
        path: of the file to be written.
        delta: δ of the statement. By default that of the `EpsilonTracker` of
            `fit`, or the model's own, or else the largest power of ten below
            one over the number of examples.

    Example:

    ```python
    tracker = keras_fastclip.EpsilonTracker(delta=1e-5)
    history = model.fit(x, y, epochs=10, callbacks=[tracker])
    keras_fastclip.privacy_report(model, history, "report.html")
    ```
    """
    require_private(model)
    ledger = model._privacy.ledger(model)
    tracked = getattr(history, "params", {}).get("epsilon", {})
    if delta is None:
        delta = (
            tracked.get("delta")
            or model._privacy.settings.delta
            or _default_delta(ledger)
        )
    page = PAGE.format(
        title=html.escape(f"Privacy report: {model.name}"),
        style=STYLE,
        figures=_figures(ledger, delta),
        charts="".join(_charts(ledger, delta, history, tracked)),
        statement=_paragraphs(model.privacy_statement(delta)),
        plan=_plan(model),
        environment=_table(environment()),
    )
    with open(path, "w", encoding="utf-8") as file:
        file.write(page)


def _default_delta(ledger: accounting.Ledger) -> float:
    sizes = [
        entry.mechanism.num_examples
        for entry in ledger.entries
        if not isinstance(entry.mechanism, accounting.Unaccounted)
    ]
    digits = math.floor(math.log10(max(sizes, default=10_000))) + 1
    return 10.0**-digits


def _figures(ledger, delta):
    """The headline."""
    spent = ledger.spent(delta)
    # A bound must not shrink when it is printed.
    shown = "∞" if math.isinf(spent) else f"{math.ceil(spent * 100) / 100:,.2f}"
    noise = sorted(
        {
            entry.mechanism.noise_multiplier
            for entry in ledger.entries
            if not isinstance(entry.mechanism, accounting.Unaccounted)
        }
    )
    figures = [
        (f"ε = {shown}", f"at δ = {delta:g}; smaller is more private"),
        (f"{ledger.total_steps:,}", "training steps"),
    ]
    if noise:
        shown = f"{noise[0]:.4g}"
        if len(noise) > 1:
            shown += f" to {noise[-1]:.4g}"
        figures.append((shown, "noise multiplier σ"))
    return "".join(
        f"<div><b>{html.escape(value)}</b><span>{html.escape(name)}</span></div>"
        for value, name in figures
    )


def _charts(ledger, delta, history, tracked):
    logs = getattr(history, "history", history)
    epsilons = logs.get("epsilon", [])
    spent = float(ledger.spent(delta))
    yield _over_epochs(epsilons, spent, delta, tracked)
    yield _for_every_delta(ledger, delta)
    yield _accuracy(logs, epsilons)
    clipped = logs.get("nonprivate_clipped_fraction", [])
    if clipped:
        yield line_chart(
            "Gradients that were clipped",
            "epoch",
            "examples longer than the clip norm",
            [Series("training data, not private", _epochs(clipped), clipped)],
            whole_x=True,
            percent=True,
        )


def _epochs(values):
    return range(1, len(values) + 1)


def _over_epochs(epsilons, spent, delta, tracked):
    bound = tracked.get("accountant", "").upper()
    at = f" at δ = {tracked['delta']:g}" if "delta" in tracked else ""
    epochs = _epochs(epsilons)
    name = f"as logged, by {bound}" if bound else "as logged"
    series = [Series(name, epochs, epsilons)]
    if epsilons and tracked.get("delta", delta) == delta:
        ends = [epochs[0], epochs[-1]]
        series.append(
            Series("stated for all steps, by PLD", ends, [spent, spent])
        )
    note = ""
    if not any(map(math.isfinite, epsilons)):
        series = []
        note = (
            "Epsilon was infinite; the statement says why."
            if epsilons
            else "Epsilon was not logged. Give EpsilonTracker(delta) to the "
            "callbacks of fit to see it here."
        )
    return line_chart(
        "Privacy spent over the epochs",
        "epoch",
        f"ε{at}",
        series,
        whole_x=True,
        note=note,
    )


def _for_every_delta(ledger, delta):
    deltas = sorted({delta * 10.0**n for n in range(-5, 4)})
    deltas = [d for d in deltas if d < 1]
    pld, rdp = (
        [ledger.epsilon(d, accountant) for d in deltas]
        for accountant in ("pld", "rdp")
    )
    series = [Series("tight bound, by PLD", deltas, pld)]
    if pld == rdp:
        series = [Series("exact", deltas, pld)]
    else:
        series.append(Series("fast bound, by RDP", deltas, rdp))
    infinite = not any(map(math.isfinite, pld + rdp))
    return line_chart(
        "The same training at every δ",
        "δ, logarithmic",
        "ε",
        series,
        log_x=True,
        note="Epsilon is infinite at every delta." if infinite else "",
    )


def _accuracy(logs, epsilons):
    """What each epsilon bought: accuracies, or the losses if there is none."""
    names = [name for name in logs if "acc" in name]
    percent = bool(names)
    names = names or [name for name in logs if name in ("loss", "val_loss")]
    # Keras does not say of which epochs shorter ones are.
    names = [name for name in names if len(logs[name]) == len(epsilons)]
    what = "Accuracy" if percent else "Loss"
    note = "Values on the training data are not covered by the guarantee."
    if not any(map(math.isfinite, epsilons)):
        names, note = [], "Needs finite values of epsilon in the logs."
    return line_chart(
        f"{what} against privacy",
        "ε",
        what.lower(),
        [Series(_readable(name), epsilons, logs[name]) for name in names[:4]],
        percent=percent,
        from_zero=False,
        note=note,
    )


def _readable(name):
    if name.startswith("val_"):
        return f"validation {name[4:]}".replace("_", " ")
    return f"training {name}".replace("_", " ")


def _paragraphs(statement):
    """The statement's paragraphs and bullets as HTML."""
    parts, bullets = [], []
    for paragraph in statement.strip().split("\n\n")[1:]:
        text = html.escape(" ".join(paragraph.split()))
        if text.startswith("- "):
            bullets.append(f"<li>{text[2:]}</li>")
            continue
        if bullets:
            parts.append(f"<ul>{''.join(bullets)}</ul>")
            bullets = []
        text = re.sub(r"^((What|Warning)[^.:]*[.:])", r"<b>\1</b>", text)
        parts.append(f"<p>{text}</p>")
    if bullets:
        parts.append(f"<ul>{''.join(bullets)}</ul>")
    return "".join(parts)


def _plan(model):
    if model._privacy.latest_plan is None:
        return (
            '<p class="note">The model was not trained since it was made or '
            "loaded, so there is no plan yet.</p>"
        )
    rows, batch = layer_plans(model)
    titles = "".join(f"<th>{title}</th>" for title in LayerPlan.TITLES)
    body = "".join(
        "<tr>"
        + "".join(
            f'<td data-title="{title}">{html.escape(cell)}</td>'
            for title, cell in zip(LayerPlan.TITLES, row.cells(), strict=True)
        )
        + "</tr>"
        for row in rows
    )
    return (
        f'<table class="plan"><thead><tr>{titles}</tr></thead>'
        f"<tbody>{body}</tbody></table>"
        '<p class="note">T: positions of an example; d, p: inputs and outputs '
        "of the largest kernel. Memory and time are for norms and clipped sums "
        f"of a batch of {batch}.</p>"
    )


def _table(values: dict[str, Any]) -> str:
    rows = "".join(
        f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>"
        for name, value in values.items()
    )
    return f"<table><tbody>{rows}</tbody></table>"
