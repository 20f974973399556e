"""A user's process: the plane and what it hands out."""
