"""A process that has imported the heavy libraries once and forks a child for every run of pytest that it is asked for.

It reads one job a line from stdin, as JSON: `arguments` of pytest, `environment` to add, `log` for what pytest prints,
`timeout_s`. It answers with one line of JSON: `code`, the exit code, or null where the time was over and the child was
killed with everything it had started. It imports nothing of the tree, so every child sees the files as they are.
"""

import json
import os
import signal
import sys
import time

POLL_S = 0.01


def preload() -> None:
    """Import what nearly every test imports and no mutation touches."""
    import hypothesis
    import numpy
    import pytest
    import safetensors
    import torch
    import transformers

    _ = (hypothesis, numpy, pytest, safetensors, torch.nn.functional, transformers.Qwen3MoeForCausalLM)
    _ = (transformers.PreTrainedTokenizerFast, transformers.GenerationConfig)
    foreign = sorted(name for name in sys.modules if name.partition(".")[0] in ("tracefp4", "tests"))
    assert not foreign, f"a mutation could not reach {foreign}"


def run_child(job: dict) -> None:
    """Run pytest in this process, which is the child, and end it."""
    import pytest

    os.setsid()
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.environ.update(job["environment"])
    code = 3
    try:
        code = int(pytest.main(job["arguments"]))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def await_child(child: int, timeout_s: float) -> int | None:
    """Wait for the child; kill it and what it started when the time is over."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(POLL_S)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def main() -> None:
    """Answer jobs until stdin ends."""
    preload()
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            run_child(job)
        sys.stdout.write(json.dumps({"code": await_child(child, job["timeout_s"])}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.path.pop(0)
    main()
