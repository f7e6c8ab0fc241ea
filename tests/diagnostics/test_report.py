"""The report: complete, self-contained, honest about what was not measured."""

import json
import re
from xml.etree import ElementTree

import pytest

from tracefp4.diagnostics import figures
from tracefp4.diagnostics.report import Table, number, read_metrics, render, summary_tables
from tracefp4.errors import ConfigError


def _arm(before: float, after: float, mismatch: float, num_bytes: float) -> dict:
    return {
        "reward": [0.3, 0.35, 0.4],
        "mismatch_mean": [mismatch, mismatch * 1.1, mismatch],
        "accuracy_before": before,
        "accuracy_before_se": 0.02,
        "accuracy_after": after,
        "accuracy_after_se": 0.02,
        "tokens_per_s": 2100.4,
        "bytes_per_token": num_bytes,
    }


def _row(mean: float) -> dict:
    return {"mean": mean, "p99": mean * 20, "max": mean * 80, "k3": mean**2}


@pytest.fixture
def demo() -> dict:
    rows = [
        {
            "site": site,
            "layer": layer,
            "before": 0.001 * 2**layer,
            "after": 0.0 if layer == 0 else 0.0002,
            "scales": 0.01,
        }
        for site in ("x", "k", "v")
        for layer in range(3)
    ]
    return {
        "hardware": {"cpu": "some <cpu>", "cores": 2},
        "versions": {"torch": "2.13.0"},
        "arms": {
            "bf16": _arm(0.3, 0.5, 0.002, 0),
            "qat": _arm(0.3, 0.4, 0.012, 0),
            "guided": _arm(0.3, 0.49, 0.0015, 2160),
        },
        "rescore": {
            "first": {
                "bf16": _row(0.002),
                "qat": _row(0.012),
                "guided": _row(0.0015),
                "fp4_bf16": _row(0.034),
            },
            "last": {"bf16": _row(0.0025), "qat": _row(0.015), "guided": _row(0.002)},
        },
        "agreement": {"site": rows},
        "learning_claim": True,
    }


def _svgs(text: str) -> list[str]:
    return re.findall(r"<svg.*?</svg>", text, flags=re.S)


def test_demo_report_is_whole_and_self_contained(demo, tmp_path):
    (tmp_path / "demo.json").write_text(json.dumps(demo))
    path = render(tmp_path)
    text = path.read_text(encoding="utf-8")
    assert path == tmp_path / "report.html"
    assert len(_svgs(text)) == 4
    for svg in _svgs(text):
        ElementTree.fromstring(svg)
    outside = [url for url in re.findall(r'(?:src|href)="([^"]+)"', text) if not url.startswith("#")]
    assert outside == [] and "<script" not in text
    assert "some &lt;cpu&gt;" in text
    assert "7.5 times closer" in text and "0.80 times the difference" in text
    assert "30.0 +- 2.0%" in text and "+20.0% (7.1 SE)" in text
    assert "<td>2,160</td>" in text


def test_the_same_result_gives_the_same_bytes(demo, tmp_path):
    first = render(demo, out=tmp_path / "a.html").read_bytes()
    assert render(demo, out=tmp_path / "b.html").read_bytes() == first


def test_tables_put_the_bf16_floor_first_and_relate_to_it(demo):
    arms, first, last = summary_tables(demo)
    assert [row[0] for row in first.rows] == [
        "BF16 / BF16",
        "FP4 / BF16",
        "FP4 / FP4 nearest (QAT)",
        "FP4 / FP4 guided",
    ]
    assert [row[-1] for row in first.rows] == ["1.0x", "17x", "6.0x", "0.75x"]
    assert len(last.rows) == 3
    assert arms.rows[2][-1] == "2,160"


