"""Run functions on a few processes that talk over gloo, and bring back what every rank returned.

All functions of one call share the processes: starting them costs more than what they do. A function that raises on a
rank gives its traceback there; the others then fail on the broken connection, or after the time limit.
"""

import os
import subprocess
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
# seconds; alone on a machine it takes 15, among much other work minutes
TIME_LIMIT = 900


def run_on_ranks(functions, folder: Path, *, num_ranks: int = 2) -> dict[str, list]:
    """Return for every function of `rank_passes` and `rank_checks` its result on each rank."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}"}
    command = [sys.executable, "-m", "tests.parity.ranks", str(num_ranks), str(folder), *functions]
    started = [
        subprocess.Popen(
            [*command[:3], str(rank), *command[3:]],
            env=environment,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    try:
        outputs = [process.communicate(timeout=TIME_LIMIT)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    found: dict[str, list] = {}
    for name in functions:
        paths = [folder / f"{name}.{rank}.pt" for rank in range(num_ranks)]
        missing = [rank for rank, path in enumerate(paths) if not path.exists()]
        assert not missing, f"{name} gave nothing on ranks {missing}:\n" + "\n".join(outputs)
        found[name] = [torch.load(path, weights_only=False) for path in paths]
        for rank, result in enumerate(found[name]):
            assert not isinstance(result, str), f"{name} on rank {rank}:\n{result}\n{outputs[rank]}"
    return found


def main(rank: int, num_ranks: int, folder: Path, names: list[str]) -> None:
    import torch.distributed as dist
    from tests.parity import rank_checks, rank_passes

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'rendezvous'}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=300),
    )
    for name in names:
        torch.manual_seed(0)
        try:
            module = rank_passes if hasattr(rank_passes, name) else rank_checks
            result = getattr(module, name)(rank)
        except Exception:
            torch.save(traceback.format_exc(), folder / f"{name}.{rank}.pt")
            os._exit(1)
        torch.save(result, folder / f"{name}.{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
