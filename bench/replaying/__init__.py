"""What `bench.replay` is made of: a trace's steps, run by processes over the plane.

`plan` says what is run and how long each thing takes, `implied` how long all of it takes where bytes cost nothing;
`rollouts`, `rewards` and `ranks` are the processes, `payloads` what they send each other, `running` starts them and
listens, `memory` watches what they use, `fitting` says before if it will not fit, `report` what came of it.
"""
