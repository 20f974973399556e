"""Who is there: membership of hosts."""
