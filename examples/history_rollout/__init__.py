"""GRPO over several epochs, whose rollouts are drafted from the epochs before. See `examples/README.md`."""
