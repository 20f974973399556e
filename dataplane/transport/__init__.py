"""Transports, which move bulk bytes between hosts."""
