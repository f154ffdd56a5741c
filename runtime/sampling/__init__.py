"""The settings of a request: `SamplingParams`, one table for every interface, and its forms."""
