"""The version of the contract between builder and runtime."""

# Increase it when the runtime reads states, controls or programs in a new way, but no source file
# that a build's fingerprint hashes has changed. The next build of an engine then starts again in
# place of keeping the old one, which still runs.
ABI = 1
