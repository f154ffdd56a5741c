"""Calls of tools in answers, in the forms of several models."""

from mtpbuild.runtime.tool_calls.calls import ToolCallParser
from mtpbuild.runtime.tool_calls.detect import detect_form
from mtpbuild.runtime.tool_calls.forms import FORMS, Form
from mtpbuild.runtime.tool_calls.tool_use import AnswerOptions, ToolUse, read_tool_use

__all__ = [
    "FORMS",
    "AnswerOptions",
    "Form",
    "ToolCallParser",
    "ToolUse",
    "detect_form",
    "read_tool_use",
]
