"""Compares dataplane with other systems: the same rows and the same processes, each system in its own environment.

`python -m bench.peers [--only NAME] [--scale 1/16] [--runs 5]` creates the missing environments, and measures. A system
is a module of `bench.peers.systems`. It runs in processes of its own (`bench.peers.process`), which get requests line
by line (`bench.peers.cycle`). Every run compares the checksums of received and sent rows.
"""
