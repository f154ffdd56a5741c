"""The error tree: all errors that a user can cause, each reported in one line.

MtpbuildError
├── UsageError               the call itself is wrong: exit code 2
│   ├── RequestError         a prompt or sampling parameter that the engine can't take
│   │   ├── ContextLengthError   a prompt that is longer than the engine holds
│   │   └── TemplateLimitError   a chat template took too much time or memory
│   └── UnknownRecipeError   a model that is no recipe, folder or repository
├── DeadlineError            a request that took longer than its timeout
├── CheckpointError          config.json, safetensors or tokenizer files of the source model
│   ├── MissingWeightsError  a model whose weights are not on this machine
│   └── DownloadError        a repository that can't be fetched
├── BuildError               the build can't be done or was stopped
├── MissingDependencyError   packages that are not installed
└── EngineError              an engine that can't be loaded, or failed
    ├── EngineFormatError    engine.json missing, damaged or of another format version
    ├── EngineFileError      a file that is missing, foreign or changed
    └── RunError             a failure of a loaded engine
        ├── StepError            a program's own run raised: all requests end, the engine may go on
        ├── NotFiniteError       a request whose logits were NaN or infinite; others go on
        ├── RequestFailedError   a request that the host's own code failed at; others go on
        └── RankError            another rank of the engine died or hung
"""

import contextlib
from collections.abc import Iterator


def take_first_line(error: BaseException) -> str:
    """Return the first line of an error's message; the type's name if the message is empty."""
    line = str(error).partition("\n")[0] or type(error).__name__
    return line.encode("utf-8", "backslashreplace").decode()


def in_one_line(error: BaseException) -> str:
    """Return an error's message without line breaks."""
    return " ".join(str(error).split("\n"))


def advise_install(extras: str) -> str:
    """Return advice to install extras, such as `cpu,serve`; mtpbuild is on no package index."""
    return f"pip install '.[{extras}]' (in a clone) or pip install 'WHEEL[{extras}]'"


class MtpbuildError(Exception):
    """The base of all errors that a user can cause; `exit_code` is the command line's."""

    exit_code: int = 1  # of a command that ends with it


class UsageError(MtpbuildError):
    """A wrong call."""

    exit_code = 2


class RequestError(UsageError):
    """A prompt or a setting that the engine does not accept.

    setting: the name of the wrong setting, with which the message begins; "" if there is none.
    """

    def __init__(self, message: str, setting: str = "") -> None:
        assert message.startswith(setting), message
        super().__init__(message)
        self.setting = setting


class TemplateLimitError(RequestError):
    """A chat template that took too much time or memory for these messages."""


class ContextLengthError(RequestError):
    """A prompt with more tokens than an engine holds."""

    def __init__(self, tokens: int | None, limit: int) -> None:
        """Describe a prompt of `tokens` tokens; None: of more than `limit` tokens."""
        count = f"more than {limit}" if tokens is None else tokens
        super().__init__(
            f"the prompt has {count} tokens, this engine takes at most {limit - 1} (max_seq_len "
            f"{limit} holds prompt and output); build, or load, with a larger max_seq_len"
        )
        self.tokens, self.limit = tokens, limit


class DeadlineError(MtpbuildError, TimeoutError):
    """A request that took longer than its `timeout`; a TimeoutError, too."""


class UnknownRecipeError(UsageError):
    """A model that is no recipe, no checkpoint folder and no OWNER/NAME."""


class CheckpointError(MtpbuildError):
    """Files of the source model that are missing, damaged or unsupported."""


class MissingWeightsError(CheckpointError):
    """A model whose weights are not on this machine."""


class DownloadError(CheckpointError):
    """A Hugging Face repository that cannot be fetched."""


class BuildError(MtpbuildError):
    """A build that cannot be done or was stopped."""


class MissingDependencyError(MtpbuildError):
    """Packages that are needed and not installed."""


class EngineError(MtpbuildError):
    """An engine that cannot be loaded, or that failed."""


class EngineFormatError(EngineError):
    """An engine.json that is missing, damaged or of another format version."""


class EngineFileError(EngineError):
    """A file of the engine that is missing, foreign or changed."""


class RunError(EngineError):
    """A failure of a loaded engine."""


@contextlib.contextmanager
def explain_missing_package(
    user: str, extras: str = "", *packages: str, install: str = ""
) -> Iterator[None]:
    """Turn an ImportError in the block into advice on what to install.

    user: what needs the package, such as a flag. extras: of mtpbuild, which have the package.
    packages: the ones that may be missing; by default any. install: the advice, in place of extras;
    without either the ImportError stays as it is.
    """
    try:
        yield
    except ImportError as error:
        advice = install or (extras and advise_install(extras))
        if not advice or (packages and (error.name or "").partition(".")[0] not in packages):
            raise
        raise MissingDependencyError(f"{user} needs {error.name or error}: {advice}") from None


class StepError(RunError):
    """An exception from a program's own run; all requests end with it."""


def make_step_error(error: BaseException) -> EngineError:
    """Return an exception of a program's run as an error that ends all requests."""
    if isinstance(error, RankError | StepError):
        return error
    what = "" if isinstance(error, EngineError) else "a step failed: "
    failure = StepError(what + take_first_line(error))
    failure.__cause__ = error
    return failure


@contextlib.contextmanager
def running_program() -> Iterator[None]:
    """Let an exception of the block, which runs a program, end all requests."""
    try:
        yield
    except Exception as error:
        raise make_step_error(error) from error


class NotFiniteError(RunError):
    """Logits of a request that are NaN or infinite; other requests go on."""


class RequestFailedError(RunError):
    """An exception from the host's own code for one request; other requests go on."""


class RankError(RunError):
    """Another of the processes that share the engine died, hung or disagrees."""
