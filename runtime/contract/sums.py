"""The layout of the memory that ranks share for one-shot sums, and the name of their process group.

Each rank shares a piece of its GPU's memory with the others. A kernel launches up to PROGRAMS
programs, and each has its own area in the memory of every rank: one signal per rank, a counter of
its calls, and two blocks with this rank's data in even and in odd calls. Offsets are in bytes from
the start. All bytes are zero before the first call.
"""

GROUP = "mtpbuild"  # the process group that compiled programs name
PEERS = "peers"  # name of the constant with the addresses of the ranks' shared memory

PROGRAMS = 64  # all must run at once, since each waits for its counterpart on every rank
BLOCK = 4096  # bytes that one program sums
MOST = PROGRAMS * BLOCK  # bytes of the largest tensor
RANKS = 16  # at most; a thread keeps 16 bytes of each rank in registers
SIGNALS = 4 * RANKS  # bytes of a program's signals, [RANKS] int32; they begin at offset 0
CALLS = PROGRAMS * SIGNALS  # offset of the call counters, [PROGRAMS] int32
BLOCKS = CALLS + 4 * PROGRAMS  # offset of the blocks, [PROGRAMS, 2, BLOCK] bytes
BYTES = BLOCKS + 2 * MOST
