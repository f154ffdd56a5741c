"""The parts of `one_machine.py`."""
