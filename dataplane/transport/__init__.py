"""How bulk bytes cross hosts."""
