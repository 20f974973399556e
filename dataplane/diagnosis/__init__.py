"""Explains the duration of a step by causes, which are found by backtracking over measurements of the processes.

After ScalAna (Jin et al., SC 2020, arXiv 2009.01692), for pipelines of roles over streams: a graph of the roles' source
files (`structure`), measurements at its vertices in fixed memory (`recorder`, and `dataplane.waiting` in the node),
anomalies among the measurements (`detection`), and backtracking along waits to a cause that nothing else delays
(`backtracking`). Nothing is traced.
"""
