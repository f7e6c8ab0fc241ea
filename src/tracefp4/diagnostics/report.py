"""Render a run as one self-contained HTML file: tables on top, plots below, every caption in plain words.

Works on a directory that `demo` wrote (`demo.json` with arms) and on one that `train` wrote (`metrics.jsonl`,
one JSON object per step). It reads and draws; it measures nothing and never changes the run.
"""

import html
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tracefp4.diagnostics.figures import accuracy_bars, code_mismatch, curves, label_of, to_svg
from tracefp4.errors import ConfigError

DEMO_FILE = "demo.json"
METRICS_FILE = "metrics.jsonl"
REWARD_KEY = "reward_mean"
MISMATCH_KEY = "mismatch/abs_mean"
MANIFEST_FILE = "manifest.json"
_AGREEMENT = re.compile(r"agreement/(?P<site>\w+)/layer_(?P<layer>\d+)/mismatch_(?P<when>before|after)")

_CSS = """
body { font: 16px/1.55 system-ui, sans-serif; color: #1f2937; background: #fff; max-width: 60rem;
       margin: 2.5rem auto; padding: 0 1.25rem; }
h1 { font-size: 1.7rem; margin-bottom: .2rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
p.lead { font-size: 1.05rem; } p.caption { color: #4b5563; margin-top: .3rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .38rem .8rem; border-bottom: 1px solid #e5e7eb; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } th { color: #4b5563; font-weight: 600; }
svg { max-width: 100%; height: auto; } footer { color: #6b7280; font-size: .85rem; margin-top: 3rem; }
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """A small table, the same for a terminal and for HTML."""

    title: str
    """Heading."""
    header: tuple[str, ...]
    """Column names."""
    rows: tuple[tuple[str, ...], ...]
    """Cells, one string per column."""
    caption: str = ""
    """One or two plain sentences below the table; empty when the title says it all."""


def render(source: Path | str | Mapping[str, Any], *, out: Path | None = None) -> Path:
    """Write report.html for a run directory, or for a demo's result.

    Args:
        source: a directory with `demo.json` or `metrics.jsonl`, or the parsed content of a `demo.json`.
        out: the file to write; by default `report.html` in the run directory. Needed for a parsed result.

    Returns:
        The path of the file, which refers to nothing outside itself.

    Raises:
        ConfigError: the directory holds no run, a file is not valid JSON, or there is nowhere to write.
    """
    if isinstance(source, Mapping):
        if out is None:
            raise ConfigError(
                "report: a parsed result needs the file to write; got out=None. Pass out=Path(...)."
            )
        text, target = _demo_page(source), out
    else:
        run = Path(source)
        target = out or run / "report.html"
        if (run / DEMO_FILE).is_file():
            text = _demo_page(_read_json(run / DEMO_FILE))
        elif (run / METRICS_FILE).is_file():
            manifest = _read_json(run / MANIFEST_FILE) if (run / MANIFEST_FILE).is_file() else {}
            text = _run_page(run.name, read_metrics(run / METRICS_FILE), manifest)
        else:
            raise ConfigError(
                f"report: {run} holds neither {DEMO_FILE} nor {METRICS_FILE}. "
                "Pass the directory that `tracefp4 demo` or `tracefp4 train` wrote."
            )
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, encoding="utf-8")
    return target


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read a metrics file; a torn last line, as a killed process leaves it, is dropped.

    Raises:
        ConfigError: any other line is not a JSON object.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    found = []
    for number, line in enumerate(lines, start=1):
        try:
            found.append(dict(json.loads(line)))
        except (ValueError, TypeError) as error:
            if number == len(lines):
                break
            raise ConfigError(f"report: {path} line {number} is not a JSON object: {error}.") from error
    return found


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"report: {path} is not a JSON object ({error}). Run the demo again.") from error


def number(value: object, *, digits: int = 2) -> str:
    """Format a number for people: `digits` significant digits, a dash for what was not measured."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        return "-"
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    if value == 0:
        return "0"
    if abs(value) < 1e-4:
        return f"{value:.{digits - 1}e}"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:.{decimals}f}"


def summary_tables(result: Mapping[str, Any]) -> list[Table]:
    """Return the demo's tables: what each arm learnt, and what rounding alone does to the log-probs.

    Args:
        result: the content of `demo.json`. Values that are missing show as a dash.
    """
    arms: Mapping[str, Mapping[str, Any]] = result.get("arms", {})
    tables = [_arms_table(arms)]
    rescore: Mapping[str, Mapping[str, Any]] = result.get("rescore", {})
    for when, words in (("first", "first"), ("last", "last")):
        if rescore.get(when):
            tables.append(_rescore_table(rescore[when], words))
    return tables


