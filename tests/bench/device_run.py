"""Runs both suites of `bench guidance` on a device that is not there; any operation with a host tensor raises."""

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from tests.bench.pretend_device import install, pretend_device

from tracefp4.bench import guidance_run
from tracefp4.bench.guidance_model import SIZES
from tracefp4.bench.guidance_run import GuidanceOptions


def main():
    install()
    SIZES["tiny"] = replace(SIZES["tiny"], steps=3, num_texts=16)
    with pretend_device() as device:
        guidance_run.default_device = lambda: device
        codecs = ("full", "mantissa", "secded", "bch64_3+bch64_2", "auto")
        found = guidance_run.run_guidance(GuidanceOptions(size="tiny", codecs=codecs))
        guidance_run.run_guidance(GuidanceOptions(size="tiny", codecs=("secded",), is_update=True))
    sys.stdout.write(f"{found['device']} {found['arithmetic']}\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
