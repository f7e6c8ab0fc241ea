"""Learning-rate schedules as plain functions of the step: nothing to save, nothing to restore wrongly."""


def warmup_constant(step: int, *, warmup_steps: int) -> float:
    """Rise linearly over `warmup_steps` steps (the first is 1 / warmup_steps), then stay at 1."""
    return min(1.0, (step + 1) / warmup_steps) if warmup_steps > 0 else 1.0


def warmup_linear(step: int, *, warmup_steps: int, total_steps: int, floor: float = 0.0) -> float:
    """Rise linearly to 1 over `warmup_steps`, then fall linearly to `floor` at `total_steps`."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    left = max(0, total_steps - step) / max(1, total_steps - warmup_steps)
    return floor + (1.0 - floor) * left
