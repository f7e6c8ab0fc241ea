"""Every GPU kernel begins by awaiting the launches before it.

From sm_90 on kernels are launched so that they may start before the one ahead of them in the stream has ended
(`ops/device.py`). One that reads or writes memory before `await_earlier` races with it, and no emulation shows that.
"""

import re
from pathlib import Path

import pytest

OPS = Path(__file__).parents[2] / "src" / "tracefp4" / "ops"
FILES = sorted(OPS.rglob("*.cu"))
_BODY = re.compile(r"^KERNEL\b[^{]*\{\s*(\w+\([^;]*\);)?", re.MULTILINE)


def unlike_kernels(text):
    """Return the first statements of kernels that begin with another one."""
    return [found for found in _BODY.findall(text) if found != "await_earlier();"]


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(OPS)) for path in FILES])
def test_kernels_await_earlier_launches(path):
    text = path.read_text()
    assert len(_BODY.findall(text)) == len(re.findall(r"^KERNEL\b", text, re.MULTILINE)) > 0
    assert unlike_kernels(text) == []


def test_the_rule_sees_kernels_that_do_not():
    good = "KERNEL __launch_bounds__(32, 1) one(const int *x,\n    int n) {\n    await_earlier();\n    int i;\n}\n"
    assert unlike_kernels(good) == []
    late = good.replace("    await_earlier();\n    int i;", "    int i = x[0];\n    await_earlier();")
    assert unlike_kernels(late) == [""] and unlike_kernels(good.replace("await", "skip")) == [
        "skip_earlier();"
    ]
