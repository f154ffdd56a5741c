"""Executes a program with many threads; the threads that are furthest behind go first."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.support.ptx_machine.arithmetic import function_of, numpy_type, unsigned
from tests.support.ptx_machine.memory import UNKNOWN, Memory, PtxError, Shared, Tensors, Watch
from tests.support.ptx_machine.program import (
    Address,
    Immediate,
    Instruction,
    Operand,
    Program,
    Register,
    Scalar,
    Symbol,
    Vector,
    parse,
)
from tests.support.ptx_machine.traffic import Traffic
from tests.support.ptx_machine.warp import matrices_of_rows, product, rows_of_matrices, shuffled

Array = NDArray[Any]
WARP = 32
REDUCED = {"add": np.add, "min": np.fmin, "max": np.fmax}
PADDING = {"fence", "membar", "griddepcontrol"}


def run_assembly(text: str, given: dict[str, Array]) -> dict[str, Array]:
    """Run inline assembly on registers of many threads; return all registers."""
    program, threads = parse(text), len(next(iter(given.values())))
    machine = Machine(program, 1, threads, 0)
    machine.known |= given
    machine.run()
    return machine.known


class Machine:
    """Executes some of a grid's programs; `known` has registers, each an array over threads."""

    def __init__(self, program: Program, programs: int, threads: int, shared: int) -> None:
        self.program, self.lanes, self.threads = program, programs * threads, threads
        self.tensors, self.parameters = Tensors([], []), list[int]()
        self.first = 0  # the first of the grid's programs that run here
        self.shared = Shared(programs, shared)
        self.traffic: Traffic | None = None  # counts accesses to shared memory, if given
        self.local = Memory(program.local * self.lanes)
        lane = np.arange(self.lanes)
        self._program = lane // threads
        self._barriers = np.zeros(programs, np.int64)
        self.known: dict[str, Array] = {
            "%tid.x": (lane % threads).astype(np.uint32),
            "%laneid": (lane % WARP).astype(np.uint32),
        }
        self._committed = np.zeros(self.lanes, np.int64)  # groups of copies
        self._copies: list[tuple[Array, Array, Array, Array]] = []  # lanes, groups, to, bytes
        self._ended = np.zeros(self.lanes, np.bool_)

    def run(self) -> None:
        """Execute to the end; threads that diverge join again at the same instruction."""
        waiting = {0: np.ones(self.lanes, np.bool_)}
        with np.errstate(all="ignore"):
            while waiting:
                at = min(waiting)
                here = waiting.pop(at)
                while here.any() and at < len(self.program.instructions):
                    if at in waiting:
                        here = here | waiting.pop(at)
                    if waiting and min(waiting) < at:
                        waiting[at] = here
                        break
                    at, here = self._step(at, here, waiting)

    def _step(self, at: int, here: Array, waiting: dict[int, Array]) -> tuple[int, Array]:
        instruction = self.program.instructions[at]
        able = here
        if instruction.guard is not None:
            register, wanted = instruction.guard
            able = here & (self.known[register.name] == wanted)
        verb = instruction.name[0]
        if verb == "bra":
            (target,) = instruction.operands
            assert isinstance(target, Symbol)
            place = self.program.labels[target.name]
            if able.any():
                waiting[place] = waiting.get(place, False) | able
            return at + 1, here & ~able
        if verb in ("ret", "exit"):
            self._ended |= able
            return at + 1, here & ~able
        lanes = slice(None) if able.all() else np.flatnonzero(able)
        if able.any():
            try:
                self._do(instruction, able, lanes)
            except (KeyError, IndexError) as error:
                raise NotImplementedError(f"{error!r} in {instruction.text}") from error
            except PtxError as error:
                raise PtxError(f"{instruction.text}: {error}") from None
        return at + 1, here

    def _do(self, instruction: Instruction, able: Array, lanes: Any) -> None:
        name, operands = instruction.name, instruction.operands
        match name[0]:
            case "ld":
                self._load(name, operands, lanes)
            case "st":
                self._store(name, operands, lanes)
            case "mov" if any(isinstance(each, Vector) for each in operands):
                self._move_parts(name[-1], operands, lanes)
            case "bar" | "barrier":
                self._meet(name, operands, able)
            case "cp":
                self._copy(name, operands, lanes)
            case "ldmatrix" | "stmatrix" | "mma" | "shfl" | "redux":
                self._as_warps(name, operands, able)
            case verb if verb not in PADDING:
                kinds, function = function_of(name)
                to, *given = operands
                values = (self._value(x, k, lanes) for x, k in zip(given, kinds, strict=False))
                self._set(to, function(*values), lanes)

    def _value(self, operand: Operand, kind: Any, lanes: Any) -> Array:
        """Return an operand of the active threads as that type: a wide register's lowest bits."""
        kind = np.dtype(kind)
        bits = 8 * kind.itemsize
        count = self.lanes if isinstance(lanes, slice) else len(lanes)
        match operand:
            case Immediate(value):
                if kind == np.bool_:
                    return np.full(count, bool(value))
                whole = np.array([value & (1 << bits) - 1], f"u{kind.itemsize}")
                return np.broadcast_to(whole.view(kind), (count,))
            case Symbol():
                return np.zeros(count, kind)  # start of shared memory, or of a thread's own
            case Register(name) if name not in self.known:  # a half that is never read
                return np.full(kind.itemsize * count, UNKNOWN, np.uint8).view(kind)
            case Register(name):
                held = self.known[name][lanes]
                if held.dtype.itemsize != kind.itemsize:
                    held = held.astype(f"u{kind.itemsize}")
                return held.view(kind)
        raise AssertionError(operand)

    def _set(self, to: Operand, value: Array, lanes: Any) -> None:
        assert isinstance(to, Register)
        width = self.program.widths.get(to.name) or self.program.widths.get(
            to.name.rstrip("0123456789"), 32
        )
        kind = np.bool_ if width == 1 else f"u{width // 8}"
        if width != 1 and value.dtype.itemsize != width // 8:
            value = value.astype(f"{'i' if value.dtype.kind == 'i' else 'u'}{width // 8}")
        if isinstance(lanes, slice):
            self.known[to.name] = np.array(unsigned(value), kind)
            return
        if to.name not in self.known:
            self.known[to.name] = np.zeros(self.lanes, kind)
        self.known[to.name][lanes] = unsigned(value)

    def _addresses(self, operand: Operand, lanes: Any) -> Array:
        assert isinstance(operand, Address)
        wide = isinstance(operand.base, Register) and self.known[operand.base.name].itemsize == 8
        base = self._value(operand.base, np.int64 if wide else np.int32, lanes)
        return base.astype(np.int64) + operand.offset

    def _load(self, name: tuple[str, ...], operands: Sequence[Operand], lanes: Any) -> None:
        to, where = operands
        kind = np.dtype(numpy_type(name[-1]))
        if name[1] == "param":
            assert isinstance(where, Address)
            assert isinstance(where.base, Symbol)
            number = int(where.base.name.rpartition("_")[2])
            parameter = Immediate(self.parameters[number])
            self._set(to, self._value(parameter, kind, lanes), lanes)
            return
        addresses, width = self._addresses(where, lanes), kind.itemsize
        if name[1].startswith("shared"):
            self._count(lanes, addresses, width * len(_parts(to)))
        for i, register in enumerate(_parts(to)):
            value = self._load_from(name[1], addresses + i * width, width, lanes)
            self._set(register, value.view(kind), lanes)

    def _load_from(self, space: str, addresses: Array, width: int, lanes: Any) -> Array:
        if space.startswith("shared"):
            who = self._who(lanes), self._program[lanes]
            return self.shared.load_by(*who, addresses, width)
        if space == "local":
            return self.local.load(self._own(addresses, width, lanes), width)
        return self.tensors.load_by(self._who(lanes), addresses, width)

    def _who(self, lanes: Any) -> Array:
        """Return the numbers by which a `Watch` knows programs, barriers met, and warps."""
        program = self._program[lanes]
        warp = np.arange(self.lanes)[lanes] % self.threads // WARP
        met = (self._barriers[program] + 1 << 24) + self.first + program
        who: Array = met * Watch.WARPS + warp
        return who

    def _own(self, addresses: Array, width: int, lanes: Any) -> Array:
        """Return the index in `local` of each thread's own bytes."""
        if (addresses + width > self.program.local).any():
            raise PtxError(f"a thread has {self.program.local} bytes of its own")
        return np.arange(self.lanes)[lanes] * self.program.local + addresses

    def _store(self, name: tuple[str, ...], operands: Sequence[Operand], lanes: Any) -> None:
        where, given = operands
        kind = np.dtype(numpy_type(name[-1]))
        addresses, width = self._addresses(where, lanes), kind.itemsize
        if name[1].startswith("shared"):
            self._count(lanes, addresses, width * len(_parts(given)))
        for i, register in enumerate(_parts(given)):
            value = unsigned(self._value(register, kind, lanes))
            if name[1].startswith("shared"):
                who = self._who(lanes), self._program[lanes]
                self.shared.store_by(*who, addresses + i * width, value)
            elif name[1] == "local":
                self.local.store(self._own(addresses + i * width, width, lanes), value)
            else:
                self.tensors.store_by(self._who(lanes), addresses + i * width, value)

    def _count(self, lanes: Any, offsets: Array, width: int) -> None:
        if self.traffic is not None:
            self.traffic.add(np.arange(self.lanes)[lanes], offsets, width)

    def _move_parts(self, kind: str, operands: Sequence[Operand], lanes: Any) -> None:
        """Move values between a register and its parts, the lowest first."""
        to, given = operands
        whole = np.dtype(numpy_type(kind))
        parts = _parts(to if isinstance(to, Vector) else given)
        bits = 8 * whole.itemsize // len(parts)
        if isinstance(to, Vector):
            held = self._value(given, whole, lanes)
            for i, register in enumerate(parts):
                self._set(register, (held >> whole.type(bits * i)).astype(f"u{bits // 8}"), lanes)
            return
        values = (self._value(part, f"u{bits // 8}", lanes).astype(whole) for part in parts)
        moved = [value << whole.type(bits * i) for i, value in enumerate(values)]
        self._set(to, np.bitwise_or.reduce(moved), lanes)

    def _meet(self, name: tuple[str, ...], operands: Sequence[Operand], able: Array) -> None:
        """Pass a barrier of a program's threads; raise PtxError unless all have come to it."""
        if name[1] == "warp":
            return
        assert operands == (Immediate(0),), "barriers of some threads are not known"
        programs = able.reshape(-1, self.threads)
        there = programs.any(1)
        if not (programs | self._ended.reshape(programs.shape))[there].all():
            raise PtxError("some threads of a program do not come to the barrier")
        self._barriers[there] += 1

    def _copy(self, name: tuple[str, ...], operands: Sequence[Operand], lanes: Any) -> None:
        """Execute cp.async: bytes are read at once, and arrive when the program waits for them.

        On a GPU they might arrive at once, so nobody may still read the memory that they overwrite.
        """
        assert name[1] == "async"
        if name[2] == "commit_group":
            self._committed[lanes] += 1
            return
        every = np.arange(self.lanes)[lanes]
        if name[2] in ("wait_group", "wait_all"):
            still_open = operands[0] if operands else Immediate(-1)
            assert isinstance(still_open, Immediate)
            self._arrive(every, still_open.bits)
            return
        to, source, size, *taken = operands
        assert isinstance(size, Immediate)
        wanted = self._value(taken[0] if taken else size, np.int64, lanes)
        data = np.zeros((len(every), size.bits), np.uint8)
        some = wanted > 0
        if not np.isin(wanted, (0, size.bits)).all():
            raise PtxError("copies of a part are not known")
        at = self.tensors.index(self._addresses(source, lanes)[some], size.bits)
        data[some] = self.tensors.bytes[at[:, None] + np.arange(size.bits)]
        places = self._addresses(to, lanes)
        self._count(lanes, places, size.bits)
        self.shared.claim(self._who(lanes), self._program[lanes], places, size.bits)
        self._copies.append((every, self._committed[lanes].copy(), places, data))

    def _arrive(self, lanes: Array, still_open: int) -> None:
        waits = np.zeros(self.lanes, np.bool_)
        waits[lanes] = True
        left = []
        for who, groups, to, data in self._copies:
            now = waits[who] & (groups < self._committed[who] - max(still_open, 0))
            if still_open < 0:
                now = waits[who]
            if now.any():
                for i in range(0, data.shape[1], 4):
                    word = data[now, i : i + 4].copy().view(np.uint32)[:, 0]
                    own = self._who(who[now]), self._program[who[now]]
                    self.shared.store_by(*own, to[now] + i, word)
            if not now.all():
                left.append((who[~now], groups[~now], to[~now], data[~now]))
        self._copies = left

    def _as_warps(self, name: tuple[str, ...], operands: Sequence[Operand], able: Array) -> None:
        """Execute an instruction of whole warps; values are [warps, 32]."""
        warps = able.reshape(-1, WARP)
        some = warps.any(1)
        if not warps[some].all():
            raise PtxError("some threads of a warp are elsewhere")
        lanes: Any = slice(None) if some.all() else np.flatnonzero(able)

        def value(operand: Operand, kind: Any = np.uint32) -> Array:
            return self._value(operand, kind, lanes).reshape(-1, WARP)

        def put(to: Operand, results: Sequence[Array]) -> None:
            for register, result in zip(_parts(to), results, strict=True):
                self._set(register, np.ascontiguousarray(result).reshape(-1), lanes)

        match name[0]:
            case "mma":
                assert name[3] in ("m16n8k16", "m16n8k8")
                to, *factors = operands
                a, b, c = ([value(part) for part in _parts(each)] for each in factors)
                put(to, product(name[7], a, b, [part.view(np.float32) for part in c]))
            case "shfl":
                to, given, by, clamp, _ = operands
                assert isinstance(clamp, Immediate)
                both = shuffled(name[2], value(given), value(by, np.int32), clamp.bits)
                put(to, both[: len(_parts(to))])
            case "redux":
                to, given, _ = operands
                found = value(given, numpy_type(name[-1]))
                total = REDUCED[name[2]].reduce(found, axis=1, dtype=found.dtype)
                put(to, [np.repeat(total[:, None], WARP, 1)])
            case "ldmatrix":
                to, where = operands
                rows, who = self._rows(where, len(_parts(to)), lanes)
                columns = (self.shared.load_by(*who, rows.ravel() + 2 * i, 2) for i in range(8))
                matrix = np.stack([*columns], -1).reshape(*rows.shape, 8)
                put(to, matrices_of_rows(matrix, "trans" in name))
            case "stmatrix":
                where, given = operands
                rows, who = self._rows(where, len(_parts(given)), lanes)
                matrix = rows_of_matrices([*map(value, _parts(given))], "trans" in name)
                for i in range(8):
                    self.shared.store_by(*who, rows.ravel() + 2 * i, matrix[..., i].ravel())

    def _rows(self, where: Operand, count: int, lanes: Any) -> tuple[Array, tuple[Array, Array]]:
        """Return where 8 rows per matrix begin [warps, 8 count], and each row's reader."""

        def of_rows(values: Array) -> Array:
            return values.reshape(-1, WARP)[:, : 8 * count]

        rows = of_rows(self._addresses(where, lanes))
        if (rows % 16).any():
            raise PtxError("a matrix's row is not at a multiple of 16 bytes")
        self._count(slice(rows.size), rows.ravel(), 16)
        who = self._who(lanes), self._program[lanes]
        return rows, (of_rows(who[0]).ravel(), of_rows(who[1]).ravel())


def _parts(operand: Operand) -> tuple[Scalar, ...]:
    assert not isinstance(operand, Address)
    return operand.parts if isinstance(operand, Vector) else (operand,)
