"""Observability of a node: its statistics as values and as text, metrics, traces."""
