"""Parsers of tool calls in answers, for the call formats of several models."""

from mtpbuild.runtime.server.tools.calls import ToolCalls
from mtpbuild.runtime.server.tools.detect import form_of
from mtpbuild.runtime.server.tools.forms import FORMS, Form

__all__ = ["FORMS", "Form", "ToolCalls", "form_of"]
