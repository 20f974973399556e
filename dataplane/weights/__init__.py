"""The format of versions of weights: slices of named tensors in chunks of bytes, and differences between two versions.

Pure: all functions take arrays and bytes. `plane.weights` (`client.weights`) stores and reads versions.
"""

from dataplane.weights.slices import Box, Slice

__all__ = ["Box", "Slice"]