def _arms_table(arms: Mapping[str, Mapping[str, Any]]) -> Table:
    rows = []
    for name, arm in arms.items():
        gain, error = _gain(arm)
        rows.append(
            (
                label_of(name),
                _share(arm.get("accuracy_before"), arm.get("accuracy_before_se")),
                _share(arm.get("accuracy_after"), arm.get("accuracy_after_se")),
                f"{gain:+.1%} ({gain / error:.1f} SE)" if error else "-",
                number(arm.get("tokens_per_s")),
                number(arm.get("bytes_per_token")),
            )
        )
    header = ("rollout / trainer", "before", "after", "gain", "tokens/s", "B/token")
    caption = (
        "One row per arm: what the rollout computes in, then what the trainer computes in. Accuracy on "
        "held-out problems, one answer each, sampled at temperature 1 and rounded to nearest, as a deployed "
        "model would be; "
        "+- is one standard error, SE in the gain is that of the difference; B/token is what a record of the "
        "rollout's decisions takes."
    )
    return Table(
        title="What each arm learnt: held-out accuracy", header=header, rows=tuple(rows), caption=caption
    )


def _gain(arm: Mapping[str, Any]) -> tuple[float, float]:
    try:
        gain = float(arm["accuracy_after"]) - float(arm["accuracy_before"])
        return gain, math.hypot(float(arm["accuracy_before_se"]), float(arm["accuracy_after_se"]))
    except KeyError:
        return 0.0, 0.0


def _share(value: object, error: object) -> str:
    if not isinstance(value, int | float):
        return "-"
    return f"{100 * value:.1f} +- {error:.1%}" if isinstance(error, int | float) else f"{value:.1%}"


def _rescore_table(rows: Mapping[str, Mapping[str, Any]], when: str) -> Table:
    order = [name for name in ("bf16", "fp4_bf16", "qat", "guided") if name in rows]
    order += [name for name in rows if name not in order]
    floor = rows.get("bf16", {}).get("mean")
    cells = []
    for name in order:
        row = rows[name]
        mean = row.get("mean")
        ratio = "-"
        if isinstance(mean, int | float) and isinstance(floor, int | float) and floor > 0:
            ratio = f"{number(mean / floor)}x"
        measured = (number(row.get(key)) for key in ("mean", "p99", "max", "k3"))
        cells.append((label_of(name), *measured, ratio))
    return Table(
        title=f"The same tokens scored again by each trainer, {when} checkpoint",
        header=("rollout / trainer", "mean |d log p|", "p99", "max", "k3", "of BF16"),
        rows=tuple(cells),
        caption=(
            "d log p is the trainer's log-probability of a sampled token minus the rollout's. Tokens and "
            "weights are the same in every row, and each trainer follows its rollout's expert choices, so "
            "only rounding differs. Lower is better; the BF16 row is the difference that everyone accepts "
            "today."
        ),
    )


def _demo_page(result: Mapping[str, Any]) -> str:
    arms: Mapping[str, Mapping[str, Any]] = result.get("arms", {})
    parts = [f'<p class="lead">{html.escape(_headline(result))}</p>']
    if not result.get("learning_claim", True):
        parts.append(
            "<p>This short form trains too few steps to promise a gain in accuracy; "
            "the long form of the demo carries that claim.</p>"
        )
    parts += [_html_table(table) for table in summary_tables(result)]
    parts += _plots(
        reward={name: arm.get("reward", []) for name, arm in arms.items()},
        mismatch={name: arm.get("mismatch_mean", []) for name, arm in arms.items()},
        agreement=result.get("agreement", {}).get("site", []),
    )
    measured = {
        name: arm for name, arm in arms.items() if "accuracy_after" in arm and "accuracy_before" in arm
    }
    if measured:
        caption = (
            "Held-out accuracy before and after training; the thin lines are one standard error each way."
        )
        parts.append(_section("Accuracy", to_svg(accuracy_bars(measured)), caption))
    return _page("FP4 rollouts with guided rounding", parts, _footer(result))


def _headline(result: Mapping[str, Any]) -> str:
    rows = result.get("rescore", {}).get("last") or result.get("rescore", {}).get("first") or {}
    means = {name: rows.get(name, {}).get("mean") for name in ("bf16", "qat", "guided")}
    text = (
        "One small mixture of experts was trained three times from the same weights, prompts and seeds: "
        "with a BF16 rollout, and with an FP4 rollout that the trainer follows by rounding to nearest "
        "(QAT) or by guided rounding."
    )
    if all(isinstance(mean, int | float) and mean > 0 for mean in means.values()):
        closer, floor = number(means["qat"] / means["guided"]), number(means["guided"] / means["bf16"])
        text += (
            f" On the same tokens and weights, guided rounding brings the trainer {closer} times closer to "
            f"the rollout than nearest rounding, at {floor} times the difference of the BF16 pair."
        )
    return text