def test_missing_measurements_show_as_dashes_not_zeros(demo, tmp_path):
    del demo["arms"]["qat"]["accuracy_after"], demo["arms"]["qat"]["tokens_per_s"], demo["agreement"]
    demo["rescore"] = {"first": {"guided": {"mean": 0.001}}}
    arms, rescored = summary_tables(demo)
    assert arms.rows[1][2:5] == ("-", "-", "-")
    assert rescored.rows[0] == ("FP4 / FP4 guided", "0.0010", "-", "-", "-", "-")
    text = render(demo, out=tmp_path / "r.html").read_text()
    assert "was not measured" in text
    assert "times closer" not in text


def test_without_the_learning_claim_the_page_says_so(demo, tmp_path):
    demo["learning_claim"] = False
    assert "too few steps to promise" in render(demo, out=tmp_path / "r.html").read_text()


def test_run_report_reads_metrics_and_manifest(tmp_path):
    rows = [
        {
            "step": i,
            "reward_mean": 0.1 * i,
            "mismatch/abs_mean": 0.002,
            "agreement/x/layer_0/mismatch_before": 0.01,
            "agreement/x/layer_0/mismatch_after": 0.001,
            "note": "text",
        }
        for i in range(3)
    ]
    lines = [json.dumps(row) for row in rows]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 3, "rew']))
    evaluations = {
        "0": {"accuracy": 0.25, "standard_error": 0.02},
        "10": {"accuracy": 0.5, "standard_error": 0.02},
    }
    (tmp_path / "manifest.json").write_text(
        json.dumps({"evaluations": evaluations, "versions": {"torch": "2.13"}})
    )
    text = render(tmp_path).read_text()
    assert len(_svgs(text)) == 3
    assert "held-out accuracy after 10 steps</td><td>50.0 +- 2.0%" in text
    assert "torch 2.13" in text
    (tmp_path / "manifest.json").unlink()
    assert "not recorded" in render(tmp_path).read_text()


def test_refusals(tmp_path, demo):
    with pytest.raises(ConfigError, match=r"neither demo.json nor metrics.jsonl"):
        render(tmp_path)
    with pytest.raises(ConfigError, match="needs the file to write"):
        render(demo)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ConfigError, match="no finished step"):
        render(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\nbroken\n{"step": 2}\n')
    with pytest.raises(ConfigError, match="line 2 is not a JSON object"):
        read_metrics(tmp_path / "metrics.jsonl")
    (tmp_path / "demo.json").write_text("[")
    with pytest.raises(ConfigError, match="not a JSON object"):
        render(tmp_path)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.0, "0"),
        (1234567, "1,234,567"),
        (0.00123, "0.0012"),
        (0.0345, "0.035"),
        (1.26, "1.3"),
        (12.34, "12"),
        (3.1e-6, "3.1e-06"),
        (-0.5, "-0.50"),
        (None, "-"),
        (True, "-"),
        (float("nan"), "-"),
        (float("inf"), "-"),
        ("x", "-"),
    ],
)
def test_numbers_for_people(value, text):
    assert number(value) == text


def test_text_is_escaped(demo, tmp_path):
    demo["arms"]["<b>"] = demo["arms"].pop("qat")
    text = render(demo, out=tmp_path / "r.html").read_text()
    assert "<td>&lt;b&gt;</td>" in text and "<td><b></td>" not in text


def test_log_curves_leave_out_what_has_no_logarithm():
    figure = figures.curves({"bf16": [0.0, 0.1, -1.0, 0.2], "qat": []}, ylabel="y", is_log=True)
    (line,) = figure.axes[0].get_lines()
    assert list(line.get_xdata()) == [2, 4]


def test_drawing_changes_no_global_state(demo):
    import matplotlib

    before = dict(matplotlib.rcParams)
    figures.to_svg(figures.accuracy_bars(demo["arms"]))
    figures.to_svg(figures.code_mismatch(demo["agreement"]["site"]))
    assert dict(matplotlib.rcParams) == before


def test_a_table_is_plain_data():
    assert Table(title="t", header=("a",), rows=(("1",),)).caption == ""
