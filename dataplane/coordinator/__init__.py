"""The coordinator: a linearizable store of small values and of who is a member. `base` is the interface."""
