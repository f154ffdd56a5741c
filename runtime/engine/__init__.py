"""The engine: the loop of prompts and steps, its thread, and `Engine`, which services embed."""
