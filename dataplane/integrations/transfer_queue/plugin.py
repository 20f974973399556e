"""The entry point `verl.plugins`: verl imports this in every process that imports verl, and calls nothing.

So importing it stands in for `transfer_queue`, where the environment asks for that (`standing`).
"""

from dataplane.integrations.transfer_queue.standing import if_asked

standing_in = if_asked()
"""Whether it does."""
