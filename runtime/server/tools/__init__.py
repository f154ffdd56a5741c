"""Parsers of tool calls in answers, for the call formats of several models."""

from mtpbuild.runtime.server.tools.calls import ToolCalls
from mtpbuild.runtime.server.tools.detect import detect_form
from mtpbuild.runtime.server.tools.forms import FORMS, Form

__all__ = ["FORMS", "Form", "ToolCalls", "detect_form"]
