"""Why a step takes as long as it does: causes, found by backtracking over the measurements of processes.

After ScalAna (Jin et al., SC 2020, arXiv 2009.01692), for pipelines of roles over streams: a graph of the roles' own
sources (`structure`), measurements at its vertices in fixed memory (`recorder`, and `dataplane.waiting` in the
node), anomalies among them (`detection`), and backtracking along waits to a cause that nothing else delays
(`backtracking`). Nothing is traced.
"""
