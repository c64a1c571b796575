"""What a user can act on. Anything else that escapes is a bug in onboard (exit code 1)."""

from __future__ import annotations


class OnboardError(Exception):
    """One clear sentence for the user, and the next thing to type.

    `message` names the file, tensor or key, what was expected and what was found.
    `hint` is the next command or edit.
    """

    kind = "error"
    exit_code = 1

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def as_dict(self) -> dict[str, str | int | None]:
        return {
            "kind": self.kind,
            "message": self.message,
            "hint": self.hint,
            "exit_code": self.exit_code,
        }


class InputError(OnboardError):
    """The recipe, the model or an argument is wrong (exit code 2)."""

    kind = "input"
    exit_code = 2


class EnvironmentFault(OnboardError):
    """The machine is wrong: engine missing, disk full, network unreachable (exit code 4)."""

    kind = "environment"
    exit_code = 4


GATE_FAILED = 3
INTERRUPTED = 130
