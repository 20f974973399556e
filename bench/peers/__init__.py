"""What users would pick instead, side by side: the same rows, the same processes, each system in its own environment.

`python -m bench.peers [--only NAME] [--scale 1/16] [--runs 5]` makes the environments that are missing, and measures.
A system is a module of `bench.peers.systems`; it runs in processes of its own (`bench.peers.process`) that are told
what to do line by line (`bench.peers.cycle`). What arrives is compared with what was sent, by checksum, in every run.
"""
