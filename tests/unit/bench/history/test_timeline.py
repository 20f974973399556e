"""What becomes of schedules in the model of the benchmark."""

from __future__ import annotations

import numpy as np
import pytest

from bench.history.timeline import Rollouts
from dataplane.history.lengths import Past, predict
from dataplane.history.scheduling import BASE, plan


def test_a_timeline_agrees_with_the_cost_model() -> None:
    schedule = plan(predict([Past([(0, 100)]), Past([(0, 40)])]), 2)
    timeline = Rollouts([schedule], [np.array([[100.0], [40.0]])]).run()
    assert timeline.duration == pytest.approx(100 * (BASE + 1))
    assert timeline.idle == pytest.approx(60 * (BASE + 1))
    drafted = Rollouts([schedule], [np.array([[100.0], [40.0]])], pace=4, each=2).run()
    assert drafted.duration == pytest.approx(25 * (BASE + 2))
