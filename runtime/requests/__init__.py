"""A request: its controls, its slot, its figures, and the scheduler that gives slots."""
