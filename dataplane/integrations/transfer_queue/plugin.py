"""The entry point `verl.plugins`: verl imports this module in every process that imports verl, and calls nothing.

The import replaces the calls of `transfer_queue` if the environment asks for that (`module_patch`).
"""

from dataplane.integrations.transfer_queue.module_patch import if_asked

standing_in = if_asked()
"""Whether the calls were replaced."""
