"""What documents show can be used: TOML blocks are parts of recipes, a run reports the metrics that are explained."""

import json
import re
import tomllib
from pathlib import Path

import pytest
from tests.rl.tiny_runs import make_checkpoint, make_config, make_prompts, metrics_of

from tracefp4.bench.guidance_rows import large_bytes
from tracefp4.cli.config import config_from_table
from tracefp4.patching.budget import decisions_for, record_bytes
from tracefp4.patching.catalogue import KNOWN_SHAPES
from tracefp4.patching.rules import PlanRules
from tracefp4.rl.loop import train

ROOT = Path(__file__).parents[2]
TINY = "tests.rl.tiny_runs"
TOML = re.compile(r"```toml\n(.*?)```", flags=re.S)
RESULTS = ROOT / "benchmarks" / "results"
H200 = RESULTS / "guidance_h200.json"
NUMBER = r"\s*([\d.,]+)\s*\|"
METRIC = re.compile(
    r"`((?:mismatch|guidance|gate|transmission|agreement|rounding|records|partial|rollout_corr|training|lag<n>)/[\w/.]+)`"
)
DOCUMENTS = sorted({*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")})
BLOCKS = [
    pytest.param(block, id=f"{path.stem}-{number}")
    for path in DOCUMENTS
    for number, block in enumerate(TOML.findall(path.read_text(encoding="utf-8")))
]


def test_there_are_blocks():
    assert len(BLOCKS) >= 5


@pytest.mark.parametrize("block", BLOCKS)
def test_a_toml_block_is_part_of_a_recipe(block):
    table = tomllib.loads(block)
    table.setdefault("model", {}).setdefault("path", "checkpoints/my-model")
    if "kind" not in table.setdefault("task", {}):
        table["task"] |= {"kind": "reasoning_gym", "name": "chain_sum"}
    config_from_table(table)


def _pattern(name: str) -> re.Pattern[str]:
    """What a metric named in prose stands for: any lag, any layer, anything after three dots."""
    known = re.escape(name).replace(r"lag<n>", r"lag\d+").replace(re.escape("..."), ".+")
    return re.compile(re.sub(r"layer_\d+", r"layer_\\d+", known))


def test_a_run_reports_every_metric_that_guidance_md_names(tmp_path):
    names = METRIC.findall((ROOT / "docs" / "guidance.md").read_text(encoding="utf-8"))
    assert len(set(names)) > 20
    config = make_config(
        make_checkpoint(tmp_path / "start"), make_prompts(tmp_path / "prompts.jsonl"), tmp_path / "run",
        quantization__gate="noise", quantization__guidance="secded", task__reward=f"{TINY}:share_plain",
        train__steps=3, train__rollout_ahead=1, train__agreement_every=1, train__transmission_every=1,
        records__store="directory", rollout__partial_groups=1,
    )  # fmt: skip
    train(config)
    reported = {name for row in metrics_of(config) for name in row}
    assert [name for name in names if not any(_pattern(name).fullmatch(found) for found in reported)] == []


def _measured() -> dict[str, float]:
    """Mean |d| by row of the stored result."""
    return {row["id"]: row["mean"] for row in json.loads(H200.read_text(encoding="utf-8"))["rows"]}


def _is_rounded(text: str, value: float) -> bool:
    """Whether a figure of a table is the value, rounded to the digits that it shows."""
    return round(value, len(text.partition(".")[2])) == float(text)


def _ids_of_the_large_model() -> int:
    shape, rules = KNOWN_SHAPES["qwen3.5-35b-a3b"], PlanRules(guidance="none")
    return record_bytes(shape, decisions_for(shape, rules), rules).total


def test_the_codec_table_is_what_plan_counts_and_what_was_measured():
    text = (ROOT / "docs" / "guidance.md").read_text(encoding="utf-8")
    rows = re.findall(rf"^\| `([\w+]+)` \|[^|]*\|[^|]*\|{NUMBER * 4}$", text, flags=re.M)
    means = _measured()
    assert len(rows) >= 8
    assert re.search(rf"^\| none [^|]*\| \| 0 \| 0 \| 0 \| {_ids_of_the_large_model()} \|", text, flags=re.M)
    for codec, *numbers in rows:
        activations, kv, total = (int(number.replace(",", "")) for number in numbers[:3])
        assert (activations, kv) == large_bytes([codec]), codec
        assert total == activations + kv + 40 + _ids_of_the_large_model(), codec  # row exponents
        assert _is_rounded(numbers[3], means[codec]), codec


def test_the_tables_of_readme_and_log_are_those_of_the_stored_result():
    means = _measured()
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for codec, mean in re.findall(rf"^\| FP4 / FP4 `([\w+]+)`[^|]*\|{NUMBER}", readme, flags=re.M):
        assert _is_rounded(mean, means.pop(codec)), codec
    assert len(means) <= len(_measured()) - 3
    log = (ROOT / "docs" / "log.md").read_text(encoding="utf-8")
    section = log[log.index("guidance codecs on an H200") : log.index("guidance codecs on a CPU")]
    found = re.findall(rf"^\| `([\w+]+)`(?: \*)? \|{NUMBER}", section, flags=re.M)
    assert len(found) == 19
    assert [codec for codec, mean in found if not _is_rounded(mean, _measured()[codec])] == []


def _section(text: str, title: str) -> str:
    begin = text.index(title)
    end = text.find("\n## ", begin)
    return text[begin:] if end < 0 else text[begin:end]


def test_the_cpu_table_of_the_log_is_that_of_its_stored_result():
    result = json.loads((RESULTS / "guidance_cpu.json").read_text(encoding="utf-8"))
    means = {row["id"]: row["mean"] for row in result["rows"]}
    log = (ROOT / "docs" / "log.md").read_text(encoding="utf-8")
    section = _section(log, "guidance codecs on a CPU")
    found = re.findall(rf"^\| `([\w+]+)`[^|]*\|{NUMBER}", section, flags=re.M)
    assert len(found) == 6
    assert [codec for codec, mean in found if not _is_rounded(mean, means[codec])] == []
    half = [row["mean"] for row in result["rows"] if row["layers"] == "last_half"]
    low, high = re.search(r"from ([\d.]+) to ([\d.]+), whole", section).groups()
    assert _is_rounded(low, min(half)) and _is_rounded(high, max(half))
    assert min(half) > result["floor"] > means["bch64_3+coset1"]


@pytest.mark.parametrize(
    ("name", "title"), [("log.md", "how much of an update"), ("guidance.md", "## The noise gate")]
)
def test_the_slopes_of_log_and_guide_are_those_of_the_stored_result(name, title):
    result = json.loads((RESULTS / "guidance_update_cpu.json").read_text(encoding="utf-8"))
    slopes = {
        (row["id"], row["gate"], step): found["slope"]
        for row in result["rows"]
        for step, found in row["transmission"].items()
    }
    section = _section((ROOT / "docs" / name).read_text(encoding="utf-8"), title)
    # the log has both steps without the gate first, the guide each step without and with it
    columns = [("none", "0.0001"), ("none", "0.0003"), ("noise", "0.0001"), ("noise", "0.0003")]
    if name == "guidance.md":
        columns = [columns[0], columns[2], columns[1], columns[3]]
    rows = re.findall(rf"^\| `([\w+]+)` \|{4 * NUMBER}", section, flags=re.M)
    assert len(rows) == 4
    for codec, *written in rows:
        for number, (gate, step) in zip(written, columns, strict=True):
            assert _is_rounded(number, slopes[codec, gate, step]), (codec, gate, step)


def test_the_study_in_log_and_guide_is_that_of_its_stored_result():
    result = json.loads((RESULTS / "following_cpu.json").read_text(encoding="utf-8"))
    assert all(result["claims"].values()) and len(result["runs"]) == 100
    found = {(c["cell"], c["arm"], c["base"]): c for c in result["comparisons"]}
    interval = r"(-?[\d.]+) \[(-?[\d.]+), (-?[\d.]+)\]"
    for name, title, row, pairs in (
        ("log.md", "by which rule", r"^\| lag (\d), (\d) steps? \| (.*\].*) \|$",
         (("gated", "ungated"), ("coded", "ungated"), ("ungated", "qat"), ("coded", "qat"))),
        ("guidance.md", "## The noise gate", r"^\| (\d), (\d) \| (.*\].*) \|$",
         (("gated", "ungated"), ("coded", "ungated"), ("coded", "qat"))),
    ):  # fmt: skip
        section = _section((ROOT / "docs" / name).read_text(encoding="utf-8"), title)
        rows = re.findall(row, section, flags=re.M)
        assert len(rows) == 4
        for lag, steps, text in rows:
            written = re.findall(interval, text)
            assert len(written) == len(pairs)
            for (arm, base), numbers in zip(pairs, written, strict=True):
                pair = found[f"lag{lag}_steps{steps}", arm, base]
                values = (pair["difference"], pair["low"], pair["high"])
                assert all(_is_rounded(*both) for both in zip(numbers, values, strict=True)), (
                    lag,
                    steps,
                    arm,
                )
    log = _section((ROOT / "docs" / "log.md").read_text(encoding="utf-8"), "by which rule")
    cells = re.findall(rf"^\| lag (\d), (\d) steps? \| (\w+) \|{NUMBER * 5}", log, flags=re.M)
    assert len(cells) == 20
    guide = _section((ROOT / "docs" / "guidance.md").read_text(encoding="utf-8"), "## The noise gate")
    rules = {
        "one bit, everywhere": "ungated",
        "one bit, inside the gate": "gated",
        "syndromes, inside the gate": "coded",
    }
    logged = {(arm, lag, steps): numbers[-1] for lag, steps, arm, *numbers in cells}
    for rule, arm in rules.items():
        (row,) = re.findall(rf"^\| {rule} \|{NUMBER * 4}", guide, flags=re.M)
        assert list(row) == [logged[arm, lag, steps] for lag in "03" for steps in "14"], rule
    names = ("area", "accuracy_before", "accuracy_after", "mismatch_mean", "transmission")
    for lag, steps, arm, *numbers in cells:
        runs = [r for r in result["runs"] if (r["cell"], r["arm"]) == (f"lag{lag}_steps{steps}", arm)]
        means = [sum(run[name] for run in runs) / len(runs) for name in names]
        assert all(_is_rounded(*both) for both in zip(numbers, means, strict=True)), (lag, steps, arm)
