"""Doors into other systems: each stands on the client, and is imported where it is used."""
