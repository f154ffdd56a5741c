"""The prefix cache: rows of earlier prompts, in memory and files, for prompts that begin alike."""
