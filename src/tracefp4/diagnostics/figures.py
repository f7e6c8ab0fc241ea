"""The plots of a report, drawn with matplotlib and returned as SVG text; nothing is written or shown.

One colour per arm in every plot. Colours were chosen to be told apart by colour-blind readers, and every line
also has its own marker. The drawing API is used without pyplot, so no global state changes.
"""

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# rollout / trainer
ARM_LABELS: Mapping[str, str] = {
    "bf16": "BF16 / BF16",
    "qat": "FP4 / FP4 nearest (QAT)",
    "guided": "FP4 / FP4 guided",
    "fp4_bf16": "FP4 / BF16",
    "run": "this run",
}
_COLOURS = {"bf16": "#5f6b7a", "qat": "#d55e00", "guided": "#0072b2", "fp4_bf16": "#cc79a7", "run": "#0072b2"}
_MARKERS = {"bf16": "o", "qat": "s", "guided": "^", "fp4_bf16": "D", "run": "o"}
_SITE_LABELS = {"x": "expert input", "k": "K", "v": "V", "w2": "down-projection input"}
_STYLE: Any = {
    "font.size": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#9aa3af",
    "axes.grid": True,
    "grid.color": "#e6e9ee",
    "axes.axisbelow": True,
    "svg.hashsalt": "tracefp4",
}


def label_of(arm: str) -> str:
    """Return the plain-language name of an arm; unknown arms keep their own."""
    return ARM_LABELS.get(arm, arm)


def to_svg(figure: "Figure") -> str:
    """Return a figure as an SVG element, without the XML prologue, the same bytes for the same input."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context(_STYLE):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _axes(width: float = 7.2, height: float = 3.6, columns: int = 1) -> tuple["Figure", list["Axes"]]:
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        grid = figure.subplots(1, columns, squeeze=False, sharey=columns > 1)
    return figure, list(grid[0])


def _smooth(values: Sequence[float], window: int) -> list[float]:
    found = []
    for i in range(len(values)):
        part = values[max(0, i - window + 1) : i + 1]
        found.append(sum(part) / len(part))
    return found


def curves(series: Mapping[str, Sequence[float | None]], *, ylabel: str, is_log: bool = False) -> "Figure":
    """Draw one line per arm over training steps.

    Args:
        series: arm -> one value per step, None where nothing was measured; an empty list draws nothing.
        ylabel: axis label.
        is_log: logarithmic y axis; values that are not positive are left out. Without it, single steps are
            drawn faintly and their running mean over five steps strongly.
    """
    figure, (axes,) = _axes()
    for arm, values in series.items():
        points = [(i + 1, v) for i, v in enumerate(values) if v is not None and (not is_log or v > 0)]
        if not points:
            continue
        steps, heights = zip(*points, strict=True)
        colour, every = _COLOURS.get(arm), max(1, len(steps) // 12)
        shown = list(heights) if is_log else _smooth(heights, 5)
        if not is_log:
            axes.plot(steps, heights, color=colour, linewidth=0.8, alpha=0.3)
        axes.plot(
            steps, shown, color=colour, marker=_MARKERS.get(arm, "o"), markevery=every, markersize=4.5,
            linewidth=1.8, label=label_of(arm),
        )  # fmt: skip
    axes.set_xlabel("training step")
    axes.set_ylabel(ylabel)
    if is_log:
        axes.set_yscale("log")
    if axes.get_lines():
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False)
    return figure


def code_mismatch(rows: Sequence[Mapping[str, Any]]) -> "Figure":
    """Draw the share of differing codes by layer, before and after guidance, one panel per site kind.

    Args:
        rows: `site`, `layer`, `before`, `after` each; shares in [0, 1]. Zeros are drawn on the floor.
    """
    from matplotlib.ticker import MaxNLocator

    kinds = sorted(
        {str(row["site"]) for row in rows},
        key=lambda k: list(_SITE_LABELS).index(k) if k in _SITE_LABELS else 9,
    )
    figure, panels = _axes(width=max(4.2, 2.9 * len(kinds)), columns=len(kinds))
    shares = [float(row[when]) for row in rows for when in ("before", "after")]
    floor = max(min((s for s in shares if s > 0), default=1e-4) / 3, 1e-7)
    for kind, axes in zip(kinds, panels, strict=True):
        chosen = sorted((row for row in rows if row["site"] == kind), key=lambda row: int(row["layer"]))
        layers = [int(row["layer"]) for row in chosen]
        for when, arm, label in (
            ("before", "qat", "rounded to nearest"),
            ("after", "guided", "after guidance"),
        ):
            heights = [max(float(row[when]), floor) for row in chosen]
            axes.plot(layers, heights, color=_COLOURS[arm], marker=_MARKERS[arm], markersize=5, label=label)
        axes.set_yscale("log")
        axes.set_title(_SITE_LABELS.get(kind, kind), fontsize=10.5)
        axes.set_xlabel("layer")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    panels[0].set_ylabel("share of codes that differ")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=2, frameon=False)
    return figure


def accuracy_bars(arms: Mapping[str, Mapping[str, Any]]) -> "Figure":
    """Draw held-out accuracy before and after training, with one standard error each way."""
    figure, (axes,) = _axes(height=3.2)
    width = 0.38
    names = list(arms)
    for shift, when, alpha in ((-0.5, "before", 0.4), (0.5, "after", 1.0)):
        places = [i + shift * width for i in range(len(names))]
        heights = [float(arms[name][f"accuracy_{when}"]) for name in names]
        errors = [float(arms[name][f"accuracy_{when}_se"]) for name in names]
        colours = [_COLOURS.get(name, "#0072b2") for name in names]
        bars = axes.bar(
            places, heights, width * 0.94, yerr=errors, color=colours, alpha=alpha, capsize=4, zorder=3,
            error_kw={"elinewidth": 1.2, "ecolor": "#1f2937"},
        )  # fmt: skip
        axes.bar_label(bars, labels=[f"{height:.1%}\n{when}" for height in heights], padding=3, fontsize=9)
    tallest = max(
        (float(arms[name][f"accuracy_{when}"]) for name in names for when in ("before", "after")), default=1.0
    )
    axes.set_ylim(0, max(tallest, 0.05) * 1.35)
    axes.set_xticks(range(len(names)), [label_of(name) for name in names])
    axes.set_ylabel("held-out accuracy")
    axes.grid(axis="x", visible=False)
    axes.set_axisbelow(True)
    return figure
