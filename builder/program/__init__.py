"""The programs of an engine: the step with its drafting and acceptance, prefill, their export."""
