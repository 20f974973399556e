"""What a version of weights is: slices of named tensors in chunks of bytes, and what changed between two versions.

Pure: everything here is handed arrays and bytes. `plane.weights` (`client.weights`) stores and reads versions.
"""

from dataplane.weights.slices import Box, Slice

__all__ = ["Box", "Slice"]
