"""verl's own V1 trainer, run from its entry point by its configuration, on a host without a GPU or a network.

verl's are: the configuration, the data set and its loader, `AgentLoopManagerTQ` and its workers, the single-turn agent
loop, the replay buffer, the reward loop, the worker groups with `tqbridge`, advantages, losses, metrics, checkpoints.
Made up are two things, at the places where verl takes others': what the language model generates (`server`, `rollout`),
and what actor and reference compute (`engine`); and how weights go from one to the other where they are apart
(`weights`).

verl's processes import this package as `fit`: verl installs a package `tests` of its own, which would be found first.
"""
