"""The number of the contract between builder and run time."""

# Raise it when states, controls or programs come to mean something else to the run time though no
# code changes that a fingerprint sees. Then engines of before are built anew; they still run.
ABI = 1
