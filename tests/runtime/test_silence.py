"""Standard error is held back while compiled code runs, and other threads' lines are not lost."""

import os
import threading

import pytest

from mtpbuild.runtime.group.channel import Silence

THROWN = "Error: no route\nException raised from send\nframe #0: gloo\n\n[rank1]:[E1124 watchdog]\n"


def test_lines_come_in_the_end(capfd: pytest.CaptureFixture[str]) -> None:
    silence = Silence()
    for line in ("a request\n", "another one\n"):
        with silence:
            os.write(2, line.encode())
            assert capfd.readouterr().err == ""
        assert capfd.readouterr().err == line


def test_what_is_thrown_is_left_out(capfd: pytest.CaptureFixture[str]) -> None:
    silence = Silence()

    def fail() -> None:
        with silence:
            os.write(2, f"a request\n{THROWN}another one\n".encode())
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert capfd.readouterr().err == "a request\nanother one\n"
    with silence:
        os.write(2, b"Error: of nobody\n")
    assert capfd.readouterr().err == "Error: of nobody\n"


def test_threads_may_overlap(capfd: pytest.CaptureFixture[str]) -> None:
    """Standard error is itself again behind the last of them, whoever began."""
    silence, inside, outside = Silence(), threading.Event(), threading.Event()

    def other() -> None:
        with silence:
            inside.set()
            outside.wait()

    thread = threading.Thread(target=other)
    with silence:
        thread.start()
        inside.wait()
    os.write(2, b"one\n")
    outside.set()
    thread.join()
    os.write(2, b"two\n")
    assert capfd.readouterr().err == "one\ntwo\n"
