"""The contract between builder and runtime: states, controls, programs and manifest. No torch."""
