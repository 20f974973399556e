"""Predictions from earlier responses to a prompt: drafts of the next response's tokens, and its length.

Pure: all functions take arrays. `plane.history` (`client.histories`) stores the responses.
"""

from dataplane.history.drafter import Drafter, DraftStatistics, Learnt, Response
from dataplane.history.lengths import Lengths, Past, predict
from dataplane.history.sampling import HistoPipe
from dataplane.history.scheduling import Move, Schedule, plan
from dataplane.history.verifying import accepted, accepted_of_tree, choose

__all__ = [
    "DraftStatistics",
    "Drafter",
    "HistoPipe",
    "Learnt",
    "Lengths",
    "Move",
    "Past",
    "Response",
    "Schedule",
    "accepted",
    "accepted_of_tree",
    "choose",
    "plan",
    "predict",
]
