"""What the commands that measure engines share: prompts, runs of requests, statistics."""
