"""Transports: how bulk bytes move between hosts."""
