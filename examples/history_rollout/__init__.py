"""GRPO over several epochs, with rollouts drafted from responses of earlier epochs. See `examples/README.md`."""
