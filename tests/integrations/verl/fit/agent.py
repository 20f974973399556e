"""verl's single-turn agent loop, whose session says which response of a prompt the server gives (`agent.yaml`)."""

from __future__ import annotations

from typing import Any

from verl.experimental.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop


class SeededAgentLoop(SingleTurnAgentLoop):
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        return await super().run({**sampling_params, "seed": kwargs["session_id"]}, **kwargs)
