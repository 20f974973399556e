"""The parts of `python -m bench.pipelines`. `accuracy` compares the performance model with real runs. `models` compares
plans of published models with interleaved 1F1B. `defaults` compares plans of the demo and of two replays with their
default settings. `waits` and `demo` have the stages and chunks that workers run.
"""
