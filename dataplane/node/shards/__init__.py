"""Shards of other hosts: read where they are, kept as local copies, replicated on request, offered to others."""
