"""How fast ops and whole models are on this machine, and how close each guidance codec brings a trainer to its rollout.

`row.py` says what one line of a result means, `clock.py` times contenders side by side, `peers.py` calls the other
libraries, `cpu.py` lists the jobs. `kernels.py` is the suite of GPU kernels: cases (`kernel_*.py`) timed as graphs
(`replay.py`) over drawn routing and counted bytes (`routing.py`, `traffic.py`). `engine_run.py` is the suite of whole
models: points (`engine_points.py`) timed (`engine_loads.py`) on engines of random weights (`engine_build.py`,
`engine_weights.py`, `engine_shapes.py`) whose sequences begin in the middle (`engine_decoding.py`), as rows
(`engine_rows.py`) and profiles (`engine_profile.py`). `gate_table.py` says what figures must
reach, `results.py` keeps them, `verdicts.py` judges. `guidance_run.py` is the suite of guidance: a model
(`guidance_model.py`), its rows (`guidance.py`, `guidance_rows.py`), rates (`guidance_speed.py`) and updates
(`guidance_update.py`). This room measures; it never changes what is measured.
"""
