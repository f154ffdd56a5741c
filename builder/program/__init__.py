"""The programs of an engine: one step, its drafting and acceptance, prefill, and their export."""
