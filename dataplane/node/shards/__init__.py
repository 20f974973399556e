"""Shards of other hosts: read where they are, kept as if they were here, stored twice on request, offered to others."""
