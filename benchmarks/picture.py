"""Draws a table of `benchmarks.compare`, without measuring anything again.

    python -m benchmarks.picture benchmarks/results/speed.txt \\
        benchmarks/results/speed.svg

Speed and memory of every private method relative to plain training, one group
of bars for each workload. Needs matplotlib, in the extra `plots`. The same
table gives the same file.
"""

import argparse
import re

PLAIN = "nonprivate"
TITLE = re.compile(r"^\s+(?P<name>\w+, batch \d+)\s*$")
ROW = re.compile(
    r"^\s+(?P<mode>[\w-]+)\s+[\d.]+\s+(?P<speed>[\d.]+)\s+\d+"
    r"\s+\d+\s+(?P<memory>[\d.]+)\s*$"
)


def read(text):
    """Speed and memory over those of plain training, by workload and mode.

    Args:
        text: what `benchmarks.compare --out` wrote.
    """
    results = {}
    for line in text.splitlines():
        if match := TITLE.match(line):
            found = results[match["name"]] = {}
        elif match := ROW.match(line):
            found[match["mode"]] = float(match["speed"]), float(match["memory"])
    without = [name for name, found in results.items() if PLAIN not in found]
    if without or not results:
        raise ValueError(f"No plain training to compare with: {without}.")
    return results


def draw(results, path):
    """Two charts side by side: speed and memory."""
    import matplotlib
    from matplotlib.figure import Figure

    # Letters as letters, and nothing that differs from run to run.
    matplotlib.rcParams.update(
        {"svg.fonttype": "none", "svg.hashsalt": "keras-fastclip"}
    )
    modes = dict.fromkeys(mode for found in results.values() for mode in found)
    modes = [mode for mode in modes if mode != PLAIN]
    height = 1.3 + len(results) * (0.12 + 0.22 * len(modes))
    figure = Figure(figsize=(8, height), layout="constrained")
    for axis, place, title in zip(
        figure.subplots(1, 2, sharey=True),
        (0, 1),
        ("Speed (more is better)", "Peak memory (less is better)"),
        strict=True,
    ):
        _chart(axis, results, modes, place)
        axis.set(title=title, xlabel="times that of plain training")
    lines, labels = axis.get_legend_handles_labels()
    figure.legend(lines, labels, loc="outside lower center", ncols=5)
    stable = {"metadata": {"Date": None}} if path.endswith(".svg") else {}
    figure.savefig(path, dpi=120, **stable)


def _chart(axis, results, modes, place):
    """Bars of one figure: a group for each workload, a color for each mode."""
    width, most = 0.8 / len(modes), 1.0
    for index, mode in enumerate(modes):
        known = {
            row: found[mode][place]
            for row, found in enumerate(results.values())
            if mode in found
        }
        rows = [row + (index + 0.5) * width - 0.4 for row in known]
        bars = axis.barh(rows, known.values(), width, label=f"private, {mode}")
        axis.bar_label(bars, fmt="%.2f", padding=2, fontsize=8)
        most = max(most, *known.values())
    axis.axvline(1, color="gray", linewidth=1, label="plain training")
    axis.set(xlim=(0, 1.15 * most))
    axis.set_yticks(range(len(results)), list(results))
    if not axis.yaxis_inverted():
        axis.invert_yaxis()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("table", help="a file that compare --out wrote")
    parser.add_argument("picture", help="the file to draw, .svg or .png")
    arguments = parser.parse_args()
    with open(arguments.table, encoding="utf-8") as file:
        results = read(file.read())
    draw(results, arguments.picture)


if __name__ == "__main__":
    main()
