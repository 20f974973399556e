"""Integrations with other systems: each uses the client, and is imported at its first use."""
