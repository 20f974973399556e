"""GRPO over several epochs, with drafts from earlier epochs. See `examples/README.md`."""
