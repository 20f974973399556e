"""Why a step takes as long as it does: causes, found by backtracking over what processes measured of themselves.

After ScalAna (Jin et al., SC 2020, arXiv 2009.01692), for pipelines of roles over streams: a graph of the roles' own
sources (`structure`), figures at its vertices in fixed memory (`recorder`, and `dataplane.waiting` in the node), what
is abnormal among them (`detection`), and the way back along waits to what nobody else delays (`backtracking`). Nothing
is traced.
"""