def _run_page(name: str, metrics: Sequence[Mapping[str, Any]], manifest: Mapping[str, Any]) -> str:
    if not metrics:
        raise ConfigError(f"report: the run {name} has no finished step yet. Wait for the first one.")
    last = metrics[-1]
    rows = [("steps", number(len(metrics))), ("reward, last step", number(last.get(REWARD_KEY), digits=3))]
    rows.append(("mean |d log p|, last step", number(last.get(MISMATCH_KEY))))
    for step, found in sorted(manifest.get("evaluations", {}).items(), key=lambda item: int(item[0])):
        accuracy = _share(found.get("accuracy"), found.get("standard_error"))
        rows.append((f"held-out accuracy after {step} steps", accuracy))
    parts = [_html_table(Table(title="At a glance", header=("", ""), rows=tuple(rows)))]
    agreement = next((rows for rows in map(_agreement_rows, reversed(metrics)) if rows), [])
    parts += _plots(
        reward={"run": [m[REWARD_KEY] for m in metrics if REWARD_KEY in m]},
        mismatch={"run": [m[MISMATCH_KEY] for m in metrics if MISMATCH_KEY in m]},
        agreement=agreement,
    )
    everything = tuple(
        (key, number(last[key], digits=4)) for key in sorted(last) if isinstance(last[key], int | float)
    )
    parts.append(
        _html_table(Table(title="All metrics of the last step", header=("metric", "value"), rows=everything))
    )
    return _page(f"Run {name}", parts, _footer(manifest))


def _footer(content: Mapping[str, Any]) -> str:
    hardware, versions = (_flat(content.get(key, "not recorded")) for key in ("hardware", "versions"))
    return f"Hardware: {hardware}. Versions: {versions}."


def _agreement_rows(metrics: Mapping[str, Any]) -> list[dict[str, Any]]:
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for key, value in metrics.items():
        match = _AGREEMENT.fullmatch(key)
        if match:
            site = (match["site"], int(match["layer"]))
            found.setdefault(site, {"site": site[0], "layer": site[1]})[match["when"]] = value
    return [row for row in found.values() if "before" in row and "after" in row]


def _plots(
    *,
    reward: Mapping[str, Sequence[float]],
    mismatch: Mapping[str, Sequence[float]],
    agreement: Sequence[Mapping[str, Any]],
) -> list[str]:
    parts = []
    if any(reward.values()):
        caption = "Mean reward of the sampled completions. Faint: single steps; strong: mean over five steps."
        parts.append(_section("Reward", to_svg(curves(reward, ylabel="mean reward")), caption))
    if any(mismatch.values()):
        figure = curves(mismatch, ylabel="mean |d log p|", is_log=True)
        caption = (
            "How far the trainer's log-probabilities are from the rollout's on the tokens that were "
            "sampled, step by "
            "step; logarithmic scale, lower is better."
        )
        parts.append(_section("Distance between trainer and rollout", to_svg(figure), caption))
    if agreement:
        caption = (
            "Share of FP4 codes in which the trainer differs from the rollout, by layer: when it rounds "
            "to nearest on its own, and after it has followed the recorded decisions; logarithmic "
            "scale, zeros lie on the floor."
        )
        parts.append(_section("Codes that differ, by layer", to_svg(code_mismatch(agreement)), caption))
    else:
        parts.append('<p class="caption">Agreement of codes by layer was not measured in this run.</p>')
    return parts


def _flat(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_flat(item)}" for key, item in value.items())
    return str(value)


def _section(title: str, svg: str, caption: str) -> str:
    return f'<h2>{html.escape(title)}</h2>\n{svg}\n<p class="caption">{html.escape(caption)}</p>'


def _html_table(table: Table) -> str:
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in table.header)
    body = "\n".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows
    )
    caption = f'<p class="caption">{html.escape(table.caption)}</p>' if table.caption else ""
    header = f"<thead><tr>{head}</tr></thead>" if any(table.header) else ""
    content = f'<div class="wide"><table>{header}<tbody>{body}</tbody></table></div>'
    return f"<h2>{html.escape(table.title)}</h2>\n{content}\n{caption}"


def _page(title: str, parts: Sequence[str], footer: str) -> str:
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        ""
        f"<title>{html.escape(title)}</title><style>{_CSS}</style></head>\n<body><h1>{html.escape(title)}</h1>\n"
        + "\n".join(parts)
        + f"\n<footer>{html.escape(footer)}</footer></body></html>\n"
    )
