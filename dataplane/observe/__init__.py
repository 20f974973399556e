"""What a node does, made visible: its figures as a value and as text."""
