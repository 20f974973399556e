"""The coordinator: a linearizable store of small values and of the cluster's members. `base` is the interface."""
