"""The parts of `bench.replay`: a trace's steps, run by processes over the plane.

`plan` has the rows, processes and times of a replay. `implied` computes its times if moving data takes no time.
`rollouts`, `rewards` and `ranks` are the processes, and `payloads` the bytes of rows. `running` starts the processes
and receives their messages (`telling`). `memory` samples memory, `fitting` checks sizes before a run, and `report`
makes the results.
"""
