"""What earlier responses to a prompt tell of the next one: drafts of its tokens, and its length.

Pure: everything here is handed arrays. `plane.history` (`client.histories`) keeps the responses.
"""

from dataplane.history.drafter import Drafter, DraftStatistics, Learnt, Response
from dataplane.history.lengths import Lengths, Past, predict
from dataplane.history.sampling import HistoPipe
from dataplane.history.scheduling import Move, Schedule, plan
from dataplane.history.timeline import Rollouts, Timeline
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
    "Rollouts",
    "Schedule",
    "Timeline",
    "accepted",
    "accepted_of_tree",
    "choose",
    "plan",
    "predict",
]
