"""Streams over hosts: a part on each, put together for who asks; limits; mirrors and moves, as hosts change."""
