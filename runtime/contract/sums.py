"""What programs of several ranks agree on with the run time: their group, memory for one-shot sums.

Each rank shares a piece of its GPU's memory with the others. A kernel that sums has up to PROGRAMS
programs. Each has a place of its own in every rank's memory: a signal from each rank, the number of
its calls so far, and two blocks, which hold what this rank gives in its even and in its odd calls.
Places are in bytes from the beginning; all of it is zeros before the first call.
"""

GROUP = "mtpbuild"  # the process group that compiled programs name
PEERS = "peers"  # of programs with one-shot sums, the constant that says where memories stand

PROGRAMS = 64  # all run at once: each waits for the same one of every rank
BLOCK = 4096  # bytes that a program sums
MOST = PROGRAMS * BLOCK  # bytes of a tensor
RANKS = 16  # a thread holds 16 bytes of each
SIGNALS = 4 * RANKS  # bytes of a program's signals [RANKS] int32, which stand at 0
CALLS = PROGRAMS * SIGNALS  # where [PROGRAMS] int32 stand
BLOCKS = CALLS + 4 * PROGRAMS  # where [PROGRAMS, 2, BLOCK] bytes stand
BYTES = BLOCKS + 2 * MOST
