"""The version of the contract between builder and runtime."""

# Raise it when the runtime reads states, controls or programs in a new way and no source file that
# the fingerprint hashes has changed. Builds then make existing engines again; existing engines
# still run.
ABI = 1
