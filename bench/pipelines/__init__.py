"""What `python -m bench.pipelines` is made of: `accuracy` holds the performance model against real runs, `models` what
is planned for published models against interleaved 1F1B, `defaults` what is planned for the demo and two replays
against their default settings, `waits` and `demo` are the stages and chunks that workers run.
"""
